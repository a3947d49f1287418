"""Everything you need to write an algorithm: `from fedloom.algorithm import Algorithm, Update, Clients, Step, add, …`.

An algorithm is a frozen record of hyper-parameters with both halves of the mathematics. The server half is `round`; it
asks the clients of a `Cohort` to run a client method, which returns an `Update`. Where only the gradient of a local
step changes, inherit from FedAvg and override `correct`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import field_serializer, field_validator, model_validator
from torch import Tensor

from fedloom import keys
from fedloom.aggregation.means import mean
from fedloom.aggregation.robust import AnyRule, robust
from fedloom.aggregation.weights import by_examples, by_score, by_size, metropolis, topology, uniform, within_one_std
from fedloom.errors import InputError
from fedloom.federation.cohort import Aggregate, Answers, Cohort
from fedloom.federation.work import Inbox
from fedloom.former_keys import without_former_keys
from fedloom.record import AtLeastOne, Count, Decay, NonNegative, Positive, Record, Share
from fedloom.task import Task
from fedloom.training import local
from fedloom.training.batch_view import Batch, View, look
from fedloom.training.clients import Clients
from fedloom.training.evaluation import batch, evaluate
from fedloom.training.full_gradient import full_gradient
from fedloom.training.local import Groups, Step, Trained, Training
from fedloom.tree import Tree, add, clone, concat, expand, map_leaves, row, rows, scale, select, stack, sub, zeros_like

__all__ = ["Aggregate", "Algorithm", "Answers", "AtLeastOne", "Batch", "Central", "Clients", "Cohort", "Count"]
__all__ += ["Decay", "Groups", "Inbox", "InputError", "NonNegative", "Positive", "Share", "Step", "Task", "Trained"]
__all__ += ["Training", "Tree", "Update", "View", "add", "batch", "by_examples", "by_score", "by_size", "clone"]
__all__ += ["concat", "evaluate", "expand", "full_gradient", "keys", "local", "look", "map_leaves", "mean"]
__all__ += ["metropolis", "row", "rows", "scale", "select", "stack", "sub", "topology"]
__all__ += ["uniform", "within_one_std", "without", "zeros_like"]


@dataclass(frozen=True)
class Update:
    """What some clients send: private leaves with weights, and public numbers. All of it is stacked over clients.

    `positions` says what the numbers mean. `positions={"model": "model"}` declares that the group "model" holds
    positions that started from the leaves of `shared["model"]`. Every other group holds changes, which start from zero.
    Robust rules and the bounds on an update's norm judge `position − base`, or the change itself.
    """

    groups: Groups
    weight: Tensor | dict[str, Tensor]  # one number per client, for all groups or for each
    public: dict[str, Tensor] = field(default_factory=dict)
    trained: Trained | None = None  # stays where the data lives, to be evaluated there after training
    positions: dict[str, str] = field(default_factory=dict)  # group → the group of `shared` it started from

    def weights(self, group: str) -> Tensor:
        return self.weight[group] if isinstance(self.weight, dict) else self.weight


class Algorithm(Record):
    """Base of all algorithms. A new one overrides `round` and a client method, or only `correct`.

    `state` is what the server knows, `shared` what it sends, `own` what each client keeps between rounds; each is a
    dict of named trees. You may give the parameters of local training directly: `FedAvg(lr=0.1)` means
    `FedAvg(train=Training(lr=0.1))`.
    """

    name: ClassVar[str]  # in experiment files; by default, the name of the class in lower case
    reference: ClassVar[str] = ""
    takes_complex: ClassVar[bool] = True  # whether its formulas hold for complex parameters
    takes_stale: ClassVar[bool] = False  # whether its formulas hold for answers that started from earlier versions
    mixes_weights: ClassVar[bool] = False  # whether stale answers count as they are, for `cohort.freshness` to scale
    takes_noise: ClassVar[bool] = True  # whether its formulas hold for noisy sums of clipped answers
    remembers_sent: ClassVar[bool] = False  # whether clients keep sums of what they send, as the server does
    trains_once: ClassVar[bool] = False  # whether clients use their examples in one local training, and nowhere else
    reads_batch: ClassVar[bool] = False  # whether `correct` uses `step.batch`: then clients are trained one by one
    divides_by_lr: ClassVar[bool] = False  # whether its formula divides by the learning rate, so that it must not be 0
    pooled: ClassVar[bool] = False  # trains on the union of all clients' data: a baseline, not federated
    needs: ClassVar[str] = ""  # "linear" if it trains only linear models
    has_one_rate: ClassVar[bool] = False  # whether its formula has one learning rate for all steps of a round
    refuses: ClassVar[Mapping[str, str]] = {}  # keys of [train] that contradict its formula, and the message for each

    train: Training = Training()
    """How clients train. You may also give its fields directly, as in `FedAvg(lr=0.1)`."""

    @classmethod
    def known(cls) -> list[str]:
        return sorted({*cls.model_fields, *Training.model_fields} - {"train"})

    @model_validator(mode="before")
    @classmethod
    def _flat_training(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        flat = {k: v for k, v in values.items() if k in Training.model_fields and k not in cls.model_fields}
        if not flat:
            return values
        train = values.get("train", {})
        given = train.model_dump(exclude_unset=True) if isinstance(train, Training) else dict(train)
        return {**{k: v for k, v in values.items() if k not in flat}, "train": {**given, **flat}}

    @model_validator(mode="after")
    def _suits_formula(self) -> Algorithm:
        for key, why in self.refuses.items():
            if getattr(self.train, key) != Training.model_fields[key].default:
                raise InputError(f"{why} Got {key} = {getattr(self.train, key)!r}.")
        if self.has_one_rate:
            self.train.refuse_uneven_rates(type(self).__name__)
        return self

    @property
    def linear(self) -> bool:
        """Whether the server sees only sums, so that secure aggregation is possible."""
        return True

    @property
    def sums_cover_all(self) -> bool:
        """Whether every client counts in every sum. If only some do, a sum can show what a single client sent."""
        return True

    @property
    def needs_all_from_start(self) -> str:
        """Why no client can join after the first round; empty if one can. Override it if `round` reads `population`."""
        return ""

    @property
    def chooses(self) -> bool:
        """Whether clients choose among several models (see `choose`)."""
        return type(self).choose is not Algorithm.choose

    def caution(self, task: Task) -> str:
        """Say what a reader should know about this algorithm with this task; empty if there is nothing."""
        return ""

    def models_scored(self, clients: int) -> float:
        """Return how many models a client evaluates on its validation split in a round, for estimates of time."""
        return 0.0

    def passes(self, method: str) -> float:
        """Return how often a client passes over its training split when it runs a method, for the virtual clock.

        Override it if clients take other steps than those of one local training.
        """
        return self.train.epochs

    def largest_weight(self, examples: int) -> float:
        """Return the largest weight of a client with this many training examples: a coordinator refuses larger ones.

        Override it if clients weigh their answers by something else than their examples; `math.inf` sets no bound.
        """
        return 1.0 if getattr(self, "weights", "") == "uniform" else float(max(examples, 1))

    def init(self, task: Task, model: Tree) -> Groups:
        """Return the server's state before the first round."""
        return {"model": model}

    def init_own(self, task: Task, model: Tree) -> Groups:
        """Return what a client keeps before it first takes part."""
        return local.initial_optimizer(self.train, task, model)

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        """Run one round, straight-line code with any number of verbs of the cohort, and return the new state."""
        raise NotImplementedError(f"{type(self).__name__} is abstract: it does not define round")

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        """Return the gradient to use in one local step."""
        return step.grad

    def choose(self, task: Task, shared: Groups, own: Groups, data: Clients) -> Groups:
        """Return what clients keep after a look at their own data, if clients choose among several models.

        It runs where the data lives, before `model` is called. So clients that were not drawn for a long time also
        use the model that is best for them now. Everything is stacked over clients.
        """
        return own

    def model(self, task: Task, shared: Groups, own: Groups) -> Tree:
        """Return the model that one client uses, in evaluations and exports alike."""
        return shared["model"]

    def server_model(self, task: Task, state: Groups) -> Tree | None:
        """Return the global model, if there is one."""
        return state.get("model")

    def fit(self, task: Task, start: Tree, shared: Groups, own: Groups, data: Clients) -> Trained:
        """Train every client from its row of `start`, with this algorithm's correction if it has one."""
        hook = None if type(self).correct is Algorithm.correct else self.correct
        return local.train(task, data, start, self.train, correct=hook, shared=shared, own=own)


class Central(Algorithm):
    """Base of algorithms whose server takes means. A robust rule may replace the mean: pass it to `cohort.reduce`."""

    rule: AnyRule | None = None
    """A robust rule that replaces the mean of the clients' changes."""

    @field_validator("rule", mode="before")
    @classmethod
    def _named_rule(cls, value: object) -> object:
        return robust(value)

    @field_serializer("rule")
    def _rule_table(self, rule: AnyRule | None) -> object:
        return None if rule is None else {"name": rule.name, **rule.model_dump()}

    @property
    def linear(self) -> bool:
        return self.rule is None

    @model_validator(mode="before")
    @classmethod
    def _moved_keys(cls, values: Any) -> Any:
        return without_former_keys(cls, values) if isinstance(values, dict) else values


def without(tree: Tree, names: Any) -> Tree:
    """Return the leaves that are not named, such as the buffers besides the trainable leaves."""
    return {name: leaf for name, leaf in tree.items() if name not in names}
