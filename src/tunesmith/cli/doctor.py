"""`tunesmith doctor RUN`: checks every checkpoint, the journal, the lock and the export, and says what to do."""

from __future__ import annotations

import argparse
import json
import os

from tunesmith.cli.parser import add_flag

MARKS = {"sound": "ok", "note": "note", "useless": "useless", "broken": "BROKEN"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_flag(parser, "run_folder RUN", "run folder")
    add_flag(parser, "--repair", "remove what nothing can use: leftovers, damaged copies")
    add_flag(parser, "--json", "print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the state of each part; 0 if nothing is damaged, else 5."""
    from tunesmith.config.load import load_config
    from tunesmith.errors import ConfigError
    from tunesmith.runs.doctor import Examined, examine, is_sound, repair
    from tunesmith.runs.folder import RunDir, open_run
    from tunesmith.runs.manifest import MANIFEST

    folder = RunDir(args.run_folder)
    if not any(os.path.lexists(checkpoint / MANIFEST) for checkpoint in folder.checkpoints()):
        folder = open_run(args.run_folder)
    removed = repair(folder) if args.repair else []
    parts = examine(folder)
    try:
        load_config(folder.config_file, need_data=False)
        parts.insert(1, Examined(folder.config_file.name, "sound", "reads well"))
    except (ConfigError, OSError) as error:
        text = f"{error}. Give the command of the run once more: it writes the file again"
        parts.insert(1, Examined(folder.config_file.name, "note", text))
    if args.json:
        listed = [{"name": p.name, "health": p.health, "text": p.text} for p in parts]
        print(json.dumps({"run": str(folder.path), "sound": is_sound(parts), "removed": removed, "parts": listed}))
        return 0 if is_sound(parts) else 5
    for name in removed:
        print(f"removed {name}")
    width = max(len(part.name) for part in parts)
    for part in parts:
        print(f"{MARKS[part.health]:<8}{part.name:<{width}}  {part.text}")
    if not args.repair and any(part.health == "useless" for part in parts):
        print(f"tunesmith doctor {args.run_folder} --repair removes what is useless")
    return 0 if is_sound(parts) else 5
