"""One module opens files for writing: `tunesmith.run.writing`. Libraries that write by themselves do so in folders just made."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from source_tree import FILES, dotted, name_of, parse

HOME = "run/writing.py"
OPENERS = ("open_regular", "open_in_place")
"""What gives a descriptor that may be opened in any mode: it refuses links, pipes and devices."""
WRITERS = {"write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "mkstemp", "NamedTemporaryFile"}
COPIERS = {"copy", "copy2", "copyfile", "copytree", "move"}
LIBRARIES = {
    "save_pretrained",
    "save_file",
    "save_to_json",
    "save_to_disk",
    "metadata_save",
    "savefig",
    "to_csv",
    "dump",
}
IN_NEW_FOLDERS = {
    "curves/plot.py": {"figure_bytes"},  # into memory
    "notebook/estimators.py": {"fill"},
    "predict/facts.py": {"describe"},
    "export/exporting.py": {"_export"},
    "keep/weight_files.py": {"write_tensors"},
    "trainer/checkpoints.py": {"_describe", "save_companions"},
    "trainer/saving.py": {"write", "fill", "save_state"},
}
"""Functions that let a library write: into memory, or into a folder that `write_sealed` or the function itself made."""


def writes_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(function it is in, what it does) for each call that opens a file for writing."""

    def walk(node: ast.AST, inside: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            name = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else inside
            if isinstance(child, ast.Call) and (what := kind_of_write(child)) is not None:
                yield inside, what
            yield from walk(child, name)

    return walk(tree, "")


def kind_of_write(call: ast.Call) -> str | None:
    called = dotted(call.func)
    last = called.rsplit(".", 1)[-1]
    if called == "os.open":
        text = ast.unparse(call)
        writes = any(flag in text for flag in ("O_WRONLY", "O_RDWR", "O_CREAT")) and "devnull" not in text
        return text if writes else None
    if last == "open" and called != "webbrowser.open":
        at = 1 if called == "open" else 0
        mode = next((k.value for k in call.keywords if k.arg == "mode"), call.args[at] if len(call.args) > at else None)
        if called == "open" and isinstance(call.args[0], ast.Call) and dotted(call.args[0].func) in OPENERS:
            return None
        written = isinstance(mode, ast.Constant) and isinstance(mode.value, str) and set("wax+") & set(mode.value)
        return ast.unparse(call) if written else None
    if last in WRITERS or last in LIBRARIES or (called.startswith("shutil.") and last in COPIERS):
        return ast.unparse(call)
    return None


def test_no_other_module_opens_files_for_writing() -> None:
    found = []
    for path in FILES:
        name = name_of(path)
        allowed = IN_NEW_FOLDERS.get(name, set())
        writes = writes_in(parse(path)) if name != HOME else ()
        found += [f"{name}: {where or 'module'}: {what}" for where, what in writes if where not in allowed]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "open(p, 'w')",
        "open(p, mode='ab')",
        "p.open('r+b')",
        "os.open(p, os.O_RDWR)",
        "p.write_text('x')",
        "p.write_bytes(b'x')",
        "shutil.copyfile(a, b)",
        "tempfile.mkstemp()",
        "model.save_pretrained(folder)",
        "save_file(tensors, p)",
        "figure.savefig(p)",
        "json.dump(x, f)",
        "def f():\n    with open(p, 'wb') as f: pass",
    ],
)
def test_the_walk_finds_each_way_to_write(source: str) -> None:
    assert len(list(writes_in(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    "source",
    ["open(p)", "p.open('rb')", "os.open(os.devnull, os.O_WRONLY)", "open(open_in_place(p), 'r+b')", "json.dumps(x)"],
)
def test_the_walk_leaves_reading_alone(source: str) -> None:
    assert list(writes_in(ast.parse(source))) == []
