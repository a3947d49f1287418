"""What an asynchronous round needs: which clients answer next, and the versions of the state that they started with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from fedloom.clock.clock import RoundTime
from fedloom.federation.sampling import Sampling
from fedloom.tree import Groups, Tree

if TYPE_CHECKING:
    from fedloom.backends.protocol import Backend
    from fedloom.federation.work import ClientWork

VERSION = "version "  # the names of leaves that hold versions begin with this
WorkOf = Callable[[int, tuple[int, ...]], "ClientWork"]  # what some clients do that start from a version


class Arrival(Protocol):
    """An answer that a round takes."""

    @property
    def client(self) -> int: ...
    @property
    def version(self) -> int: ...  # the round in which it started: the version of the state that it has


class InFlight(ABC):
    """Clients at work across rounds. In simulations a clock knows who answers next; on a network, the agents decide."""

    sampling: Sampling
    versions: dict[int, Groups]  # what was shared in rounds that clients still train from

    @property
    def found_clients(self) -> bool:
        """Whether somebody was available when the round began: who answers may come later."""
        return True

    @abstractmethod
    def arrivals(self, round: int, shared: Groups, work_of: WorkOf, backend: Backend) -> Sequence[Arrival]:
        """Start clients in free slots with `shared`; return when enough clients have answered.

        Raise `RoundAbandoned` if nobody answers for as long as the deadline. Answers so far stay for the next round.
        """

    @abstractmethod
    def in_use(self) -> set[int]:
        """Return the versions that answers of later rounds start from."""

    def begin(self, round: int) -> tuple[int, ...]:
        """Begin a round. Which clients it has is known when they arrive."""
        return ()

    def end(self) -> RoundTime | None:
        """End a round."""
        self.drop_versions()
        return None

    def drop_versions(self) -> None:
        """Drop what was shared in rounds that nobody trains from any more."""
        used = self.in_use()
        self.versions = {version: shared for version, shared in self.versions.items() if version in used}

    @property
    def state(self) -> Tree:
        """What a run must remember to continue."""
        return leaves_of(self.versions)

    def restore(self, state: Tree) -> None:
        """Continue from what `state` returned."""
        self.versions = versions_of(state)


def leaves_of(versions: dict[int, Groups]) -> Tree:
    """Return versions as leaves of one tree; groups without leaves, and versions without groups, have an empty one."""
    leaves: Tree = {}
    for version, shared in versions.items():
        for group, tree in (shared or {"": {}}).items():
            named = tree or {"": torch.zeros(0)}
            leaves |= {f"{VERSION}{version}/{group}/{name}": leaf for name, leaf in named.items()}
    return leaves


def versions_of(leaves: Tree) -> dict[int, Groups]:
    """Return the versions that are among some leaves."""
    versions: dict[int, Groups] = {}
    for path, leaf in leaves.items():
        if path.startswith(VERSION):
            version, group, name = path.removeprefix(VERSION).split("/", 2)
            shared = versions.setdefault(int(version), {})
            if group:
                shared.setdefault(group, {}).update({name: leaf} if name else {})
    return versions


def with_versions(leaves: Tree, changed: Callable[[Groups], Groups]) -> Tree:
    """Return leaves with all versions among them changed."""
    versions = {version: changed(shared) for version, shared in versions_of(leaves).items()}
    return {path: leaf for path, leaf in leaves.items() if not path.startswith(VERSION)} | leaves_of(versions)
