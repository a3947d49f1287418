"""Frozen, validated records: hyper-parameters, partitions, sources and the tables of an experiment file."""

from __future__ import annotations

import re
from inspect import getattr_static
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, AllowInfNan, BaseModel, ConfigDict, Strict, ValidationError
from pydantic_core import ErrorDetails

from fedloom.errors import UNKNOWN, InputError, ParameterError, nearest

# types of number fields: strict, so that "0.1" and true are errors
Count = Annotated[int, Strict(), Ge(1)]
AtLeastTwo = Annotated[int, Strict(), Ge(2)]
Whole = Annotated[int, Strict()]
Positive = Annotated[float, Strict(), AllowInfNan(False), Gt(0)]
NonNegative = Annotated[float, Strict(), AllowInfNan(False), Ge(0)]
AtLeastOne = Annotated[float, Strict(), AllowInfNan(False), Ge(1)]
Share = Annotated[float, Strict(), Ge(0), Le(1)]
Decay = Annotated[float, Strict(), Ge(0), Lt(1)]


def seconds(duration: str) -> float:
    """Return the seconds of a duration.

    >>> seconds("1.5m")
    90.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", duration)
    if not found or float(found[1]) == 0:
        raise InputError(f'A duration is a number with a unit: "60s", "10m", "2h", "7d". Got {duration!r} instead.')
    return float(found[1]) * {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[found[2]]


def _checked_duration(value: str) -> str:
    seconds(value)
    return value


Duration = Annotated[str, AfterValidator(_checked_duration)]


class Record(BaseModel):
    """A value with named, typed fields. A wrong field raises an InputError that says what is allowed.

    The string under a field says what the field means. Messages and the documentation read it as `description`.

    >>> class Prox(Record):
    ...     mu: float = 0.01
    >>> Prox(mue=1)
    Traceback (most recent call last):
    fedloom.errors.ParameterError: Prox has no parameter 'mue'. Got 1 for it. Known: mu. Did you mean 'mu'?
    """

    # with attribute docstrings, a string under a field becomes the field's description
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, use_attribute_docstrings=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "__init__" in vars(cls):
            raise InputError(
                f"{cls.__name__} defines __init__, and an algorithm has none. Declare its fields in the body of the "
                "class, as in `mu: float = 0.1`, and use them as self.mu."
            )
        constants = {name for base in cls.__mro__[1:] for name in getattr(base, "__class_vars__", ())}
        for name, value in vars(cls).items():
            if name.startswith("_") or name == "model_config" or callable(value) or hasattr(value, "__get__"):
                continue
            if name not in {*vars(cls).get("__annotations__", ()), *constants}:
                typed = f"`{name}: {type(value).__name__} = {value!r}`"
                raise InputError(
                    f"{cls.__name__}.{name} has no type. Write {typed} for a setting that experiment files can give, "
                    f"or _{name} for a constant."
                )
        super().__init_subclass__(**kwargs)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain(type(self), error) from None

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError:  # it is frozen
            # no InputError: it happens in your own code, and other errors are shown with the file and the line
            kind = type(self).__name__
            raise AttributeError(
                f"{kind}.{name} cannot be set: {kind} is never changed. replace({name}=…) makes another one. What an "
                "algorithm remembers between rounds belongs in the state that `init` and `round` return, and what a "
                "client remembers in `own`."
            ) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Let a field that only gets another type or default keep the description it inherits.

        A constant may replace a property, as in `linear = False`. A field may not: Python would still ask the property.
        """
        cls.__class_vars__.update(name for name, value in vars(cls).items() if isinstance(value, property))
        for name in cls.model_fields:
            if isinstance(getattr_static(cls, name, None), property):
                raise InputError(f"'{name}' of {cls.__name__} is no setting. Leave out its type, as in `{name} = …`.")
        bases = [base for base in cls.__mro__[1:] if issubclass(base, BaseModel)]
        for name, field in cls.model_fields.items():
            known = (base.model_fields[name].description for base in bases if name in base.model_fields)
            field.description = field.description or next(filter(None, known), None)

    @classmethod
    def known(cls) -> list[str]:
        """Return the names of all fields that you can give."""
        return sorted(cls.model_fields)

    def replace(self, **changes: Any) -> Any:
        """Return a copy with some fields changed. It is validated like a new record."""
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})


