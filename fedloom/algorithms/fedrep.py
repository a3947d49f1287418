"""FedRep."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar
from weakref import WeakKeyDictionary

from fedloom.algorithm import Clients, Cohort, Groups, InputError, Positive, Task, Tree, Update, local, without
from fedloom.algorithms.fedavg import FedAvg
from fedloom.tree import expand, select


class FedRep(FedAvg):
    """Clients share the body of a model and keep their own head.

    A client takes steps on F_k(body, h_k) by h_k, then by body_k, which starts as the shared body; then
    body ← Σ p_k body_k. `head` names the leaves of the head by the beginnings of their names; by default it is the last
    layer with parameters. While one of the two is trained, the weights of the other do not change by a bit. With
    `optimizer_state = "keep"`, each phase has its own optimiser, which continues from the client's last round. Use it
    for clients with different labels or tastes.
    """

    trains_once: ClassVar[bool] = False
    reference: ClassVar[str] = "Collins et al., Exploiting Shared Representations for Personalized FL, ICML 2021"

    head: tuple[str, ...] = ()
    """The head's parameters, by the beginnings of their names. By default, the last layer with parameters."""
    head_epochs: Positive = 1.0
    """Local epochs for the head. `epochs` is for the body."""

    def head_leaves(self, task: Task, model: Tree) -> list[str]:
        """Return the names of the leaves that stay with the client."""
        prefixes = self.head or (task.trainable[-1].rpartition(".")[0],)
        starts = [prefix.rstrip(".") for prefix in prefixes]
        named = [name for name in task.form if any(name == p or name.startswith(f"{p}.") for p in starts)]
        if not named or len(named) == len(task.form):
            raise InputError(
                f"The 'head' parameter of FedRep must name some of the model's leaves, but not all. "
                f"Got {list(prefixes)} for {', '.join(task.form)}."
            )
        return [name for name in named if name in model]  # frozen ones are everywhere

    def phases(self, task: Task, model: Tree) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the head's trainable leaves, which are trained first, and of the body's."""
        leaves = self.head_leaves(task, model)
        head = tuple(name for name in task.trainable if name in leaves)
        body = tuple(name for name in task.trainable if name not in leaves)
        if not head or not body:
            raise InputError(
                "FedRep needs trainable parameters in the head and in the body, but all of one are frozen."
            )
        return head, body

    def passes(self, method: str) -> float:
        return self.train.epochs + self.head_epochs

    def init_own(self, task: Task, model: Tree) -> Groups:
        phases = self.phases(task, model)
        kept: Groups = {"head": select(model, self.head_leaves(task, model))}
        for group, state in super().init_own(task, model).items():  # one optimiser for each phase
            for prefix, names in zip(("head_", ""), phases, strict=True):
                kept[prefix + group] = {n: x for n, x in state.items() if n.partition(":")[2] in names}
        return kept

    def average(self, cohort: Cohort, shared: Groups) -> Tree:
        body = without(shared["model"], self.head_leaves(cohort.task, shared["model"]))
        return {**shared["model"], **super().average(cohort, {**shared, "model": body})}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        start = {**expand(shared["model"], len(data)), **own["head"]}
        head, body = (training_only(task, names) for names in self.phases(task, start))
        longer = self.train.with_epochs(self.head_epochs)
        headed = local.train(head, data, start, longer, own=_optimizer(own, "head_optimizer"))
        # the body starts from the shared buffers, not from those that the head's phase changed
        start = {**expand(shared["model"], len(data)), **select(headed.model, own["head"])}
        trained = local.train(body, data, start, self.train, own=_optimizer(own, "optimizer"))
        kept = {f"head_{group}": state for group, state in headed.own.items()}
        return self.answer(shared, trained, data), {**trained.own, **kept, "head": select(trained.model, own["head"])}

    def model(self, task: Task, shared: Groups, own: Groups) -> Tree:
        return {**shared["model"], **own["head"]} if own else shared["model"]


def _optimizer(own: Groups, group: str) -> Groups:
    """Return the optimiser that a phase keeps, under the name that local training uses."""
    return {"optimizer": own[group]} if group in own else {}


_PARTS: WeakKeyDictionary[Task, dict[tuple[str, ...], Task]] = WeakKeyDictionary()


def training_only(task: Task, names: tuple[str, ...]) -> Task:
    """Return the same task, with the same module, in which only these leaves are trained.

    The other leaves count as frozen: no optimiser has them, so neither weight decay nor momentum moves them. Tasks are
    remembered, because what is recorded for a task is used again in every round.
    """
    known = _PARTS.setdefault(task, {})
    if names not in known:
        part = replace(task)
        part.__dict__.update(module=task.module, trainable=names, frozen=task.frozen)
        known[names] = part
    return known[names]
