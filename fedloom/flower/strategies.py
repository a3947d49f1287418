"""fedloom's server halves as Flower strategies, for your own ClientApps that train and send weights back.

Flower's own strategies add up every reply, in the order of arrival. Here a reply is left out, with a reason, if it is
not finite, if its leaves, shapes or dtypes differ from the model, or if its weight is invalid. The rest is added up in
the order of the nodes' numbers. A round with too few valid replies changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from types import SimpleNamespace
from typing import Any, cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import Tensor, nn

from fedloom.aggregation import weights
from fedloom.algorithm import Algorithm, Update
from fedloom.algorithms import ALGORITHMS
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedprox import FedProx
from fedloom.backends.protocol import Backend
from fedloom.errors import InputError, RoundAbandoned
from fedloom.federation.client_state import ClientStates
from fedloom.federation.cohort import Cohort
from fedloom.federation.sampling import Sampling
from fedloom.federation.work import ClientWork, Outcome, Report, Work
from fedloom.machine import computing
from fedloom.network.coordinator.update_checks import Limits, check_update
from fedloom.network.protocol.expected_update import ExpectedUpdate
from fedloom.network.protocol.messages import ClientAnswer
from fedloom.network.protocol.rejection import Rejected
from fedloom.task import Task
from fedloom.tree import Groups, Tree, expand, select, stack

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # names of the buffers of batch normalisation


def fits_class(kind: type[Algorithm]) -> bool:
    """Return whether clients only train and send weights. FedProx sends them mu, as Flower's own strategy does."""
    same = {"client", "answer", "fit", "average", "correct"} - ({"correct"} if issubclass(kind, FedProx) else set())
    return issubclass(kind, FedAvg) and all(getattr(kind, name) is getattr(FedAvg, name) for name in same)


def _task_of(model: Tree) -> Any:
    """Return the parts of a task that a server half reads, for a model whose leaves are all trained."""
    buffers = [name for name in model if name.rpartition(".")[2] in BUFFERS]
    if buffers:
        raise InputError(
            f"The model has leaves that are not trained, such as '{buffers[0]}': give the model itself, as in "
            "strategy(algorithm, model=Net())."
        )
    return SimpleNamespace(trainable=[name for name, leaf in model.items() if leaf.is_floating_point()], frozen=())


@dataclass(frozen=True)
class _Replies(Backend):
    """A backend whose clients have already answered."""

    update: Update

    def run(self, work: Work) -> Outcome:
        assert isinstance(work, ClientWork)
        return work.outcome([self.update], {}, tuple(map(Report, work.ids)))


