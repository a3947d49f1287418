"""The two halves of compression around the verbs: what a client sends instead of its change, and what the server reads.

client:  update → change (+ what was left out before) → parts        `Uplink.send`
server:  parts → change → update                                     `Uplink.receive`

Under secure aggregation, masked sums of parts must decode to the sum of changes. Then clients send some numbers of
their answers, and the server compares them with the same numbers of what it shared (`Uplink.project`, `Uplink.expand`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch

from fedloom import keys
from fedloom.aggregation.positions import refuse_undeclared
from fedloom.compression.method import Damaged, Draws, Form, Method, form_of
from fedloom.compression.methods.randomk import RandomK
from fedloom.tree import Groups, Tree, change, row, select, size, stack

if TYPE_CHECKING:
    from fedloom.algorithm import Update

MEMORY = "compress"  # the group of what clients keep for compression, which algorithms never see
LEFT = "left out"  # the kind of leaf that holds what a message left out


@dataclass(frozen=True)
class Sent:
    """What the clients of a call send."""

    update: Update  # as the server reads it
    parts: list[Groups]  # of each client, by group
    rest: Groups  # the leaves that are sent as they are, stacked
    memory: Tree  # what clients keep, stacked
    bytes: list[int]  # of each client: parts and leaves, without weights and public numbers


@dataclass(frozen=True)
class Uplink:
    """The compression of one call of a round. A client method's name is part of what it belongs to."""

    method: Method
    learnt: Form  # the model's parameters that are trained
    seed: int
    round: int
    call: int
    asked: str

    def covers(self, form: Form) -> list[str]:
        """Return the leaves of a group that are compressed: trained parameters, or all if nothing is lost."""
        if self.method.exact:
            return list(form)
        return [name for name, one in form.items() if self.learnt.get(name) == one and self.method.takes(one[0])]

    def draws(self, client: int, group: str) -> Draws:
        place = ("compress", self.round, self.call, group)
        return Draws(keys.key(self.seed, *place, client), keys.key(self.seed, *place))

    def send(self, update: Update, shared: Groups, ids: Sequence[int], memory: Tree) -> Sent:
        """Compress what clients send. A change that is not finite is sent as it is, so that it is found as such."""
        if not self.method.exact:
            refuse_undeclared("[compress] up", update.groups, update.positions, shared)
        parts: list[Groups] = [{} for _ in ids]
        groups, rest, kept = dict(update.groups), dict(update.groups), dict(memory)
        sizes = [size(row(_all(update.groups), n)) for n in range(len(ids))]
        for group, stacked in update.groups.items():
            form = _one(stacked)
            names = self.covers(form)
            if not names:
                continue
            rest[group] = {name: leaf for name, leaf in stacked.items() if name not in names}
            base = self._base(update.positions, group, shared, names)
            arrived, memories = [], []
            for n, client in enumerate(ids):
                mine, before = row(select(stacked, names), n), self._memory(memory, group, n)
                read, packed, keeps = self._send_one(mine, base, self.draws(client, group), before)
                arrived.append(read)
                memories.append(keeps)
                if packed is not None:
                    parts[n][group] = packed
                    sizes[n] += size(packed) - size(mine)
            groups[group] = {**stacked, **stack(arrived)}
            kept |= {f"{self.asked}/{group}/{path}": leaf for path, leaf in stack(memories).items()}
        return Sent(replace(update, groups=groups), parts, rest, kept, sizes)

    def _send_one(self, leaves: Tree, base: Tree, draws: Draws, memory: Tree) -> tuple[Tree, Tree | None, Tree]:
        """Compress one client's leaves of one group.

        Return the leaves as the server reads them, their parts (None if they are sent as they are), and what it keeps.
        """
        method = self.method
        moved = method.difference(leaves, base)
        if method.exact:
            return leaves, method.pack(moved, draws, {})[0], {}
        left = {name: memory.get(f"{LEFT}/{name}", torch.zeros_like(leaf)) for name, leaf in moved.items()}
        total = {name: leaf + left[name] for name, leaf in moved.items()} if method.feedback else moved
        parts: Tree | None
        own = {name: memory[f"{method.name}/{name}"] for name in moved if f"{method.name}/{name}" in memory}
        if not _is_finite(total):
            arrived, parts = leaves, None
            # all clients of a stack keep leaves of the same names
            own = own or method.pack({name: torch.zeros_like(leaf) for name, leaf in total.items()}, draws, {})[1]
        else:
            parts, own = method.pack(total, draws, own)
            decoded = method.unpack(parts, form_of(total), draws)
            arrived = method.apply(decoded, form_of(leaves), base)
            if _is_finite(decoded):  # a number too large for the method never becomes part of what is held back
                left = {name: total[name] - leaf for name, leaf in decoded.items()}
        kept = {f"{method.name}/{name}": leaf for name, leaf in own.items()}
        kept |= {f"{LEFT}/{name}": leaf for name, leaf in left.items()} if method.feedback else {}
        return arrived, parts, kept

    def receive(
        self,
        client: int,
        rest: Groups,
        parts: Groups,
        forms: Mapping[str, Form],
        positions: Mapping[str, str],
        shared: Groups,
    ) -> Groups:
        """Return the groups of one client's update, whose leaves should have these forms, as a stack of one.

        Raise `Damaged` if parts do not fit, or stand for other leaves than they should.
        """
        groups: Groups = {group: leaves for group, leaves in rest.items() if group not in forms}
        expected = {group for group, form in forms.items() if self.covers(form)}
        if parts.keys() != expected:
            raise Damaged(f"an answer has parts for {len(parts)} groups, and {len(expected)} are compressed")
        for group, form in forms.items():
            names, sent = self.covers(form), rest.get(group, {})
            if not names:
                groups[group] = sent
                continue
            if twice := [name for name in names if name in sent]:
                raise Damaged(f"'{twice[0]}' is compressed, and also sent as it is")
            mine = {name: form[name] for name in names}
            base = self._base(positions, group, shared, names)
            found = self.method.unpack(parts[group], mine, self.draws(client, group))
            whole = {name: leaf[None] for name, leaf in self.method.apply(found, mine, base).items()} | sent
            groups[group] = {name: whole[name] for name in form if name in whole} | whole
        return groups

    @staticmethod
    def _base(positions: Mapping[str, str], group: str, shared: Groups, names: Iterable[str]) -> Tree:
        return select(shared[positions[group]], names) if group in positions else {}

    def _memory(self, memory: Tree, group: str, position: int) -> Tree:
        start = f"{self.asked}/{group}/"
        return {path[len(start) :]: leaf[position] for path, leaf in memory.items() if path.startswith(start)}

    # --- under secure aggregation

    @property
    def _mask(self) -> RandomK:
        return cast(RandomK, self.method)  # the one method that commutes with sums

    def project(self, update: Update, shared: Groups, ids: Sequence[int], memory: Tree) -> tuple[Update, Tree]:
        """Return updates with only the numbers that are sent, and what clients keep."""
        refuse_undeclared("[compress] up", update.groups, update.positions, shared)
        groups, kept = dict(update.groups), dict(memory)
        for group, stacked in update.groups.items():
            names = self.covers(_one(stacked))
            base = self._base(update.positions, group, shared, names)
            for name in names:
                draws, path = self.draws(ids[0], group), f"{self.asked}/{group}/{LEFT}/{name}"
                total = stacked[name]
                if self.method.feedback:
                    moved = change({name: total}, {name: base[name]})[name] if name in base else total
                    moved = moved + memory.get(path, torch.zeros_like(moved))
                    sent = torch.stack([self._mask.project(one, name, draws) for one in moved])
                    form = (tuple(moved.shape[1:]), moved.dtype)
                    kept[path] = moved - torch.stack([self._mask.expand(one, name, form, draws) for one in sent])
                    total = moved + base[name] if name in base else moved
                short = torch.stack([self._mask.project(one, name, draws) for one in total])
                groups[group] = {**groups[group], name: short}
        return replace(update, groups=groups), kept

    def projected(self, shared: Groups, positions: Mapping[str, str]) -> Groups:
        """Return what the server shared, as far as it compares answers with it: only the numbers that are sent."""
        found = dict(shared)
        for group, base in positions.items():
            draws = self.draws(0, group)
            for name in self.covers(form_of(shared[base])):
                found[base] = {**found[base], name: self._mask.project(shared[base][name], name, draws)}
        return found

    def expand(self, means: Groups, shared: Groups, positions: Mapping[str, str]) -> Groups:
        """Return means of whole leaves from means of the numbers that were sent."""
        short, found = self.projected(shared, positions), dict(means)
        for group, mean in means.items():
            base, draws = positions.get(group), self.draws(0, group)
            for name in [name for name in mean if name in self.learnt]:
                moved = mean[name] if base is None else mean[name] - short[base][name]
                whole = self._mask.expand(moved, name, self.learnt[name], draws)
                found[group] = {**found[group], name: whole if base is None else shared[base][name] + whole}
        return found


def _one(stacked: Tree) -> Form:
    """Return the form of one client's leaves of a stack."""
    return {name: (tuple(leaf.shape[1:]), leaf.dtype) for name, leaf in stacked.items()}


def _all(groups: Groups) -> Tree:
    return {f"{group}/{name}": leaf for group, leaves in groups.items() for name, leaf in leaves.items()}


def _is_finite(leaves: Tree) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in leaves.values())
