"""The format of a site's examples: what must be the same at every site for one model to fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedloom.data.federation import Federation


@dataclass(frozen=True)
class DataFormat:
    """Shape and dtype of one example, and the names of the classes (none for a regression)."""

    features: tuple[int, ...]
    dtype: str
    classes: tuple[str, ...]

    @staticmethod
    def of(federation: Federation) -> DataFormat:
        dtype = str(federation.x.dtype).removeprefix("torch.")
        return DataFormat(tuple(federation.x.shape[1:]), dtype, tuple(federation.classes))

    @staticmethod
    def read(message: Mapping[str, Any]) -> DataFormat:
        return DataFormat(tuple(message["features"]), message["dtype"], tuple(message["classes"]))

    def message(self) -> dict[str, Any]:
        return {"features": list(self.features), "dtype": self.dtype, "classes": list(self.classes)}

    def differences(self, other: DataFormat) -> str:
        """Describe what differs: "theirs" is the other format, "ours" is this one. Empty if nothing does."""
        ours, theirs = asdict(self), asdict(other)
        different = [name for name in ours if ours[name] != theirs[name]]
        return "; ".join(f"{name}: {_short(theirs[name])} there, {_short(ours[name])} here" for name in different)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "…"
