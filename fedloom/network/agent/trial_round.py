"""One round of an algorithm on made-up examples, to see which verbs it uses and what its clients answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedloom.algorithm import Algorithm
from fedloom.backends.protocol import Backend
from fedloom.data.federation import Federation
from fedloom.federation.client_state import ClientStates
from fedloom.federation.cohort import Cohort
from fedloom.federation.work import ClientWork, Place, Work
from fedloom.machine import computing
from fedloom.network.coordinator.expected_update import Template, template
from fedloom.network.protocol.messages import verb_of
from fedloom.task import Task


@dataclass
class _Watching(Backend):
    """A backend that performs work and notes what it looks like."""

    place: Place
    kept: Any
    seen: list[tuple[str, str, Template]] = field(default_factory=list)

    def run(self, work: Work) -> Any:
        if isinstance(work, ClientWork):
            self.seen.append((verb_of(work), work.method, template(work, self.kept, self.place)))
        with computing():
            return work.merge([work.perform(self.place)])


def answers_of(algorithm: Algorithm, task: Task, place: Place) -> list[tuple[str, str, Template]]:
    """Verb, method and form of every answer that a client gives in the first round."""
    initial = task.initial()
    kept = algorithm.init_own(task, initial)
    inner = place.federation
    half = len(inner.y) // 2
    two: Federation = replace(inner, offsets=np.array([0, half, len(inner.y)]), names=None)
    watching = _Watching(replace(place, federation=two), kept)
    cohort = Cohort(watching, algorithm, task, (0, 1), 2, 1, 0, ClientStates(kept))
    algorithm.round(algorithm.init(task, initial), cohort)
    return watching.seen
