"""Ends a round whose result is not finite, and says which client is the likely cause."""

from __future__ import annotations

from fedloom import tree
from fedloom.data.federation import Federation
from fedloom.errors import Diverged
from fedloom.federation.cohort import Cohort
from fedloom.tree import Groups


def checked(state: Groups, cohort: Cohort, federation: Federation) -> Groups:
    """Return the new state, if it is finite and so is what clients keep. (On a network, agents check that.)"""
    trainable = cohort.task.trainable
    for name, group in state.items():
        if not tree.is_sound(group, trainable):
            raise _diverged(f"the new {name}", cohort, federation)
    for client in sorted(cohort.own.changed):
        for name, group in cohort.own.states[client].items():
            if not tree.is_sound(group, trainable):
                raise _diverged(f"the {name} that client '{federation.name(client)}' keeps", cohort, federation)
    return state


def _diverged(what: str, cohort: Cohort, federation: Federation) -> Diverged:
    """Make an error that names the clients whose answers were not finite, or else the one that pulled hardest."""
    everyone = {report.client for report in cohort.reports}
    wrong = sorted({report.client for report in cohort.reports if not report.finite})
    names = ", ".join(f"'{federation.name(client)}'" for client in wrong[:3])
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    why = f", because the update of {names}{more} is not" if len(wrong) in range(1, max(len(everyone), 2)) else ""
    hardest = max(cohort.reports, key=lambda report: (report.pull, -report.client), default=None)
    largest = hardest.client if hardest is not None and hardest.pull > 0 and not wrong else None
    if largest is not None:
        why = f"; the largest update, by weight × length of its change, is that of '{federation.name(largest)}'"
    advice = f"A smaller lr or a clip may help.{federation.advice_if_diverged}"
    return Diverged(f"Round {cohort.round}: {what} is not finite{why}. {advice}", largest)
