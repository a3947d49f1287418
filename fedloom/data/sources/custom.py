"""Your own loader: a function named in the experiment file, `my_module:loader` or `file.py:loader`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict

from fedloom.data.federation import Dataset, as_dataset
from fedloom.data.sources.base import Source
from fedloom.errors import FedloomError, InputError
from fedloom.user_code import code, said


class _Custom(Source):
    """Calls `reference` with the keys of the table. It returns a Dataset, (x, y) or (x, y, client).

    A loader with a parameter `base` gets the folder where relative paths start.
    """

    model_config = ConfigDict(extra="allow")
    reference: ClassVar[str]

    def load(self, base: Path) -> Dataset:
        """Call the loader, after a check that its parameters match the keys."""
        loader = code(self.reference, base, Dataset, tuple)
        if not callable(loader):
            raise InputError(f"'{self.reference}' must be a function that loads data. Got {loader!r} instead.")
        values = dict(self.model_extra or {})
        signature = inspect.signature(loader)
        if "base" in signature.parameters:
            values.setdefault("base", base)
        try:
            signature.bind(**values)
        except TypeError as error:
            raise InputError(
                f"The loader '{self.reference}' cannot be called with {', '.join(values) or 'no keys'}: {error}. "
                f"Its parameters are: {', '.join(signature.parameters) or 'none'}."
            ) from None
        try:
            loaded = loader(**values)
        except FedloomError:
            raise
        except Exception as error:
            raise InputError(f"The loader '{self.reference}' failed: {said(error)}") from error
        if isinstance(loaded, Dataset):
            return loaded
        if isinstance(loaded, tuple) and len(loaded) in (2, 3):
            x, y, client = (*loaded, None)[:3]
            return as_dataset(x, y, client=client)
        raise InputError(
            f"The loader '{self.reference}' must return a Dataset, (x, y) or (x, y, client). "
            f"Got {type(loaded).__name__} instead."
        )


def custom(reference: str) -> type[Source]:
    """Return the source that calls one loader."""
    return type("Custom", (_Custom,), {"reference": reference, "__module__": __name__})
