"""What an entry of the table of odd models is. Worker processes import this file: it needs nothing but torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

FEATURES, CLASSES, TOKENS, LENGTH = 16, 3, 20, 8


@dataclass(frozen=True)
class Odd:
    """One odd model, the data it takes and what it is trained with."""

    name: str
    kind: str
    build: Callable[[], nn.Module]
    data: str = "features"  # what `harness.federation` makes
    loss: Any = "cross_entropy"
    batch: int = 4  # the clients have 9, 23 and 14 examples: their last batches have 1, 3 and 2, or with 5: 4, 3 and 4
    training: dict[str, Any] = field(default_factory=dict)  # instead of what the table gives it by turns
    refused: str = ""  # what fedloom says (a regular expression) of a model that it must refuse
    reference: Callable[[], nn.Module] | None = None  # the same mathematics, where the plain loop needs another module
    limit: bool = False  # a stated limit: what it keeps is in a closure or a global, where fedloom does not look
    measured: bool = True  # whether accuracy means something for its output
    quick: bool = False  # tried in every run of the tests, not only in the slow ones


MODELS: list[Odd] = []


def odd(kind: str, **more: Any) -> Callable[[Any], Any]:
    """Put a module class, or a function that returns a module, into the table."""

    def enter(build: Any) -> Any:
        MODELS.append(Odd(build.__name__, kind, build, **more))
        return build

    return enter


class Net(nn.Module):
    """Two layers, which most odd models change a little."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, hidden)
        self.out = nn.Linear(hidden, CLASSES)


class Words(nn.Module):
    """An embedding and a layer; 0 is padding."""

    def __init__(self, **embedding: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, 5, **embedding)
        self.out = nn.Linear(5, CLASSES)
