"""Run a module on a simulated node with a separate network namespace and host name: python enter_node.py NAMESPACE MODULE ..."""

from __future__ import annotations

import ctypes
import os
import runpy
import socket
import sys

CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000


def enter(namespace: str) -> None:
    """Move this process, which must not have threads yet."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    socket.sethostname(namespace)


if __name__ == "__main__":
    enter(sys.argv[1])
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
