"""What clients keep between rounds, such as a personal model or a control variate."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from fedloom import tree
from fedloom.errors import InputError
from fedloom.tree import Groups, Tree


class ClientStates:
    """What each client keeps between rounds; a client that never took part has the initial value."""

    def __init__(self, initial: Groups, states: dict[int, Groups] | None = None) -> None:
        self.initial = initial
        self.states = dict(states or {})
        self.changed: set[int] = set()
        self._before: dict[int, Groups | None] = {}  # the states when the changes were last taken

    def gather(self, ids: Iterable[int], hidden: Collection[str] = ()) -> Groups:
        """Return the states of some clients, stacked, without hidden groups."""
        groups = [group for group in self.initial if group not in hidden]
        found = [self.states.get(client, self.initial) for client in ids]
        return {group: _stack([state.get(group, {}) for state in found]) for group in groups} if found else {}

    def put(self, ids: Iterable[int], own: Groups) -> None:
        """Store the new states of some clients, given as a stack."""
        if own.keys() != self.initial.keys():
            raise InputError(
                f"A client method must return all that clients keep: {', '.join(self.initial) or 'nothing'}. "
                f"Got {', '.join(own) or 'nothing'} instead (see init_own)."
            )
        if not self.initial:
            return
        for position, client in enumerate(ids):
            self._before.setdefault(client, self.states.get(client))
            self.states[client] = {group: tree.clone(tree.row(stacked, position)) for group, stacked in own.items()}
            self.changed.add(client)

    def take_changed(self) -> dict[int, Groups]:
        """Return the states that changed since the last call."""
        changed, self.changed = self.changed, set()
        self._before = {}
        return {client: self.states[client] for client in sorted(changed)}

    def undo(self, ids: Iterable[int] | None = None) -> None:
        """Undo changes since the last `take_changed`, of all or some clients, because their round does not count."""
        for client in list(self._before) if ids is None else [client for client in ids if client in self._before]:
            state = self._before.pop(client)
            if state is None:
                self.states.pop(client, None)
            else:
                self.states[client] = state
            self.changed.discard(client)


def _stack(trees: list[Tree]) -> Tree:
    """Stack trees. A leaf that only some clients have yet is zero for the others, as what compression leaves out."""
    known = {name: leaf for one in trees for name, leaf in one.items()}
    if any(len(one) != len(known) for one in trees):
        trees = [{name: one.get(name, torch.zeros_like(leaf)) for name, leaf in known.items()} for one in trees]
    return tree.stack(trees)
