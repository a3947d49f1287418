"""Descriptions of the algorithms in words, for `fedloom algorithms` and the documentation."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic_core import PydanticUndefined

from fedloom.algorithm import Algorithm, Central
from fedloom.algorithms import ALGORITHMS
from fedloom.errors import unknown
from fedloom.field_words import summary, words


@dataclass(frozen=True)
class Entry:
    """The description of one algorithm."""

    name: str
    summary: str  # the first line of its docstring
    details: str
    reference: str
    fields: dict[str, tuple[str, str]]  # name → type and default
    secure: str  # whether it works with secure aggregation, in words
    network: str  # whether it runs on a network, in words


def entry(name: str) -> Entry:
    """Describe one algorithm.

    >>> entry("fedprox").fields["mu"]
    ('number, at least 0', '0.01')
    """
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    kind = ALGORITHMS[name]
    first, _, details = summary(kind).partition("\n")
    schema = kind.model_json_schema()["properties"]
    fields = {}
    for field, info in kind.model_fields.items():
        if field != "train":
            default = "" if info.default is PydanticUndefined else repr(info.default).replace("'", '"')
            fields[field] = ("a robust rule" if field == "rule" else words(schema[field]).replace("`", ""), default)
    if "rule" in fields:  # an algorithm's own fields come first
        fields["rule"] = fields.pop("rule")
    return Entry(name, first, details.strip(), kind.reference, fields, _secure(kind), _network(kind))


def entries() -> list[Entry]:
    """Describe all algorithms."""
    return [entry(name) for name in ALGORITHMS]


def _secure(kind: type[Algorithm]) -> str:
    if kind.pooled:
        return "not federated"
    if not kind().linear:
        why = (
            "the server sees single clients' answers or scores"
            if issubclass(kind, Central)
            else "clients see each other's weights"
        )
        return f"no: {why}"
    if not kind().sums_cover_all:
        return "no: a sum may be that of a single client"
    return f"yes: the server needs only sums{' (not with a rule)' if 'rule' in kind.model_fields else ''}"


def _network(kind: type[Algorithm]) -> str:
    return "no: it needs all data in one place" if kind.pooled else "yes"
