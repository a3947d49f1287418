"""Frozen, validated records: hyper-parameters, partitions, sources and the tables of an experiment file are all of this kind."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from fedloom.errors import InputError, nearest


class Record(BaseModel):
    """A value with named, typed fields. Wrong fields raise an InputError that says what is allowed.

    >>> class Prox(Record):
    ...     mu: float = 0.01
    >>> Prox(nu=1)
    Traceback (most recent call last):
    fedloom.errors.InputError: Prox has no parameter 'nu'. Known: mu. Did you mean 'mu'?
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(explain(type(self), error)) from None

    def replace(self, **changes: Any) -> Any:
        """A copy with some fields changed, validated like a new record."""
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})


def explain(record: type[BaseModel], error: ValidationError) -> str:
    """The first thing that is wrong, in the house form: parameter, record, what is allowed, what was given."""
    return _sentence(record, error.errors(include_url=False)[0])


_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_KINDS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "dict_type": "a table",
    "model_type": "a table",
    "list_type": "a list",
    "tuple_type": "a list",
    "too_short": "a longer list",
}


def _sentence(record: type[BaseModel], detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    place = [part for part in detail["loc"] if isinstance(part, (str, int))]
    name = ".".join(str(part) for part in place if part in record.model_fields or len(place) == 1 or isinstance(part, int))
    name = name or ".".join(map(str, place)) or "value"
    owner = record.__name__
    if kind == "extra_forbidden":
        known = sorted(record.model_fields)
        return f"{owner} has no parameter '{name}'. Known: {', '.join(known)}.{nearest(name, known)}"
    if kind == "missing":
        return f"{owner} needs the parameter '{name}'."
    if kind == "value_error":
        return str(context["error"])
    given = detail["input"]
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return f"The '{name}' parameter of {owner} must be {words} {context[bound]}. Got {given!r} instead."
    if kind == "literal_error":
        hint = nearest(given, _choices(context["expected"])) if isinstance(given, str) else ""
        return f"The '{name}' parameter of {owner} must be {context['expected']}. Got {given!r} instead.{hint}"
    if kind in _KINDS:
        return f"The '{name}' parameter of {owner} must be {_KINDS[kind]}. Got {given!r} instead."
    return f"The '{name}' parameter of {owner} is not valid: {detail['msg']}. Got {given!r} instead."


def _choices(expected: str) -> list[str]:
    return [part.strip(" '") for part in expected.replace(" or ", ",").split(",")]
