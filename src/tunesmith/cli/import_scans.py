"""What transformers looks for in thousands of files at each import, remembered until one of the folders changes.

It reads all files of its models for their names, twice, and a file of every installed package. Only a command remembers.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from tunesmith.runs.writing import known_answer

SCANNING = "transformers.utils.import_utils"
"""The module whose `define_import_structure` reads the files of the models."""


def remember_scans() -> None:
    """From here on an import of transformers asks our memory first."""
    library: Any = importlib.metadata
    ask = library.packages_distributions

    def packages() -> Any:
        installed = [file for place in sys.path for file in sorted(Path(place).glob("*.*-info"))]
        return known_answer("packages", installed, lambda: dict(ask()))

    library.packages_distributions = packages
    inspecting: Any = inspect
    describe, home = inspect.getframeinfo, inspect.getmodule
    # torch notes file and line of each operator it defines; the text of that line costs 0.1 ms, a thousand times
    inspecting.getframeinfo = lambda frame, context=0: describe(frame, context)
    # and its module, for which inspect resolves the path of every module there is: 10,000 calls of the system
    inspecting.getmodule = lambda thing, file=None: _module_of(thing) if inspect.isframe(thing) else home(thing, file)
    sys.meta_path.insert(0, ScanFinder())


def _module_of(frame: Any) -> ModuleType | None:
    return sys.modules.get(frame.f_globals.get("__name__", ""))


class ScanFinder(MetaPathFinder):
    """Finds the module that scans, and nothing else."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that any other finder gives, with a loader of ours."""
        found = PathFinder.find_spec(name, path) if name == SCANNING else None
        if found is None or found.origin is None or not isinstance(found.loader, SourceFileLoader):
            return None
        return spec_from_file_location(name, found.origin, loader=_ScanLoader(name, found.origin))


class _ScanLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        scanning: Any = module
        ask, models = scanning.define_import_structure, Path(self.path).parents[1] / "models"

        def structure(module_path: Any, prefix: str | None = None) -> Any:
            if Path(module_path) not in (models, models / "__init__.py"):
                return ask(module_path, prefix)
            found = known_answer("names", [models, Path(self.path)], lambda: _to_json(ask(str(models))))
            before = "" if prefix is None else f"{prefix}."
            return {frozenset(needs): {before + name: set(names) for name, names in of.items()} for needs, of in found}

        scanning.define_import_structure = structure
        scanning.is_torchvision_available = lambda: False  # it loads torch's compiler, and no command looks at pictures


def _to_json(structure: Any) -> list[Any]:
    """Lists for what JSON has not: the packages that some modules need, then the names in each of them."""
    return [[sorted(needs), {name: sorted(names) for name, names in of.items()}] for needs, of in structure.items()]
