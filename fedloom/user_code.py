"""Your own code: load what an experiment file names (`net.py:Net`, `package.module:Net`), and show where it fails."""

from __future__ import annotations

import ast
import builtins
import difflib
import dis
import hashlib
import importlib
import inspect
import linecache
import os
import sys
import sysconfig
import traceback
import typing
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from threading import RLock
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fedloom.errors import FedloomError, InputError, about_path, lines_around, nearest
from fedloom.syntax_hash import syntax_hash

NO_SUPER = " Does its __init__ begin with super().__init__()? Otherwise torch cannot find its layers."
SIDE_BY_SIDE = (
    "Many clients are computed at once (torch.vmap), so this line cannot ask a tensor for its value (if, float, "
    ".item()) or draw random numbers. Use functions of torch, such as torch.where; or write reads_batch = True in the "
    "class of the algorithm, and clients are trained one by one."
)
PREFIX = "fedloom_user_"  # of the names under which user files are loaded
CLOSE = 0.75  # how alike two names are, from 0 to 1, of which one may be the other misspelt
_LOADING = RLock()  # one file at a time: short names of modules mean those beside it
_LIBRARIES = (os.path.join(sysconfig.get_path("stdlib"), ""), os.path.join(Path(__file__).parent, ""), "<frozen ")


def is_code(name: str) -> bool:
    """Whether a name refers to your own code, not to something that fedloom ships."""
    return ":" in name


def code_file(name: str, base: Path) -> Path | None:
    """Return the file that a name refers to, or None if it refers to a module."""
    where = name.rpartition(":")[0]
    return (base / where).resolve() if where.endswith(".py") else None


