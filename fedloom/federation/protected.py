"""`Cohort.reduce` with a protection between the clients' answers and the server."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from fedloom.compression.uplink import Uplink
from fedloom.errors import InputError
from fedloom.federation.work import Keep, Outcome, means_of, sums_of
from fedloom.privacy.protection import Protection, RoundOfClients
from fedloom.privacy.secure.ring import means as means_of_sums
from fedloom.tree import Groups, zeros_like

if TYPE_CHECKING:
    from fedloom.federation.cohort import ClientMethod, Cohort, Rule


def protected_means(
    cohort: Cohort, protection: Protection, fn: ClientMethod, shared: Groups, rule: Rule | None, each: Groups | None
) -> tuple[Groups, dict[str, Tensor]]:
    """Every client runs `fn` and guards its answer; return the means and weights that the protection releases."""
    if rule is not None:
        cohort._refuse_each("a robust rule")
    where = RoundOfClients(cohort.round, cohort.calls, cohort.ids, cohort.seed, cohort.name)
    guard = protection.guard(cohort.algorithm, len(cohort.ids))
    keep: Keep = "secure" if protection.table.secure_aggregation is not None else "sum"
    if cohort.calls and protection.dp is not None:
        raise InputError(
            f"[privacy] dp plans one release a round, and {type(cohort.algorithm).__name__} asks clients more often."
        )
    if guard.noise is not None and protection.dp is not None:
        protection.dp.charge_question(cohort.round, cohort.calls, shared)
    outcome = Outcome()
    if cohort.ids or not protection.releases_noise_alone:
        outcome = cohort._ask(fn, shared, keep, each=each, guard=guard, compress=cohort.up)
    if not cohort.ids and protection.releases_noise_alone:
        # nobody was drawn, or answered: noise is released, and a client that is not in it shows the form of a sum
        outcome = cohort.backend.run(cohort._work(fn, shared, keep, (0,), guard=guard, compress=cohort.up))
        outcome = replace(outcome, sums={node: zeros_like(part) for node, part in outcome.sums.items()})
    if outcome.public:
        raise InputError(f"[privacy] lets no number of a single client leave, and {fn.__name__} makes some public.")
    exact, positions, uplink = shared, outcome.positions or {}, None
    received, _ = cohort.received(exact)
    if keep == "secure" and cohort.up is not None:
        uplink = Uplink(cohort.up, cohort.task.learnt, cohort.seed, cohort.round, where.call, fn.__name__)
    shared = received if uplink is None else uplink.projected(received, positions)
    if keep == "secure" and outcome.total is None:
        outcome, found = protection.secure_sum(where, outcome, shared, guard)
        cohort.own.undo([client for client in cohort.ids if client not in found.clients])
        cohort.note(lost=len(where.ids) - len(found.clients), refused=len(found.refused))
        cohort.ids = found.clients
    if protection.dp is not None:
        total = sums_of(outcome)[0] if outcome.total is None else outcome.total
        groups, weights = protection.release(where, total, outcome.positions or {}, shared, cohort.task)
        if outcome.total is not None:  # sums under masks are in double precision
            groups = {
                group: {name: leaf.to(outcome.dtypes[group][name]) for name, leaf in leaves.items()}
                for group, leaves in groups.items()
            }
    elif outcome.total is not None:
        bases = guard.bases(outcome.positions or {}, outcome.total, shared)
        groups, weights = means_of_sums(outcome.total, outcome.weights, bases, outcome.dtypes), outcome.weights
    else:
        groups, weights = means_of(outcome)
    if uplink is not None:
        groups = uplink.expand(groups, received, positions)
    groups = cohort.rebased(groups, positions, exact)
    cohort.note(**protection.notes())
    return groups, weights
