"""What an algorithm is: a frozen record of hyper-parameters with both halves of the mathematics, client and server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import field_serializer, field_validator, model_validator
from torch import Tensor

from fedloom.aggregation.robust import AnyRule, Median, robust
from fedloom.record import Record
from fedloom.task import Task
from fedloom.training import local
from fedloom.training.clients import Clients
from fedloom.training.local import Groups, Step, Trained, Training
from fedloom.tree import Tree, change, row, rows

if TYPE_CHECKING:
    from fedloom.federation.cohort import Cohort


@dataclass(frozen=True)
class Update:
    """What some clients answer: private leaves with a weight each, and public numbers; all stacked over clients.

    `trained` stays where the data lives: it is what the clients hold after training, to be evaluated there.
    """

    groups: Groups
    weight: Tensor | dict[str, Tensor]  # one number per client, for all groups or for each
    public: dict[str, Tensor] = field(default_factory=dict)
    trained: Trained | None = None

    def weights(self, group: str) -> Tensor:
        return self.weight[group] if isinstance(self.weight, dict) else self.weight


class Algorithm(Record):
    """Base of all algorithms. A new one overrides `round` and a client method, or only `correct`.

    `state` is what the server knows, `shared` what it sends, `own` what each client keeps between rounds; each is a
    dict of named trees. Parameters of local training may be given flat: `FedAvg(lr=0.1)` means
    `FedAvg(train=Training(lr=0.1))`.
    """

    reference: ClassVar[str] = ""
    takes_complex: ClassVar[bool] = True  # whether its server's formulas hold for complex parameters
    pooled: ClassVar[bool] = False  # trains on the union of all clients' data: a baseline, not federated

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

    @property
    def linear(self) -> bool:
        """Whether the server sees only sums, so that secure aggregation is possible."""
        return True

    def init(self, task: Task, model: Tree) -> Groups:
        """The server's state before the first round."""
        return {"model": model}

    def init_own(self, task: Task, model: Tree) -> Groups:
        """What a client keeps before it first takes part."""
        return local.initial_optimizer(self.train, task, model)

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        """One round: straight-line code with any number of verb calls. Returns the new state."""
        raise NotImplementedError(f"{type(self).__name__} is abstract: it defines no round")

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        """Change the gradient of one local step."""
        return step.grad

    def choose(self, task: Task, shared: Groups, own: Groups, data: Clients) -> Groups:
        """What clients keep, after a look at their own data: for algorithms whose clients choose among models.

        It runs where the data lives, before `model` is asked for, so that clients which were not drawn for long also
        use what is best for them now. All is stacked over clients.
        """
        return own

    def model(self, task: Task, shared: Groups, own: Groups) -> Tree:
        """The model that one client uses: the one way to obtain it, for evaluation and export alike."""
        return shared["model"]

    def server_model(self, task: Task, state: Groups) -> Tree | None:
        """The global model, where there is one."""
        return state.get("model")

    def fit(self, task: Task, start: Tree, shared: Groups, own: Groups, data: Clients) -> Trained:
        """Local training of every client from its row of `start`, with this algorithm's correction if it has one."""
        hook = None if type(self).correct is Algorithm.correct else self.correct
        return local.train(task, data, start, self.train, correct=hook, shared=shared, own=own)


def chosen(algorithm: Algorithm, task: Task, shared: Groups, own: Groups, data: Clients) -> Groups:
    """What one client keeps, after it looked at its data if its algorithm has it choose."""
    if type(algorithm).choose is Algorithm.choose:
        return own
    stacked = {group: {name: leaf[None] for name, leaf in leaves.items()} for group, leaves in own.items()}
    return {group: row(leaves, 0) for group, leaves in algorithm.choose(task, shared, stacked, data).items()}


class Central(Algorithm):
    """Base of algorithms with a server that takes means: a robust rule may stand in for the mean."""

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

    def gather(self, cohort: Cohort, fn: Any, shared: Groups, begin: Groups) -> Groups:
        """The mean of every group of the clients' answers, or what the rule makes of each.

        A rule judges changes, so `begin` holds the groups that were not zero before. Who has no weight in a group is
        not judged in it; and a group of a single number, which has no direction to be judged by, becomes its median.
        A client whose answer is not finite leaves the round (see `robust.py`).
        """
        if self.rule is None:
            return cohort.reduce(fn, shared).groups
        answers, found = cohort.map(fn, shared), {}
        groups = {g: change(t, begin[g]) if g in begin else t for g, t in answers.groups.items()}
        before, sound = len(cohort.left_out), cohort.keep_finite(groups, answers.weights)
        for group, stacked in groups.items():
            present = answers.weights[group] != 0
            numbers = sum(leaf[0].numel() for leaf in stacked.values())
            if numbers == 0 or not bool(present.any()):
                found[group] = begin.get(group, {})
                continue
            rule, here = self.rule if numbers > 1 else Median(), present & sound
            gone = before + int((present & ~sound).sum())
            judged = rule(rows(stacked, here), answers.weights[group][here], gone)
            found[group] = {
                name: (judged[name] + begin[group][name] if group in begin else judged[name]).to(leaf.dtype)
                for name, leaf in answers.groups[group].items()
            }
        return found