def explain(record: type[BaseModel], error: ValidationError) -> InputError:
    """Return the first problem as an error that names the parameter, the record, what is allowed and what you gave."""
    details = error.errors(include_url=False)
    # a field that is missing is often there, but misspelt
    first = next((one for one in details if one["type"] == "extra_forbidden"), details[0])
    original = first.get("ctx", {}).get("error")
    if isinstance(original, InputError):
        return original
    place = [part for part in first["loc"] if isinstance(part, int) or part in record.model_fields] or first["loc"]
    name = ".".join(str(part) for part in place)
    if first["type"] == "extra_forbidden":
        known = record.known() if issubclass(record, Record) else sorted(record.model_fields)
        advice = f" Got {first['input']!r} for it. Known: {', '.join(known)}.{nearest(name, known)}"
        return ParameterError(record.__name__, name, UNKNOWN, advice)
    if first["type"] == "missing" and len(place) == 1 and place[0] in record.model_fields:
        meaning = record.model_fields[str(place[0])].description or ""
        return ParameterError(record.__name__, name, "is needed", f" {' '.join(meaning.split())}".rstrip())
    # a field of several types has an error for each type: name them all
    same = [detail for detail in details if detail["loc"][0] == first["loc"][0]]
    alternatives = [_problem(detail) for detail in same]
    problems = list(dict.fromkeys(problem.removeprefix("must be ") for problem, _ in alternatives))
    start = "must be " if alternatives[0][0].startswith("must be ") else ""
    advice = alternatives[-1][1] + next((hint for one in same if (hint := _unquoted(one))), "")
    return ParameterError(record.__name__, name, start + " or ".join(problems), advice)


_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_EXPECTED = {  # what a field must be → pydantic's names of the errors that say so
    "a whole number": "int_type int_parsing int_from_float",
    "a number": "float_type float_parsing",
    "a finite number": "finite_number",
    "a string": "string_type",
    "true or false": "bool_type bool_parsing",
    "a table": "dict_type model_type",
    "a path": "path_type",
    "a list": "list_type tuple_type",
    "a longer list": "too_short",
}
_KINDS = {kind: expected for expected, kinds in _EXPECTED.items() for kind in kinds.split()}


# what a value in quotes looks like that would be right without them, by what a field must be
_IN_QUOTES = {
    "a whole number": r"[+-]?\d+",
    "a number": r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?",
    "true or false": "true|false",
    "a list": r"\[.*\]",
    "a table": r"\{.*\}",
}


def _unquoted(detail: ErrorDetails) -> str:
    """Return a hint if a text would be right without quotes."""
    given, looks = detail["input"], _IN_QUOTES.get(_KINDS.get(detail["type"], ""))
    if looks and isinstance(given, str) and re.fullmatch(looks, given.strip(), re.IGNORECASE | re.DOTALL):
        return f" Write {given.strip()} without quotes."
    return ""


def _problem(detail: ErrorDetails) -> tuple[str, str]:
    """Return the problem and a hint."""
    kind, context, given = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "missing":
        return "is needed", ""
    if kind == "value_error":
        return f"is not valid: {context['error']}", ""
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return f"must be {words} {context[bound]}", f" Got {given!r} instead."
    if kind == "literal_error":
        hint = nearest(given, _choices(context["expected"])) if isinstance(given, str) else ""
        return f"must be {context['expected']}", f" Got {given!r} instead.{hint}"
    if kind in _KINDS:
        # a table without keys has its defaults: what people mean who switch something on
        empty = f" Write {detail['loc'][-1]} = {{}}." if given is True and _KINDS[kind] == "a table" else ""
        return f"must be {_KINDS[kind]}", f" Got {given!r} instead.{empty}"
    return f"is not valid: {detail['msg']}", f" Got {given!r} instead."


def _choices(expected: str) -> list[str]:
    return [part.strip(" '") for part in expected.replace(" or ", ",").split(",")]
