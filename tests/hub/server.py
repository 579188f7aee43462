"""A local HTTP server with the Hub's API as far as huggingface_hub 2.4 and datasets 5.2 use it, for downloads and uploads.

Each line in `ROUTES` maps requests to a method. Uploads use Git LFS, so clients need HF_HUB_DISABLE_XET=1; they are stored in
`Repo.files` and require a token.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".parquet", ".bin")
"""Files stored in LFS on the real Hub: `resolve` redirects to the storage host, with X-Linked-* headers."""


@dataclass
class Repo:
    """One repository at one commit."""

    files: dict[str, bytes]
    commits: list[str] = field(default_factory=list)
    """Messages of uploaded commits, in order."""

    @property
    def sha(self) -> str:
        return hashlib.sha1(
            b"".join(k.encode() + hashlib.sha1(v).digest() for k, v in sorted(self.files.items()))
        ).hexdigest()

    def etag(self, path: str) -> str:
        data = self.files[path]
        if path.endswith(LARGE):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def entry(self, path: str) -> dict[str, Any]:
        data = self.files[path]
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": self.etag(path)[:40]}
        if path.endswith(LARGE):
            entry["lfs"] = {"oid": self.etag(path), "size": len(data), "pointerSize": 130}
        return entry

    def listing(self, folder: str, *, recursive: bool) -> list[dict[str, Any]]:
        prefix = f"{folder}/" if folder else ""
        inside = [p for p in self.files if p.startswith(prefix)]
        folders = {"/".join(p.split("/")[:i]) for p in inside for i in range(1, len(p.split("/")))}
        found = [
            {"type": "directory", "path": f, "size": 0, "oid": "0" * 40}
            for f in sorted(folders)
            if f != folder and f.startswith(prefix)
        ]
        found += [self.entry(p) for p in sorted(inside)]
        return [e for e in found if recursive or "/" not in e["path"][len(prefix) :]]


@dataclass
class Hub:
    """Repositories by (kind, id), old names, recorded requests, and faults to inject."""

    repos: dict[tuple[str, str], Repo] = field(default_factory=dict)
    renamed: dict[tuple[str, str], str] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    """Number of bytes after which downloads of a path are interrupted, until the entry is removed."""
    uploaded: dict[str, bytes] = field(default_factory=dict)
    """Uploaded large files by digest, until a commit refers to them."""
    seen: list[str] = field(default_factory=list)
    url: str = ""
    storage: str = ""
    """A different host name, as on the real Hub: a HEAD request for `resolve` stops at the redirect."""

    def add(self, kind: str, name: str, files: dict[str, bytes]) -> Repo:
        """Add a repository that clients can read."""
        return self.repos.setdefault((kind, name), Repo(files))

    def downloads(self) -> list[str]:
        """Return the requested files."""
        return [
            line.removeprefix("GET ")
            for line in self.seen
            if line.startswith("GET ") and ("/resolve/" in line or "/storage/" in line)
        ]


_NAME = r"(?P<name>[\w.-]+(?:/[\w.-]+)?)"
ROUTES = [
    ("GET", rf"/api/(?P<kind>models|datasets)/{_NAME}/revision/(?P<revision>[^/]+)", "info"),
    ("GET", rf"/api/(?P<kind>models|datasets)/{_NAME}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?", "tree"),
    ("POST", rf"/api/(?P<kind>models|datasets)/{_NAME}/paths-info/(?P<revision>[^/]+)", "paths"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("POST", rf"/api/(?P<kind>models|datasets)/{_NAME}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"/api/(?P<kind>models|datasets)/{_NAME}/commit/(?P<revision>[^/]+)", "commit"),
    ("POST", rf"/(?:(?P<kind>datasets)/)?{_NAME}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/lfs/(?P<digest>[0-9a-f]{64})", "receive"),
    ("HEAD GET", r"/storage/(?P<digest>[0-9a-f]{64})", "storage"),
    ("HEAD GET", rf"/(?:(?P<kind>datasets)/)?{_NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    ("GET", rf"/api/(?P<kind>models|datasets)/{_NAME}", "info"),
]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def answer(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        path = unquote(url.path)
        self.hub.seen.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        for methods, pattern, verb in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in methods.split():
                parts = found.groupdict()
                if "name" in parts:
                    self.in_repo(verb, parts, path)
                else:
                    getattr(self, verb)(**parts)
                return
        self.reply(404, b"{}")

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def in_repo(self, verb: str, parts: dict[str, Any], path: str) -> None:
        kind, name = parts.pop("kind") or "models", parts.pop("name")
        if moved := self.hub.renamed.get((kind, name)):
            self.reply(307, b"", {"Location": path.replace(f"/{name}", f"/{moved}", 1)})
            return
        repo = self.hub.repos.get((kind, name))
        if verb in ("preupload", "commit", "batch") and "Authorization" not in self.headers:
            self.reply(401, b'{"error": "Invalid username or password."}')
        elif repo is None:
            self.refuse("RepoNotFound", "Repository not found")
        elif parts.get("revision") not in (None, "main", repo.sha):
            self.refuse("RevisionNotFound", "Invalid rev id")
        else:
            parts.pop("revision", None)
            getattr(self, verb)(repo=repo, name=name, **parts)

    def info(self, *, repo: Repo, name: str) -> None:
        flags = dict.fromkeys(("private", "gated", "disabled"), False)
        siblings = [{"rfilename": path} for path in sorted(repo.files)]
        self.json({"id": name, "sha": repo.sha, **flags, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings})

    def tree(self, *, repo: Repo, name: str, path: str | None) -> None:
        folder = (path or "").strip("/")
        if folder and not any(p.startswith(f"{folder}/") for p in repo.files):
            self.refuse("EntryNotFound", f"{folder} does not exist")
            return
        self.json(repo.listing(folder, recursive=self.query.get("recursive", ["false"])[0].lower() in ("true", "1")))

    def paths(self, *, repo: Repo, name: str) -> None:
        if self.headers.get("Content-Type", "").startswith("application/json"):
            asked = json.loads(self.body)["paths"]
        else:
            asked = parse_qs(self.body.decode())["paths"]
        folders = [
            {"type": "directory", "path": p, "size": 0, "oid": "0" * 40}
            for p in asked
            if any(f.startswith(f"{p}/") for f in repo.files)
        ]
        self.json([repo.entry(p) for p in asked if p in repo.files] + folders)

    def resolve(self, *, repo: Repo, name: str, path: str) -> None:
        if path not in repo.files:
            self.refuse("EntryNotFound", "Entry not found", {"X-Repo-Commit": repo.sha})
            return
        headers = {"X-Repo-Commit": repo.sha, "ETag": f'"{repo.etag(path)}"', "Accept-Ranges": "bytes"}
        if path.endswith(LARGE):
            linked = {"X-Linked-Etag": f'"{repo.etag(path)}"', "X-Linked-Size": str(len(repo.files[path]))}
            self.reply(302, b"", headers | linked | {"Location": f"{self.hub.storage}/storage/{repo.etag(path)}"})
        else:
            self.send_file(path, repo.files[path], headers)

    def storage(self, *, digest: str) -> None:
        for repo in self.hub.repos.values():
            for path, data in repo.files.items():
                if path.endswith(LARGE) and repo.etag(path) == digest:
                    self.send_file(path, data, {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"})
                    return
        self.reply(404, b"")

    def create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        kind = f"{asked.get('type') or 'model'}s"
        known = (kind, name) in self.hub.repos
        self.hub.add(kind, name, {".gitattributes": b"*.safetensors filter=lfs\n"})
        answer = {"name": name, "id": name, "url": f"{self.hub.url}/{name}"}
        self.reply(409 if known else 200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def validate(self) -> None:
        self.json({"warnings": [], "errors": []})

    def preupload(self, *, repo: Repo, name: str) -> None:
        paths = [f["path"] for f in json.loads(self.body)["files"]]
        modes = {p: "lfs" if p.endswith(LARGE) else "regular" for p in paths}
        known = {p: repo.etag(p) for p in paths if p in repo.files}
        self.json(
            {"files": [{"path": p, "uploadMode": modes[p], "shouldIgnore": False, "oid": known.get(p)} for p in paths]}
        )

    def batch(self, *, repo: Repo, name: str) -> None:
        objects = json.loads(self.body)["objects"]
        places = [{**o, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{o['oid']}"}}} for o in objects]
        self.json({"transfer": "basic", "objects": places})

    def receive(self, *, digest: str) -> None:
        right = hashlib.sha256(self.body).hexdigest() == digest
        if right:
            self.hub.uploaded[digest] = self.body
        self.reply(200 if right else 422, b"")

    def commit(self, *, repo: Repo, name: str) -> None:
        for item in (json.loads(line) for line in self.body.splitlines()):
            value = item["value"]
            if item["key"] == "header":
                repo.commits.append(value["summary"])
            elif item["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                repo.files[value["path"]] = self.hub.uploaded[value["oid"]]
            else:
                repo.files.pop(value["path"], None)
        self.json({"commitUrl": f"{self.hub.url}/{name}/commit/{repo.sha}", "commitOid": repo.sha})

    def send_file(self, path: str, data: bytes, headers: dict[str, str]) -> None:
        status = 200
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(found[1]), int(found[2] or len(data) - 1)
            headers |= {"Content-Range": f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"}
            data, status = data[first : last + 1], 206
        if self.command == "GET" and path in self.hub.cut:
            self.reply(status, data[: self.hub.cut[path]], headers, length=len(data))
            self.close_connection = True
        else:
            self.reply(status, data, headers)

    def json(self, value: object) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def refuse(self, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message} | (headers or {})
        self.reply(404, json.dumps({"error": message}).encode(), headers)

    def reply(
        self, status: int, data: bytes, headers: dict[str, str] | None = None, *, length: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing; `Hub.seen` records the requests."""


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serve the hub on a free port of 127.0.0.1 until the block ends; `hub.url` is its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    hub.storage = f"http://localhost:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