def code(name: str, base: Path, *kinds: type) -> Any:
    """Return the object that `file.py:Name` (relative to `base`) or `package.module:Name` names.

    A file beside the experiment is your own, and may define what it likes. An installed module has functions of all
    kinds, such as `os:system`: its object must be one of `kinds`, a class of them, or a function that declares to
    return one. The check calls nothing.
    """
    where, _, what = name.rpartition(":")
    if not where or not what:
        raise InputError(f"'{name}' names no code: write file.py:Name or package.module:Name.")
    file = code_file(name, base)
    module = _load_file(file) if file is not None else _import(where, name)
    if not hasattr(module, what):
        public = {
            known: value
            for known, value in vars(module).items()
            if known[0] != "_" and not isinstance(value, ModuleType)
        }
        defined = [known for known, value in public.items() if getattr(value, "__module__", None) == module.__name__]
        listed, known = "", [*public]
        if file is not None and defined:  # what it imports is no answer
            listed, known = f" It defines {', '.join(defined[:8])}.", defined
        raise InputError(f"'{name}': {where} has no '{what}'.{listed}{nearest(what, known)}")
    found = getattr(module, what)
    if file is None and not _gives(found, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise InputError(
            f"'{name}' cannot be used here: in an installed module, it must be a class that inherits from {expected}, "
            f"or a function whose annotation says that it returns one. It was not called."
        )
    return found


def _gives(found: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether an object is of some kinds, or a class or function that makes such objects."""
    if isinstance(found, type):
        return issubclass(found, kinds)
    if isinstance(found, kinds):
        return True
    try:
        returned = typing.get_type_hints(found).get("return")
    except Exception:  # no function, or annotations that only a type checker can read
        return False
    returned = typing.get_origin(returned) or returned
    return isinstance(returned, type) and issubclass(returned, kinds)


def fingerprint(file: Path) -> str:
    """Return a hash of a file's content."""
    _must_exist(file)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def code_hash(file: Path) -> str:
    """Return a hash of a file's code: comments, docstrings and formatting decide no result."""
    _must_exist(file)
    try:
        return syntax_hash(ast.parse(file.read_bytes()))
    except (SyntaxError, ValueError):  # loading it says what is wrong
        return fingerprint(file)


def imported_beside(file: Path) -> list[Path]:
    """Return the files below a code file's folder that it imports, directly or not. Nothing is run."""
    found, pending = dict[Path, None](), [file]
    while pending:
        importer = pending.pop()
        try:
            tree = ast.parse(importer.read_bytes())
        except (OSError, SyntaxError, ValueError):  # loading it says what is wrong
            continue
        for node in ast.walk(tree):
            places = [(file.parent, alias.name) for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                start = (file.parent, *importer.parents)[min(node.level, len(importer.parents))]
                module = node.module or ""
                places = [(start, module), *((start, f"{module}.{alias.name}") for alias in node.names)]
            paths = [start.joinpath(*filter(None, name.split("."))) for start, name in places]
            files = [one for path in paths for one in (path.with_suffix(".py"), path / "__init__.py")]
            new = [one for one in files if one.is_file() and one != file and one not in found]
            found |= dict.fromkeys(new)
            pending += new
    return list(found)


def code_fingerprint(thing: Any) -> str:
    """Return a hash of the code of a class, function or object: edited code is another experiment.

    It hashes the source text if Python has it, and the pickled code otherwise. For code of fedloom and torch it returns
    the name, because their versions are recorded.
    """
    kind = thing if isinstance(thing, type) or (callable(thing) and hasattr(thing, "__code__")) else type(thing)
    if str(kind.__module__).split(".")[0] in ("fedloom", "torch", "builtins"):
        return f"{kind.__module__}.{kind.__qualname__}"
    try:
        text = inspect.getsource(kind).encode()
        if text.count(b"lambda") > 1 and isinstance(kind, FunctionType):  # the text of one is that of its whole line
            text += b"".join(_compiled(kind.__code__))
    except (OSError, TypeError):
        import cloudpickle

        text = cloudpickle.dumps(kind)
    return hashlib.sha256(text).hexdigest()


def _compiled(code: CodeType) -> Iterator[bytes]:
    """Yield what tells the code of two functions apart that are on the same line."""
    yield code.co_code + repr((code.co_names, code.co_varnames)).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _compiled(constant)
        else:  # the order of a set differs between processes
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant).encode()


def said(error: BaseException) -> str:
    """Return what an error says and, if it comes from your own code, the file, the line and the lines around it."""
    if str(error).startswith("vmap: "):  # torch's words are for those who call vmap
        return f"{SIDE_BY_SIDE}{place_of(error)}"
    kind = "" if isinstance(error, FedloomError) else f"{type(error).__name__}: "  # fedloom's own say it all
    late = isinstance(error, ModuleNotFoundError) and _lies_beside(error)
    hint = ". Import a file that lies beside yours at the top, not inside of a function" if late else ""
    if isinstance(error, TypeError) and "unsupported operand" in str(error) and "'dict'" in str(error):
        hint = ". Weights are trees, which are dicts of tensors: use add, sub and scale of fedloom.algorithm"
    if isinstance(error, AttributeError) and "before Module.__init__() call" in str(error):
        hint = f".{NO_SUPER}"
    return f"{kind}{error}{hint}{place_of(error)}"


def _lies_beside(error: ModuleNotFoundError) -> bool:
    """Whether a module that was not found is a file beside one of those that were running."""
    folders = {Path(frame.filename).parent for frame in traceback.extract_tb(error.__traceback__)}
    return any((folder / f"{error.name}.py").is_file() for folder in folders)


def place_of(error: BaseException) -> str:
    """Return where in your own code an error was raised, with the lines around it; empty if it was raised elsewhere."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        places = [(error.filename, error.lineno, "")]
    else:
        frames = traceback.extract_tb(error.__traceback__)
        places = [(frame.filename, frame.lineno or 0, f", in {frame.name}") for frame in frames]
    own = [place for place in places if is_own(place[0])]
    if not own:
        return ""
    file, line, function = own[-1]
    return f"\n  {_short(file)}, line {line}{function}{lines_around(linecache.getlines(file), line)}"


def defined_at(thing: object) -> str:
    """Return where your own function or module computes, as in ` (nets.py, line 3)`; empty for the code of others."""
    code = getattr(thing, "__code__", None) or getattr(getattr(type(thing), "forward", None), "__code__", None)
    return f" ({_short(code.co_filename)}, line {code.co_firstlineno})" if code and is_own(code.co_filename) else ""


def kind_of(value: Any) -> str:
    """Say what kind of value your code gave: the shape and dtype of a tensor, or else its class.

    >>> kind_of(None), kind_of(1)
    ('None', 'an int')
    """
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeioAEIOU' else 'a'} {name}"


def named(method: Any) -> str:
    """Return an algorithm's method by name and, if it is your own, its place: `Mine.correct (mine.py, line 3)`."""
    owner = getattr(method, "__self__", None)
    name = getattr(method, "__name__", repr(method))
    return f"{name if owner is None else f'{type(owner).__name__}.{name}'}{defined_at(method)}"


def wrong_return(method: Any, returned: str, needed: str) -> InputError:
    """Return the error for an algorithm's method that returned something else than it must, with its file and line."""
    return InputError(f"{named(method)} returned {returned}. It must return {needed}.")


def has_own_class(algorithm: object) -> bool:
    """Whether an algorithm is of a class of yours."""
    return type(algorithm).__module__.split(".")[0] != "fedloom"


def own_classes(kind: type) -> list[type]:
    """Return the class and its bases, without those of fedloom and pydantic."""
    return [one for one in kind.__mro__ if one.__module__.split(".")[0] not in ("fedloom", "pydantic", "builtins")]


def misspelt(kind: type) -> Iterator[str]:
    """Say which methods of your own class fedloom does not call, and whose names are close to those that it calls."""
    kinds = own_classes(kind)
    theirs = {
        name
        for one in kinds
        for name, value in vars(one).items()
        if name[0] != "_" and isinstance(value, (FunctionType, property))
    }
    of_fedloom = [one for one in kind.__mro__ if one.__module__.split(".")[0] == "fedloom"]
    hooks = {name for one in of_fedloom for name in vars(one) if name[0] != "_"}
    inherited = {name for one in kind.__mro__ if one not in kinds for name in vars(one)}
    modules = [vars(sys.modules[one.__module__]).values() for one in kinds if one.__module__ in sys.modules]
    called = {name for one in (*_methods(kinds), *_functions(*modules)) for name in _names_in(one.__code__)}
    for name in sorted(theirs - inherited - called):
        for close in difflib.get_close_matches(name.lower(), hooks, 1, CLOSE):
            yield f"{kind.__name__} defines `{name}`, which fedloom does not call. Did you mean `{close}`?"


def calls(kind: type, name: str) -> bool:
    """Whether the methods of a class mention a name, also in functions of their module that they use."""
    pending, met = _methods(list(kind.__mro__)), set[FunctionType]()
    while pending:
        function = pending.pop()
        met.add(function)
        names = _names_in(function.__code__)
        if name in names:
            return True
        used = _functions(function.__globals__[one] for one in names & function.__globals__.keys())
        pending += [one for one in used if one not in met and one.__module__ == function.__module__]
    return False


def _methods(kinds: Iterable[type]) -> list[FunctionType]:
    """Return the functions of classes, also those of properties, class methods and static methods."""
    return _functions(
        getattr(value, "fget", getattr(value, "__func__", value)) for kind in kinds for value in vars(kind).values()
    )


def _functions(*groups: Iterable[Any]) -> list[FunctionType]:
    bare = (inspect.unwrap(value) for values in groups for value in values if callable(value))
    return [value for value in bare if isinstance(value, FunctionType)]


@lru_cache(4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """Return the names that some code reads, also inside its functions, but for Python's own, such as `map`.

    The body of a class only stores its names.
    """
    inner = (_names_in(part) for part in code.co_consts if isinstance(part, CodeType))
    loads = (one for one in dis.get_instructions(code) if one.opname.startswith("LOAD_"))
    read = ((one.opname, str(one.argval)) for one in loads)
    named = (name for how, name in read if how not in ("LOAD_GLOBAL", "LOAD_NAME") or not hasattr(builtins, name))
    return frozenset(named).union(*inner)


def is_own(file: str) -> bool:
    """Whether code belongs to the user: not to fedloom, Python or an installed package."""
    installed = {"site-packages", "dist-packages"} & {*Path(file).parts}
    return not installed and not file.startswith(_LIBRARIES)


def is_own_module(module: ModuleType) -> bool:
    """Whether a module belongs to the user: a script, a notebook, a file or a folder."""
    places = (getattr(module, "__file__", None), *getattr(module, "__path__", ()))
    return module.__name__ == "__main__" or is_own(next(filter(None, places), "<frozen "))


def _short(file: str) -> str:
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file


def _must_exist(file: Path) -> None:
    if not file.is_file():
        beside = sorted(found.name for found in file.parent.glob("*.py"))
        raise InputError(f"There is no file {file}.{about_path(file) or nearest(file.name, beside)}")


def _load_file(file: Path) -> ModuleType:
    _must_exist(file)
    module = ModuleType(file.stem)
    try:
        with _LOADING, _beside(file.parent):
            _execute(module, file)
    except Exception as error:
        raise InputError(f"{file} failed while it was loaded: {said(error)}") from error
    return module


def _execute(module: ModuleType, file: Path) -> None:
    """Run a file as a module, under a name that depends on its path: two folders can each have a net.py."""
    import cloudpickle

    module.__name__ = f"{PREFIX}{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    cloudpickle.register_pickle_by_value(module)  # worker processes cannot import it by that name
    # what runs is the text that people read and hash, not bytecode that lies in __pycache__ beside it
    exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), vars(module))


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Let a file import what lies beside it, as a script can. Afterwards, nothing else finds it by its short name."""
    finder = _Beside(folder)
    tops = {*(one.stem for one in folder.glob("*.py")), *(one.parent.name for one in folder.glob("*/__init__.py"))}
    known = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in tops - {"__main__"}}
    hidden = {name: module for name, module in known.items() if is_own(getattr(module, "__file__", None) or "<frozen ")}
    for name in hidden:  # modules of another folder with the same names
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.found:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


class _Beside(MetaPathFinder, Loader):
    """Finds modules and packages in a folder, and runs them as your own files. Modules of Python itself go first."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.found = folder, set[str]()

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        parent = name.rpartition(".")[0]
        if name in sys.stdlib_module_names or (parent and parent not in self.found):
            return None
        package = self.folder.joinpath(*name.split("."))
        file = package / "__init__.py"
        inside = [str(package)] if file.is_file() else None
        file = file if inside else package.with_name(f"{package.name}.py")
        if not file.is_file():
            return None
        self.found.add(name)
        return spec_from_file_location(name, file, loader=self, submodule_search_locations=inside)

    def exec_module(self, module: ModuleType) -> None:
        _execute(module, Path(str(module.__file__)))


def _import(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(
            f"'{name}': there is no module '{error.name}'. Write file.py:Name for a file beside the experiment, or "
            "package.module:Name for an installed one."
        ) from error
    except Exception as error:
        raise InputError(f"'{name}' failed while it was imported: {said(error)}") from error
