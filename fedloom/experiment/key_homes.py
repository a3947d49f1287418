"""Where a key of an experiment file belongs, for the message about a table that has no such key."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fedloom.algorithms import ALGORITHMS
from fedloom.data.sources import SOURCES
from fedloom.errors import SYNONYMS
from fedloom.privacy.table import DpTable, ExampleTable, SecureTable
from fedloom.record import Record

# tables inside of [privacy]
PRIVACY: dict[str, type[Record]] = {"dp": DpTable, "example_dp": ExampleTable, "secure_aggregation": SecureTable}
FEW = 4  # the most names that are worth a list


def home(key: str, table: str, top: Collection[str], tables: Mapping[str, type[Record]]) -> str:
    """Return where a key that `table` does not have exists, as sentences for the end of a message, or an empty string.

    >>> from fedloom.training.settings import Training
    >>> home("rounds", "train", ["rounds"], {"train": Training})
    ' `rounds` belongs at the top of the file, before the first [table].'
    >>> home("lr", "data", [], {"train": Training}), home("mu", "train", [], {"train": Training})
    (' `lr` is a key of [train].', ' `mu` is a key of the algorithms fedasync, fedprox, moon.')
    """
    if key in tables:
        return f" [{key}] is a table of its own."
    if key in ("algorithm", "algorithms"):
        return " [algorithm] is a table of its own, with a key for each algorithm."
    if key in ALGORITHMS:
        return f" `{key}` is an algorithm: write `{key} = {{}}` under [algorithm], with its own settings in the braces."
    above = [one for one in (key, f"{key}s") if one in top]  # seed = 3 may mean seeds
    said = f" `{above[0]}` belongs at the top of the file, before the first [table]." if above else ""
    inside = [name for name, record in PRIVACY.items() if key in record.model_fields]
    if table == "privacy" and inside:
        return f" Write {' or '.join(f'{name} = {{ {key} = … }}' for name in inside)}."
    for name in (key, SYNONYMS.get(key, key)):
        found = [f"{one} in [privacy]" for one in inside if name == key]
        found += [f"[{one}]" for one, record in tables.items() if one != table and name in record.model_fields]
        found += _owners(name, SOURCES, "[data] with source =", "[data], for some sources")
        found += _owners(name, ALGORITHMS, "the algorithms", "some algorithms")
        if found:
            return f"{said} `{name}` is a key of {', '.join(found)}."
    return said


def _owners(key: str, kinds: Mapping[str, type[Record]], few: str, many: str) -> list[str]:
    """Return which kinds have a key: none, a few by name, or many."""
    names = [name for name, kind in kinds.items() if key in kind.model_fields]
    return [f"{few} {', '.join(names)}" if len(names) <= FEW else many] if names else []