class Strategy(FlowerFedAvg):
    """An algorithm's server half. Flower starts rounds, and the algorithm makes the new model of their replies.

    `model` shows which leaves are parameters; you can leave it out if all are. `quorum` is the number of valid replies
    that a round needs: a share of the nodes in the round, or a number above 1. `settings` are those of Flower's FedAvg
    strategy, such as fraction_train and min_train_nodes.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        model: nn.Module | Task | None = None,
        *,
        quorum: float = 0.0,
        norm_bound: float | None = None,
        weight_cap: float = 1e9,
        **settings: Any,
    ) -> None:
        if not isinstance(algorithm, Algorithm):
            raise InputError(f"A strategy needs an algorithm, such as fedloom.FedAvg(). Got {algorithm!r} instead.")
        for name, bound in (("norm_bound", norm_bound), ("weight_cap", weight_cap)):
            if bound is not None and not bound > 0:
                raise InputError(f"{name} must be more than 0: nothing would be accepted. Got {bound!r} instead.")
        if not fits_class(type(algorithm)):
            known = sorted(name for name, kind in ALGORITHMS.items() if fits_class(kind))
            raise InputError(
                f"{type(algorithm).__name__} needs its own client half, not only trained weights: "
                "`fedloom flower app` writes an app whose ClientApp has it. Strategies for your own ClientApps: "
                f"{', '.join(known)}."
            )
        try:
            super().__init__(**settings)
        except TypeError as error:
            raise InputError(f"Flower's FedAvg strategy does not have such a setting: {error}") from None
        self.algorithm, self.sampling = algorithm, Sampling(quorum=quorum)
        self.limits = Limits(norm_bound, weight_cap)
        self.task: Any = Task(model) if isinstance(model, nn.Module) else model
        self.state: Groups = {}
        self.asked = 0
        self.rejected: list[tuple[int, str]] = []  # nodes and why, in the newest round

    def summary(self) -> None:
        log(INFO, "\t├──> fedloom: %r", self.algorithm)
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        model = _tree(arrays)
        if not self.state:
            if self.task is None:
                self.task = _task_of(model)
            else:
                _check_same_leaves(self.task, model)
            self.state = self.algorithm.init(self.task, model)
        self.state = {**self.state, "model": model}
        if isinstance(self.algorithm, FedProx):
            config["proximal-mu"] = self.algorithm.mu
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self.asked = len(messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        accepted = self._accepted(server_round, replies)
        needed = max(self.sampling.needed(self.asked), 1)
        if len(accepted) < needed:
            log(WARNING, "Round %s: %s valid replies of %s that are needed.", server_round, len(accepted), needed)
            return None, None
        contents, trees, examples = zip(*accepted, strict=True)
        try:
            with computing():
                state = self._round(server_round, trees, torch.tensor(examples, dtype=torch.float64))
        except RoundAbandoned as error:
            log(WARNING, "Round %s: %s", server_round, error)
            return None, None
        # averaging equal numbers may change their last bits, and frozen parameters must not drift
        frozen = select(self.state["model"], self.task.frozen)
        self.state = {**state, "model": {**state["model"], **frozen}}
        arrays = ArrayRecord({name: Array(leaf.numpy()) for name, leaf in self.state["model"].items()})
        return arrays, self.train_metrics_aggr_fn(_comparable(contents), self.weighted_by_key)

    def _round(self, number: int, trees: Sequence[Tree], examples: Tensor) -> Groups:
        weigh = weights.by_size(cast(FedAvg, self.algorithm).weights, examples)
        update = Update({"model": stack(list(trees))}, weigh, positions={"model": "model"})
        ids = tuple(range(len(trees)))
        cohort = Cohort(_Replies(update), self.algorithm, self.task, ids, len(ids), number, 0, ClientStates({}))
        return self.algorithm.round(self.state, cohort)

    def _accepted(self, server_round: int, replies: Iterable[Message]) -> list[tuple[RecordDict, Tree, float]]:
        """Return the valid replies in the order of their nodes, and log the others."""
        accepted, self.rejected = [], []
        for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
            try:
                tree, weight = self._read(reply)
                accepted.append((reply.content, tree, weight))
            except Rejected as error:
                node, why = reply.metadata.src_node_id, f"{error.code}: {error.message}"
                self.rejected.append((node, why))
                log(WARNING, "Round %s: node %s is left out: %s", server_round, node, why)
        return accepted

    def _read(self, reply: Message) -> tuple[Tree, float]:
        """Return a reply's weights and its number of examples; raise `Rejected` if they cannot be averaged."""
        if reply.has_error():
            raise Rejected("malformed", f"its ClientApp failed: {reply.error.reason}")
        arrays, metrics = list(reply.content.array_records.values()), list(reply.content.metric_records.values())
        if len(arrays) != 1 or len(metrics) != 1 or self.weighted_by_key not in metrics[0]:
            raise Rejected(
                "malformed", f"a reply must have one ArrayRecord and one MetricRecord with '{self.weighted_by_key}'"
            )
        weight = metrics[0][self.weighted_by_key]
        if not isinstance(weight, (int, float)):
            raise Rejected("weight", f"'{self.weighted_by_key}' must be one number")
        try:
            tree = _tree(arrays[0])
        except Exception as error:  # the bytes are not ours, and NumPy's reader raises many kinds
            raise Rejected("malformed", f"its arrays cannot be read: {error}") from None
        one = Update({"model": expand(tree, 1)}, {"model": torch.tensor([weight], dtype=torch.float64)})
        shapes = {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in self.state["model"].items()}
        expected = ExpectedUpdate({"model": shapes}, {}, {"model": "model"})
        check_update(ClientAnswer(0, one, None, (), {}), expected, self.state, self.limits)
        return tree, float(weight)


def _check_same_leaves(task: Task, model: Tree) -> None:
    """Refuse the leaves of another model: they would be averaged, but never take the server's step."""
    different = sorted(task.form.keys() ^ model.keys())
    if different:
        raise InputError(f"The arrays do not match the model of the strategy: only one of them has '{different[0]}'.")


def _comparable(replies: Sequence[RecordDict]) -> list[RecordDict]:
    """Keep only the metrics that all replies have in the same form: others have no mean."""
    records = [next(iter(reply.metric_records.values())) for reply in replies]
    forms = [{(key, len(value) if isinstance(value, list) else None) for key, value in r.items()} for r in records]
    common = {key for key, _ in set.intersection(*forms)}
    dropped = sorted({key for record in records for key in record} - common)
    if dropped:
        log(WARNING, "Not all nodes sent these metrics, or not in the same form: %s", ", ".join(dropped))
    return [
        RecordDict({"metrics": MetricRecord({key: value for key, value in record.items() if key in common})})
        for record in records
    ]


def _tree(arrays: ArrayRecord) -> Tree:
    return {name: torch.from_numpy(array.numpy()) for name, array in arrays.items()}
