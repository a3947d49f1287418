"""Says before a run whether its steps are too large: in a rehearsal, training raises the loss it should lower."""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.algorithm import Algorithm
from fedloom.data.federation import Federation
from fedloom.federation.work import Report
from fedloom.task import Task
from fedloom.training import evaluation
from fedloom.training.clients import Clients
from fedloom.training.probe import Probe

# on digits, SGD with lr = 3 and Adam with lr = 0.1 recover from what they raise, and neither raises the loss sixfold
EXPLODES = 10.0


def caution(
    algorithm: Algorithm, reports: Sequence[Report] | None, few: Federation, task: Task, facts: Probe
) -> str | None:
    """Say so if the loss on the `few` training examples of a rehearsal was ever far above that of the initial model.

    Training on the same examples again and again cannot overfit them, so only large steps raise it. Without
    `reports`, a step made the loss infinite.
    """
    raised = "infinity"
    if reports is not None:
        losses = [epoch["loss"] for report in reports[:1] for epoch in report.history]
        if not losses:
            return None  # an algorithm without local training
        data = Clients(few, (0,), setup=facts.setup(group=1), round=1)
        initial = evaluation.evaluate(task, task.initial(), data, 0, "train").values(task)["loss"]
        if max(losses) <= EXPLODES * abs(initial):
            return None
        raised = f"{max(losses):.3g}, from {initial:.3g}"
    return (
        f"in a rehearsal, local steps raised the training loss to {raised}: this may diverge. A smaller lr than "
        f"{algorithm.train.lr:g} may help, or clip.{few.advice_if_diverged}"
    )
