"""Hashes of the code that clients run, so that an agent and its coordinator can tell whether theirs is the same.

The list of modules is not kept by hand. It starts with the modules that an agent calls to compute and with those of the
experiment's algorithms, model and loss, and follows every import of the same package. Comments, docstrings and
formatting do not matter, nor does the version of Python.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import fedloom
from fedloom import user_code
from fedloom.errors import InputError
from fedloom.metrics import LOSSES, Metric
from fedloom.models import MODELS
from fedloom.syntax_hash import syntax_hash

PACKAGE = Path(fedloom.__file__).parent
ENTRY_POINTS = (
    "fedloom.federation.work",
    "fedloom.federation.evaluation",
    "fedloom.training.probe",
    "fedloom.data.federation",
)
LIBRARIES = ("builtins", "pydantic", "torch", "typing", "abc", "collections")  # compared by version, not by code


@dataclass(frozen=True)
class Module:
    """A Python module: the name by which both sides know it, its file, and the folder where its imports start."""

    name: str
    file: Path
    root: Path
    follows_folder: bool = False  # whether everything in its folder belongs to it: a file of the user


def code_hashes(experiment: Any, package: Path = PACKAGE) -> dict[str, str]:
    """Return the hash of every module that clients run in an experiment, by the module's name.

    `package` is the folder of fedloom itself; tests pass copies of it.
    """
    task, base = experiment.task, experiment.base
    model, loss = _resolve(task.model, base, MODELS), _resolve(task.loss, base, LOSSES)
    if model is None:
        raise InputError(f"There is no model '{task.model}'. Known: {', '.join(MODELS)}.")
    pending = [_find((name,), package.parent) for name in ENTRY_POINTS]
    for thing in (*(type(one) for one in experiment.algorithm.values()), model, loss):
        bases = thing.__mro__ if isinstance(thing, type) else (thing,)
        pending += [_module_of(one, base, package) for one in bases if _module_name(one).split(".")[0] not in LIBRARIES]
    for name in filter(user_code.is_code, task.metrics or ()):
        file = user_code.code_file(name, base)
        if file is None:
            pending.append(_module_of(user_code.code(name, base, Metric, float), base, package))
        else:
            pending.append(Module(_path_from(base, file), file, file.parent, True))
    hashes: dict[str, str] = {}
    while pending:
        module = pending.pop()
        if module is not None and module.name not in hashes:
            hashes[module.name], imports = _inspect(module.file.read_bytes())
            pending += [_imported(module, names, package) for names in imports]
    return dict(sorted(hashes.items()))


def code_files(name: str, base: Path) -> dict[str, str]:
    """Return the SHA-256 of a code file and of all files in its folder that it imports, by path. Nothing is run."""
    file = user_code.code_file(name, base)
    pending = [] if file is None else [Module("", file, file.parent, True)]
    found: dict[str, str] = {}
    while pending:
        module = pending.pop()
        path = _path_from(base, module.file)
        if path not in found:
            found[path] = user_code.fingerprint(module.file)
            try:
                imports = _inspect(module.file.read_bytes())[1]
            except (SyntaxError, ValueError) as error:
                raise InputError(f"{module.file} is not Python code: {error}.") from None
            imported = (_imported(module, names, PACKAGE) for names in imports)
            pending += [one for one in imported if one is not None and not one.name.startswith("fedloom.")]
    return found


def _path_from(base: Path, file: Path) -> str:
    return Path(os.path.relpath(file, base.resolve())).as_posix()


def different_modules(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return the names of modules that only one side has, or whose code differs."""
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


# --- which modules


def _resolve(name: str, base: Path, shipped: Mapping[str, Any]) -> Any:
    return user_code.code(name, base, nn.Module, Tensor) if user_code.is_code(name) else shipped.get(name)


def _module_name(thing: Any) -> str:
    return str(getattr(thing, "__module__", None) or type(thing).__module__)


def _module_of(thing: Any, base: Path, package: Path) -> Module:
    """Return the module that defines a class or a function."""
    name = _module_name(thing)
    if name.startswith("fedloom."):
        return _find((name,), package.parent) or Module(name, package, package)
    path = getattr(sys.modules.get(name), "__file__", None) or inspect.getsourcefile(thing)
    if path is None:
        raise InputError(f"{thing!r} has no source file, so two machines cannot compare its code.")
    file = Path(path)
    if name.startswith(user_code.PREFIX):  # a file beside the experiment: each machine has it in another folder
        return Module(_path_from(base, file), file, file.parent, True)
    depth = name.count(".") + (file.name == "__init__.py")
    return Module(name, file, file.parents[depth])


def _imported(importer: Module, names: Sequence[str], package: Path) -> Module | None:
    """Return the imported module if it belongs to fedloom, to the importer's own package or to its folder."""
    if names[-1].startswith("."):
        parent = importer.name if importer.file.name == "__init__.py" else importer.name.rpartition(".")[0]
        names = [importlib.util.resolve_name(name, parent) for name in names]
    top = names[-1].partition(".")[0]
    if top == "fedloom":
        return _find(names, package.parent)
    if not importer.follows_folder and top != importer.name.partition(".")[0]:
        return None
    found = _find(names, importer.root)
    return found and replace(found, follows_folder=importer.follows_folder)


def _find(names: Sequence[str], root: Path) -> Module | None:
    """Return the first of these modules that exists below a folder."""
    for name in names:
        path = root.joinpath(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")
        if file.is_file() and name != "fedloom":  # the top package only lists public names and the version
            return Module(name, file, root)
    return None


# --- one module's code


@lru_cache(maxsize=1024)
def _inspect(source: bytes) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """Return the hash of a module's code, and what it imports: for each import, names that it may stand for."""
    tree = ast.parse(source)
    imports: list[tuple[str, ...]] = []
    _collect_imports(tree, imports)
    return syntax_hash(tree), tuple(imports)


def _collect_imports(node: ast.AST, found: list[tuple[str, ...]]) -> None:
    """Note every import that runs; those for type checkers only do not."""
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for statement in node.orelse:
            _collect_imports(statement, found)
        return
    if isinstance(node, ast.Import):
        found.extend((alias.name,) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        source = "." * node.level + (node.module or "")
        separator = "." if node.module else ""
        found.extend((f"{source}{separator}{alias.name}", source) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler)):
            _collect_imports(child, found)
