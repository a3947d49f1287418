"""Compression of what the server sends. Both sides know the model's form, so that parts need no description."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedloom.compression.method import Damaged, Draws, Form, Method
from fedloom.tree import Groups, Tree, select, size

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm
    from fedloom.compression.table import CompressTable
    from fedloom.task import Task

Names = dict[str, list[str]]  # the leaves of each group that parts stand for
_NO_DRAWS = Draws(0, 0)


@dataclass(frozen=True)
class Downlink:
    """How leaves of the model travel to clients: parameters in fewer bits, or all leaves without any loss."""

    method: Method
    form: Form  # of the model
    trainable: Collection[str]

    @staticmethod
    def of(table: CompressTable, algorithm: Algorithm, task: Task) -> Downlink | None:
        """Return how the messages of an algorithm are compressed, if they are."""
        if table.down is None or algorithm.pooled:
            return None
        return Downlink(table.down, task.form, task.trainable)

    def _covers(self, leaves: Tree) -> list[str]:
        known = [n for n, leaf in leaves.items() if self.form.get(n) == (tuple(leaf.shape), leaf.dtype)]
        if self.method.exact:
            return known
        return [
            n
            for n in known
            if n in self.trainable and (self.form[n][1].is_floating_point or self.form[n][1].is_complex)
        ]

    def pack(self, groups: Groups) -> tuple[Groups, Groups, Names]:
        """Return what is sent: the leaves as they are, the parts of others, and which leaves the parts stand for."""
        rest, parts, names = dict(groups), {}, {}
        for group, leaves in groups.items():
            if covered := self._covers(leaves):
                names[group] = covered
                rest[group] = {name: leaf for name, leaf in leaves.items() if name not in covered}
                mine = self.method.difference(select(leaves, covered), {})
                parts[group] = self.method.pack(mine, _NO_DRAWS, {})[0]
        return rest, parts, names

    def unpack(self, rest: Groups, parts: Groups, names: Mapping[str, Sequence[str]]) -> Groups:
        """Return the groups that were sent. Raise `Damaged` if names or parts do not fit the model."""
        if parts.keys() != names.keys() or not {*names} <= {*rest}:
            raise Damaged("what was sent has other groups than its header lists")
        groups = dict(rest)
        for group, covered in names.items():
            if unknown := [name for name in covered if name not in self.form]:
                raise Damaged(f"what was sent names leaves that the model does not have, such as '{unknown[0][:80]}'")
            form = {name: self.form[name] for name in covered}
            if len(form) != len(covered):
                raise Damaged("what was sent names a leaf twice")
            found = self.method.unpack(parts[group], form, _NO_DRAWS)
            whole = {**self.method.apply(found, form, {}), **rest[group]}
            # in the model's order, in which both sides pack and unpack
            groups[group] = {name: whole[name] for name in self.form if name in whole} | whole
        return groups

    def received(self, groups: Groups) -> tuple[Groups, int]:
        """Return what clients receive if the server sends these groups, and how many bytes that takes."""
        rest, parts, names = self.pack(groups)
        taken = sum(size(leaves) for leaves in (*rest.values(), *parts.values()))
        if self.method.exact:
            return groups, taken
        arrived = self.unpack(rest, parts, names)
        return {g: {name: arrived[g][name] for name in leaves} for g, leaves in groups.items()}, taken


def rebased(means: Groups, positions: Mapping[str, str], exact: Groups, sent: Groups) -> Groups:
    """Return means of positions as if clients had started from the exact model instead of what they received.

    So the error of what was sent does not become part of the server's model.
    """
    found = dict(means)
    for group, base in positions.items():
        lossy = [n for n in means.get(group, {}) if n in exact[base] and exact[base][n] is not sent[base][n]]
        found[group] = means[group] | {n: means[group][n] + (exact[base][n] - sent[base][n]) for n in lossy}
    return {group: {name: found[group][name] for name in leaves} for group, leaves in means.items()}
