"""fedloom's server halves as Flower strategies, for your own ClientApps that train and send weights back.

Flower's own strategies add up every reply, in the order of arrival. Here a reply is left out, with a reason, if it is
not finite, if its leaves, shapes or dtypes differ from the model, or if its weight is invalid. The rest is added up in
the order of the nodes' numbers. A round with too few valid replies changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
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
from fedloom.network.protocol.messages import Assignment, ClientAnswer
from fedloom.network.protocol.rejection import Rejected
from fedloom.task import Task
from fedloom.training.local import Groups
from fedloom.tree import Tree, select, stack

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # names of the buffers of batch normalisation


def make(
    algorithm: Algorithm,
    model: nn.Module | Task | None = None,
    *,
    quorum: float = 0.0,
    norm_bound: float | None = None,
    weight_cap: float = 1e9,
    **settings: Any,
) -> Strategy:
    """Make a strategy. `settings` are those of Flower's FedAvg strategy, such as fraction_train and min_train_nodes.

    `model` shows which leaves are parameters; you can leave it out if all are. `quorum` is the number of valid replies
    that a round needs: a share of the nodes in the round, or a number above 1.
    """
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
    sampling = Sampling(quorum=quorum)
    return Strategy(algorithm, model, sampling, Limits(norm_bound, weight_cap), **settings)


def fits_class(kind: type[Algorithm]) -> bool:
    """Return whether clients only train and send weights. FedProx sends them mu, as Flower's own strategy does."""
    same = {"client", "answer", "fit", "average", "correct"} - ({"correct"} if issubclass(kind, FedProx) else set())
    return issubclass(kind, FedAvg) and all(getattr(kind, name) is getattr(FedAvg, name) for name in same)


@dataclass(frozen=True)
class _Leaves:
    """The part of a task that a server half reads."""

    trainable: tuple[str, ...]

    @staticmethod
    def of(model: Tree) -> _Leaves:
        buffers = [name for name in model if name.rpartition(".")[2] in BUFFERS]
        if buffers:
            raise InputError(
                f"The model has leaves that are not trained, such as '{buffers[0]}': give the model itself, as in "
                "strategy(algorithm, model=Net())."
            )
        return _Leaves(tuple(name for name, leaf in model.items() if leaf.is_floating_point()))


@dataclass(frozen=True)
class _Replies(Backend):
    """A backend whose clients have already answered."""

    update: Update
    count: int

    def run(self, work: Work) -> Outcome:
        assert isinstance(work, ClientWork)
        return work.outcome(self.update, {}, tuple(Report(client) for client in range(self.count)))


class Strategy(FlowerFedAvg):
    """An algorithm's server half as a Flower strategy."""

    def __init__(
        self,
        algorithm: Algorithm,
        model: nn.Module | Task | None,
        sampling: Sampling,
        limits: Limits,
        **settings: Any,
    ) -> None:
        try:
            super().__init__(**settings)
        except TypeError as error:
            raise InputError(f"Flower's FedAvg strategy does not have such a setting: {error}") from None
        self.algorithm, self.sampling, self.limits = algorithm, sampling, limits
        self.task = Task(model) if isinstance(model, nn.Module) else model
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
                self.task = cast(Task, _Leaves.of(model))
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
        accepted, trees, examples = self._accepted(server_round, replies)
        needed = max(self.sampling.needed(self.asked), 1)
        if len(trees) < needed:
            log(WARNING, "Round %s: %s valid replies of %s that are needed.", server_round, len(trees), needed)
            return None, None
        try:
            with computing():
                state = self._round(server_round, trees, torch.tensor(examples, dtype=torch.float64))
        except RoundAbandoned as error:
            log(WARNING, "Round %s: %s", server_round, error)
            return None, None
        # averaging equal numbers may change their last bits, and frozen parameters must not drift
        frozen = select(self.state["model"], getattr(self.task, "frozen", ()))
        self.state = {**state, "model": {**state["model"], **frozen}}
        arrays = ArrayRecord({name: Array(leaf.numpy()) for name, leaf in self.state["model"].items()})
        return arrays, self.train_metrics_aggr_fn(_comparable(accepted), self.weighted_by_key)

    def _round(self, number: int, trees: Sequence[Tree], examples: Tensor) -> Groups:
        stacked = stack(list(trees))
        weigh = weights.by_size(cast(FedAvg, self.algorithm).weights, examples)
        backend = _Replies(Update({"model": stacked}, weigh, positions={"model": "model"}), len(trees))
        assert self.task is not None
        ids = tuple(range(len(trees)))
        cohort = Cohort(backend, self.algorithm, self.task, ids, len(trees), number, 0, ClientStates({}))
        return self.algorithm.round(self.state, cohort)

    def _accepted(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[list[RecordDict], list[Tree], list[float]]:
        """Return the valid replies in the order of their nodes, and log the others."""
        self.rejected = []
        accepted, trees, examples = [], [], []
        shapes = {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in self.state["model"].items()}
        form = ExpectedUpdate({"model": shapes}, {}, {"model": "model"})
        for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
            try:
                tree, weight = self._read(reply)
                ask = Assignment(
                    id="", kind="train", verb="map", label="", seed=0, round=server_round, attempt=0,
                    cohort=self.asked, population=self.asked, clients=(),
                )  # fmt: skip
                one = {name: leaf[None] for name, leaf in tree.items()}
                update = Update({"model": one}, {"model": torch.tensor([weight], dtype=torch.float64)})
                check_update(ClientAnswer(0, update, None, (), {}), ask, form, self.state, self.limits, False)
            except Rejected as error:
                node, why = reply.metadata.src_node_id, f"{error.code}: {error.message}"
                self.rejected.append((node, why))
                log(WARNING, "Round %s: node %s is left out: %s", server_round, node, why)
                continue
            accepted.append(reply.content)
            trees.append(tree)
            examples.append(weight)
        return accepted, trees, examples

    def _read(self, reply: Message) -> tuple[Tree, float]:
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
            return _tree(arrays[0]), float(weight)
        except Exception as error:  # the bytes are not ours, and NumPy's reader raises many kinds
            raise Rejected("malformed", f"its arrays cannot be read: {error}") from None


def _check_same_leaves(task: Task, model: Tree) -> None:
    """Refuse the leaves of another model: they would be averaged, but never take the server's step."""
    different = sorted(task.initial().keys() ^ model.keys())
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
