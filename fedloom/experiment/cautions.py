"""What a reader should know about a plan before its run trains: settings that may mislead, or have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from fedloom import environment_reads, user_code
from fedloom.algorithm import Algorithm, Central
from fedloom.data.federation import Federation
from fedloom.experiment import unequal_weights
from fedloom.experiment.plan import Plan
from fedloom.metrics import about_direction
from fedloom.privacy.dp import drowning
from fedloom.privacy.words import doubts, scaled_by_examples
from fedloom.task import Task
from fedloom.unread_fields import without_effect

OF_SECOND_CLASS = ("f1", "precision", "recall", "sensitivity", "specificity", "auprc")


def cautions(plan: Plan, task: Task, federation: Federation, seed: int | None = None) -> list[str]:
    """Say what a reader should know about the algorithms with this task and the clients of a seed, or the first one."""
    found, where = [], plan.in_seed(plan.seeds[0] if seed is None else seed)
    for label, algorithm in plan.algorithms.items():
        found += [f"{label}: {said}" for said in user_code.misspelt(type(algorithm))]
        found += [f"{label}: {said}" for said in _without_effect(algorithm)]
        if said := algorithm.caution(task):
            found.append(f"{label}: {said}.")
    least = min(filter(None, federation.sizes("train").tolist()), default=None)  # a secure sum hides them
    weak = [
        *doubts(plan.privacy, federation.clients, least, where, plan.cohort.steady_size(federation.clients)),
        *scaled_by_examples(plan.privacy, federation.scaled_by),
    ]
    unequal = unequal_weights.caution(weights_of(plan), federation.sizes("train").tolist(), where)
    short, positive = _without_short_batches(plan, federation, where), _about_frequent_class(task, federation)
    read = environment_reads.cautions(plan.code_files().values())
    about_noise, about_metrics = _drowned(plan, task, federation), about_direction(task.measures)
    alone = _alone(plan, federation)
    return [*found, *alone, *weak, *about_noise, *unequal, *short, *positive, *about_metrics, *_few_rounds(plan), *read]


def _alone(plan: Plan, federation: Federation) -> Iterator[str]:
    """One client: whatever it sends, there is nobody to learn from."""
    if federation.clients == 1 and not all(algorithm.pooled for algorithm in plan.algorithms.values()):
        yield (
            "There is one client, so nothing is federated, and most algorithms train the same model. A partition in "
            "[data] divides examples among several."
        )


def _drowned(plan: Plan, task: Task, federation: Federation) -> Iterator[str]:
    """Noise that is longer than all that clients can learn. Compression sends fewer numbers, which get less of it."""
    if plan.compress.up is None:
        model, sizes = task.initial(), federation.sizes("train").tolist()
        parameters = sum(model[name].numel() for name in task.trainable)
        label, first = next(iter(plan.algorithms.items()))
        by_examples = weights_of(plan).get(label) == "examples"
        yield from drowning.cautions(
            plan.privacy, plan.cohort, plan.rounds, parameters, sizes, first.train, by_examples
        )


def _about_frequent_class(task: Task, federation: Federation) -> Iterator[str]:
    """Metrics of the second of two classes, where people mostly mean the rare one."""
    names = [metric.name for metric in task.measures if metric.name in OF_SECOND_CLASS]
    if names and len(federation.classes) == 2 and not federation.y.is_floating_point():
        share = float((federation.y == 1).double().mean())
        if share > 0.5:
            first, second = federation.classes
            yield (
                f"{', '.join(names)}: the class that counts is the second by name, {second}, which {100 * share:.0f} % "
                f"of examples have. {names[0]}_of_0 is about {first}."
            )


def _without_effect(algorithm: Algorithm) -> Iterator[str]:
    """Settings that were given, and that nothing reads."""
    for name, said in without_effect(type(algorithm)).items():
        if getattr(algorithm, name) != type(algorithm).model_fields[name].get_default(call_default_factory=True):
            yield said


def _without_short_batches(plan: Plan, federation: Federation, where: str) -> Iterator[str]:
    """`drop_last` at clients that have no batch to drop: all of their examples are less than one."""
    largest = int(federation.sizes("train").max())
    labels: dict[int, list[str]] = {}  # by batch size
    for label, algorithm in plan.algorithms.items():
        smallest = min((size for size in algorithm.train.batch_sizes if isinstance(size, int)), default=0)
        if algorithm.train.drop_last and not algorithm.pooled and smallest > largest:
            labels.setdefault(smallest, []).append(label)
    for size, found in labels.items():
        yield (
            f"{', '.join(found)}: drop_last = true drops nothing{where}: the largest client has {largest:,} training "
            f"examples, fewer than batch_size = {size:,}, and a client's only batch is always used."
        )


def _few_rounds(plan: Plan) -> Iterator[str]:
    """No rounds, or a headline over more rounds than are measured."""
    if plan.rounds == 0:
        yield "rounds = 0: nothing is trained, and the model is only evaluated as it is given."
        return
    every, rule = plan.evaluate.every, plan.evaluate.headline
    measured = len({1, plan.rounds, *range(every, plan.rounds + 1, every)})
    if rule.startswith("last:") and int(rule.removeprefix("last:")) > measured:
        yield f'[evaluate] headline = "{rule}", but only {measured} rounds are measured: it is the mean of all of them.'


def weights_of(plan: Plan) -> dict[str, str]:
    """Return how each algorithm that takes a mean weighs clients."""
    found = (
        (label, getattr(one, "weights", None)) for label, one in plan.algorithms.items() if isinstance(one, Central)
    )
    return {label: weights for label, weights in found if isinstance(weights, str)}
