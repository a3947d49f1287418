"""Writes the reference of the network protocol's messages."""

from __future__ import annotations

import inspect

from _generate.fields import table
from fedloom.field_words import summary


def fields() -> str:
    """Write a section for each message."""
    from fedloom.network.protocol import messages  # only this page needs what the network installs

    lines = []
    for name, kind in vars(messages).items():
        is_message = inspect.isclass(kind) and issubclass(kind, messages.Message)
        if is_message and kind.__module__ == messages.__name__ and kind.model_fields:
            lines += [f"### {name}", "", summary(kind), "", table(kind), ""]
    return "\n".join(lines)
