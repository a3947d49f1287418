"""Other people's loaders: a function named in the experiment file, `my_module:loader` or `file.py:loader`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from pydantic import ConfigDict

from fedloom.data.federation import Dataset, as_dataset
from fedloom.data.sources.base import Source, locate
from fedloom.errors import InputError, nearest


class Custom(Source):
    """Calls `reference` with the keys of the table; it returns a Dataset, (x, y) or (x, y, client).

    A loader that has a parameter `base` is told the folder that relative paths refer to.
    """

    model_config = ConfigDict(extra="allow")
    reference: ClassVar[str]

    def load(self, base: Path) -> Dataset:
        loader = resolve(self.reference, base)
        values = dict(self.model_extra or {})
        parameters = inspect.signature(loader).parameters
        if "base" in parameters and "base" not in values:
            values["base"] = base
        try:
            inspect.signature(loader).bind(**values)
        except TypeError as error:
            raise InputError(
                f"The loader '{self.reference}' cannot be called with {', '.join(values) or 'no keys'}: {error}. "
                f"Its parameters are: {', '.join(parameters) or 'none'}."
            ) from None
        loaded = loader(**values)
        if isinstance(loaded, Dataset):
            return loaded
        if isinstance(loaded, tuple) and len(loaded) in (2, 3):
            return as_dataset(loaded[0], loaded[1], client=loaded[2] if len(loaded) == 3 else None)
        raise InputError(
            f"The loader '{self.reference}' must return a Dataset, (x, y) or (x, y, client). "
            f"Got {type(loaded).__name__} instead."
        )


def custom(reference: str) -> type[Custom]:
    """The source class of one loader."""
    return type("Custom", (Custom,), {"reference": reference, "__module__": __name__})


def resolve(reference: str, base: Path) -> Callable[..., Any]:
    """The function that `my_module:loader` or `file.py:loader` names.

    >>> resolve("math:sqrt", Path())(9)
    3.0
    """
    place, _, name = reference.rpartition(":")
    module = _file(locate(base, Path(place))) if place.endswith(".py") else _module(place)
    found = getattr(module, name, None)
    if not callable(found):
        known = [known for known in vars(module) if callable(getattr(module, known)) and not known.startswith("_")]
        raise InputError(
            f"There is no function '{name}' in '{place}'. It has: {', '.join(known)}.{nearest(name, known)}"
        )
    return found  # type: ignore[no-any-return]


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise  # the module is there and misses one of its own imports: its traceback says more than we can
        raise InputError(
            f"There is no module '{name}'. Install it, or name a file beside the experiment file: '{name}.py:loader'."
        ) from None


def _file(path: Path) -> ModuleType:
    # the name holds a hash of the place, so that two files called net.py do not replace one another
    name = f"fedloom_file_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"The file {path} cannot be loaded as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up by name
    spec.loader.exec_module(module)
    return module
