"""All clients of a run as the coordinator knows them, without a single example."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.federation import Federation
from fedloom.data.split import SPLITS, SplitName
from fedloom.network.coordinator.ledger import Row
from fedloom.network.protocol.messages import DataFormat, Hello
from fedloom.training.clients import Setup


@dataclass(frozen=True, eq=False)
class Roster(Federation):
    """The clients' names, how many examples each has in each split, and which agent hosts each."""

    held: Mapping[SplitName, NDArray[np.int64]] = field(kw_only=True)
    marks: tuple[str, ...] = field(kw_only=True)  # one for each agent: shows whether its data changed
    hosts: Mapping[int, tuple[str, int]] = field(kw_only=True)  # client → its agent, and its number there
    data_format: DataFormat = field(kw_only=True)
    setup: Setup = field(kw_only=True)
    hellos: Mapping[str, Hello] = field(kw_only=True)  # what each agent says about its site

    @staticmethod
    def of(
        clients: Sequence[Row], hellos: Mapping[str, Hello], server: Federation | None = None, setup: Setup = Setup()
    ) -> Roster:
        """Return the clients of the ledger, as their agents describe them; `server` holds the server's own data.

        `setup` is how the coordinator itself computes: agents' words about that do not count.
        """
        hosted = {
            (agent, local if client.number is None else client.number): client
            for agent, hello in hellos.items()
            for local, client in enumerate(hello.clients)
        }
        described = [hosted[row["agent"], row["local"]] for row in clients]
        held = {split: np.array([getattr(one, split) for one in described], dtype=np.int64) for split in SPLITS}
        totals = sum(held.values(), np.zeros(len(described), np.int64))
        first = hellos[clients[0]["agent"]]
        return Roster(
            torch.empty(0),
            torch.empty(0),
            np.concatenate([[0], np.cumsum(totals)]),
            names=[row["name"] for row in clients],
            classes=first.classes,
            server=server.server if server else {},
            scale=server.scale if server else 1.0,
            held=held,
            marks=tuple(hellos[agent].data_mark for agent in sorted({row["agent"] for row in clients})),
            hosts={row["client"]: (row["agent"], row["local"]) for row in clients},
            data_format=first.data_format,
            setup=setup,
            hellos=hellos,
        )

    def site(self, client: int) -> Hashable:
        return self.hosts[client][0]

    @property
    def withheld(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for client, (agent, _) in sorted(self.hosts.items()):
            for metric in self.hellos[agent].withheld:
                found.setdefault(metric, []).append(client)
        return found

    @property
    def sending_scores(self) -> list[int]:
        return [client for client, (agent, _) in sorted(self.hosts.items()) if self.hellos[agent].sends_scores]

    def sizes(self, split: SplitName) -> NDArray[np.int64]:
        return self.held[split]

    def counts(self, clients: Sequence[int], split: SplitName) -> NDArray[np.int64]:
        return self.held[split][np.asarray(clients, dtype=np.int64)]

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256("\n".join(self.marks).encode()).hexdigest()
