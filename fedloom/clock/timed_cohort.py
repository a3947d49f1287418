"""A cohort in virtual time: clients that are too slow, or lost, leave the round before they compute."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedloom.clock.clock import Clock
from fedloom.federation.cohort import Cohort
from fedloom.federation.work import ClientWork


@dataclass
class TimedCohort(Cohort):
    """The clients of one round in virtual time. Every call of a verb takes as long as its clients do."""

    clock: Clock = field(kw_only=True)

    def _reached(self, work: ClientWork) -> ClientWork:
        fewest = 1 if self.protection is None else self.protection.fewest(len(work.ids))
        return self.clock.answering(work, self.backend, max(self.needed, fewest))
