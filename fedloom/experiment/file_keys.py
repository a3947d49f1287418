"""Every key that an experiment file may have, by the table it belongs to, for `fedloom keys` and the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, create_model

from fedloom.aggregation.robust import RULES
from fedloom.algorithms import ALGORITHMS
from fedloom.clock.system import Availability, Spread
from fedloom.compression.methods import METHODS
from fedloom.data.partition import PARTITIONS
from fedloom.data.sources import SOURCES
from fedloom.data.split import Split
from fedloom.errors import InputError, nearest
from fedloom.experiment.experiment_file import TABLES, Experiment
from fedloom.field_words import default, meaning, summary, words
from fedloom.privacy.table import DpTable, ExampleTable, SecureTable
from fedloom.training.rate_schedule import RateSchedule
from fedloom.training.settings import ClientTraining

TOP = "Top level"


@dataclass(frozen=True)
class Key:
    """A key in words."""

    name: str
    kind: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Place:
    """A table of an experiment file with all its keys, or only one of them."""

    title: str
    model: type[BaseModel]
    only: str = ""

    @property
    def summary(self) -> str:
        """What the table is for, in a paragraph."""
        if self.title == TOP:
            return "Keys above all tables."
        said = " ".join(summary(self.model).replace("`", "").partition("\n\n")[0].split())
        return re.sub(r"^\[[a-z]+\]( \w+)?: (.)", lambda begun: begun[2].upper(), said)  # its title says that

    @property
    def keys(self) -> list[Key]:
        schema = self.model.model_json_schema().get("properties", {})
        wanted = [self.only] if self.only else [name for name in schema if name != "train"]  # a table of its own
        return [
            Key(name, *_plain(words(schema[name]), default(self.model, name), meaning(self.model, name)))
            for name in wanted
        ]


def _plain(*texts: str) -> Iterator[str]:
    """Leave out the marks of Markdown."""
    return (text.replace("`", "") for text in texts)


def tables() -> dict[str, type[BaseModel]]:
    """Return every table of an experiment file, and those inside of tables."""
    names = ("format", "name", "rounds", "seeds")
    top: dict[str, Any] = {
        name: (Experiment.model_fields[name].annotation, Experiment.model_fields[name]) for name in names
    }
    return {
        TOP: create_model("Top", **top),
        **{f"[{name}]": model for name, model in TABLES.items()},
        "A split as a table": Split,
        "train.schedule and train.local_schedule": RateSchedule,
        "train.clients": ClientTraining,
        "system.speed, download, upload and latency": Spread,
        "system.availability": Availability,
        "privacy.secure_aggregation": SecureTable,
        "privacy.dp": DpTable,
        "privacy.example_dp": ExampleTable,
    }


NAMED: dict[str, Mapping[str, type[BaseModel]]] = {  # what has a name in a file, and keys of its own beside it
    '[data] source = "{}"': SOURCES,
    '[data] partition = {{ name = "{}" }}': PARTITIONS,
    '[algorithm.LABEL] name = "{}"': ALGORITHMS,
    '[algorithm.LABEL] rule = {{ name = "{}" }}': RULES,
    '[compress] up = {{ name = "{}" }}': METHODS,
}


def find(word: str) -> list[Place]:
    """Return what a word stands for: tables by their name, or else the keys of this name, wherever they are.

    >>> [(place.title, [key.name for key in place.keys]) for place in find("fedprox")]
    [('[algorithm.LABEL] name = "fedprox"', ['rule', 'weights', 'mu'])]
    >>> [place.title for place in find("lr")]
    ['[train]', 'train.clients']
    """
    asked = word.strip("[]").casefold()
    places = [
        *((title.strip("[]"), title, model) for title, model in tables().items()),
        *((name, title.format(name), model) for title, some in NAMED.items() for name, model in some.items()),
    ]
    if meant := [Place(title, model) for name, title, model in places if asked in _short_names(name)]:
        return meant
    if found := [Place(title, model, asked) for _, title, model in places if asked in model.model_fields]:
        return found
    names = {name for name, _, _ in places} | {key for _, _, model in places for key in model.model_fields}
    raise InputError(
        f"An experiment file has no table or key '{word}'.{nearest(asked, sorted(names))} `fedloom keys` lists tables."
    )


def _short_names(name: str) -> set[str]:
    """What people may call a table.

    >>> sorted(_short_names("privacy.dp")), "top" in _short_names("Top level")
    (['dp', 'privacy.dp'], True)
    """
    whole = name.casefold()
    return {whole, whole.split()[0], whole.split(".")[-1]}
