"""The words for what agents are asked to do. A site's policy needs no more of the protocol than these."""

from __future__ import annotations

from typing import Literal

Verb = Literal["reduce", "map", "exchange", "evaluate"]  # what the server sees of the clients' answers
VERBS: tuple[Verb, ...] = ("reduce", "map", "exchange", "evaluate")
SecureKind = Literal["advertise", "share", "confirm", "unmask"]  # stages besides training, which masks
SECURE_KINDS: tuple[SecureKind, ...] = ("advertise", "share", "confirm", "unmask")
