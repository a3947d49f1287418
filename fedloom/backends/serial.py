"""The reference backend: compute one client after another in this process, so that errors name the client."""

from __future__ import annotations

from typing import Any

from fedloom.backends.protocol import Backend
from fedloom.data.federation import Federation
from fedloom.federation.work import Place, Work
from fedloom.machine import computing
from fedloom.task import Task
from fedloom.training.clients import Setup


class Serial(Backend):
    """Loops over clients."""

    def __init__(self, federation: Federation, task: Task, setup: Setup | None = None) -> None:
        from fedloom.training.probe import probe

        self.setup = setup or probe(federation, task).setup(group=1)
        self.place = Place(federation, task, self.setup)

    def run(self, work: Work) -> Any:
        units = len(work.costs(self.place))
        with computing():
            return work.merge(work.part(unit, unit + 1).perform(self.place) for unit in range(units))
