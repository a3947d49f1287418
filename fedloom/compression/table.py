"""The table [compress] of an experiment file: how messages are made smaller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import SerializeAsAny, field_serializer, field_validator

from fedloom.compression.method import Method
from fedloom.compression.methods import METHODS, method
from fedloom.compression.uplink import MEMORY
from fedloom.errors import InputError
from fedloom.record import Record
from fedloom.tree import Groups
from fedloom.user_code import calls

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm
    from fedloom.privacy.table import PrivacyTable

AnyMethod = SerializeAsAny[Method]
DOWN = ", ".join(name for name, kind in METHODS.items() if kind.goes_down)


class CompressTable(Record):
    """[compress]: how messages are made smaller. By default, they are sent as they are."""

    up: AnyMethod | None = None
    """How clients compress their changes: a method's name, or a table with its name and keys."""
    down: AnyMethod | None = None
    """How the server compresses what it sends: `float16`, `bfloat16` or `lossless`."""

    @field_validator("up", "down", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        return method(value)

    @field_validator("down")
    @classmethod
    def _goes_down(cls, value: Method | None) -> Method | None:
        if value is not None and not value.goes_down:
            raise InputError(
                f"[compress] down must be {DOWN}. Got '{value.name}', which compresses changes, and clients that come "
                "and go have no newer model in common from which a change could be sent."
            )
        if value is not None and value.feedback:
            raise InputError("[compress] down has no error_feedback: the server keeps the exact model.")
        return value

    @field_serializer("up", "down")
    def _table(self, value: Method | None) -> object:
        return None if value is None else {"name": value.name, **value.model_dump()}

    @property
    def initial_own(self) -> Groups:
        """What clients keep for compression before they first take part."""
        return {MEMORY: {}} if self.up is not None and self.up.keeps else {}

    def check(self, algorithm: Algorithm, privacy: PrivacyTable | None = None) -> None:
        """Raise `InputError` if an algorithm or a protection does not hold with compressed messages."""
        title, up = type(algorithm).__name__, self.up
        lossy = [one for one in (up, self.down) if one is not None and not one.exact]
        if algorithm.pooled:
            return
        if lossy and not algorithm.takes_noise:
            raise InputError(
                f"[compress] {lossy[0].name} changes what is sent, and the formulas of {title} hold for exact sums. "
                'Use "lossless".'
            )
        if up is None:
            return
        if any(calls(type(algorithm), verb) for verb in ("map", "exchange")):
            raise InputError(
                f"[compress] up = '{up.name}' does not work with {title}: the server or other clients get the answer "
                "of each client as it is, and only what becomes a sum is compressed. Leave out up; down works."
            )
        if privacy is not None and privacy.secure_aggregation is not None and not up.commutes:
            raise InputError(
                f"[compress] up = '{up.name}' does not work with secure aggregation: masks hide sums, and a sum of "
                'changes that were compressed one by one cannot be decoded. { name = "randomk", mask = "round" } works.'
            )
        if not up.exact and not up.feedback and algorithm.remembers_sent:
            raise InputError(
                f"[compress] up = '{up.name}': clients of {title} keep sums of what they sent, and the server's would "
                "drift away from them. Use a method with error_feedback = true."
            )
        if up.feedback and not algorithm.sums_cover_all:
            raise InputError(
                f"[compress] up = '{up.name}': in {title} a client does not count in every sum, so what error feedback "
                "adds to a change could be lost. Use a method without error feedback."
            )
        if up.scatters and getattr(algorithm, "rule", None) is not None:
            raise InputError(
                f"[compress] up = '{up.name}' does not work with a robust rule: clients send different numbers of "
                "their changes, so a rule would compare them with zeros."
            )
        if up.feedback and getattr(algorithm, "rule", None) is not None:
            raise InputError(
                f"[compress] up = '{up.name}' with error feedback does not work with a robust rule: a rule leaves "
                "changes out, and what error feedback added to them would be lost. Set error_feedback = false."
            )


NO_COMPRESSION = CompressTable()
