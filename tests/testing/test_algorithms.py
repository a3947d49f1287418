"""`check_algorithm` finds every broken promise, and names it."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from pydantic import model_validator

from fedloom.algorithm import Update, look
from fedloom.algorithms import FedAvg
from fedloom.data.federation import Federation
from fedloom.errors import InputError
from fedloom.federation.cohort import Cohort
from fedloom.record import NonNegative
from fedloom.task import Task
from fedloom.testing import algorithms, check_algorithm
from fedloom.training.clients import Clients
from fedloom.training.local import Step
from fedloom.tree import Groups, Tree, add, clone, expand, row, scale, sub


class Mine(FedAvg):
    """A pull towards the global model, as a user might write it."""

    pull: NonNegative = 0.1

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return add(step.grad, sub(step.params, step.start), scale=self.pull)


class ChangesShared(FedAvg):
    """The client half works on what it was lent."""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        answer = super().client(task, shared, own, data)
        shared["model"][task.trainable[0]].mul_(0.5)
        return answer


class ChangesState(FedAvg):
    """The server half writes the new weights over the old ones."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        for name, leaf in super().round(state, cohort)["model"].items():
            state["model"][name].copy_(leaf)
        return state


class DependsOnItsRange(FedAvg):
    """Every client is told how many others are computed with it."""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        update, own = super().client(task, shared, own, data)
        return Update({"model": scale(update.groups["model"], 1 + 0.1 * len(data))}, update.weight), own


class CentresItsGroup(FedAvg):
    """Clients trained side by side see each other's weights."""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        update, own = super().client(task, shared, own, data)
        mixed = {
            name: leaf + (0.1 if data.setup.group > 1 else 0.0) * leaf.mean(0)
            for name, leaf in update.groups["model"].items()
        }
        return Update({"model": mixed}, update.weight), own


class Draws(FedAvg):
    """The server adds noise that cannot be repeated."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        new = super().round(state, cohort)
        return {"model": {name: leaf + 0.01 * torch.rand(leaf.shape) for name, leaf in new["model"].items()}}


class DrawsInNumpy(FedAvg):
    """The server adds noise that cannot be repeated, with numpy."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        noise = np.random.normal()
        return {"model": scale(super().round(state, cohort)["model"], 1 + 0.01 * noise)}


MEMORY: dict[int, Tree] = {}


class Remembers(FedAvg):
    """The server keeps something outside of its state, which no checkpoint holds."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        new = super().round(state, cohort)["model"]
        last = MEMORY.get(cohort.round - 1, new) if cohort.calls and cohort.round > 1 else new
        MEMORY.clear()
        MEMORY[cohort.round] = clone(new)
        return {"model": add(scale(new, 0.5), last, scale=0.5)}


class Learns(FedAvg):
    """The server's state has a new leaf after the first round, which is allowed."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        return {**super().round(state, cohort), "last": state["model"]}


class Forgets(FedAvg):
    """The server's state has other numbers after the first round."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        return {"model": {n: leaf.to(torch.float32) for n, leaf in super().round(state, cohort)["model"].items()}}


class Grows(FedAvg):
    """Clients keep more than they said they would."""

    def init_own(self, task: Task, model: Tree) -> Groups:
        return {"last": {}}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        update, _ = super().client(task, shared, {}, data)
        return update, {"last": update.groups["model"]}


class SeesEverybody(FedAvg):
    """The server looks at every client's weights, and says that it does not."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        stacked = cohort.map(self.client, state)["model"]
        return {"model": {name: leaf.to(torch.float64).mean(0).to(leaf.dtype) for name, leaf in stacked.items()}}


class CountsTwice(FedAvg):
    """Clients claim more weight than largest_weight allows."""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        update, own = super().client(task, shared, own, data)
        return replace(update, weight=2 * update.weights("model")), own


class Unbounded(FedAvg):
    """A field with a bound that a validator undoes."""

    pull: NonNegative = 0.1

    @model_validator(mode="before")
    @classmethod
    def _forgive(cls, values: Any) -> Any:
        return {**values, "pull": 0.0} if isinstance(values.get("pull"), float | int | str) else values


class Angry(FedAvg):
    """Refuses wrong values in its own way."""

    kind: Literal["one", "two"] = "one"

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, values: Any) -> Any:
        if values.get("kind", "one") not in ("one", "two"):
            raise KeyError("no")
        return values


class Fails(FedAvg):
    """Works for models whose first leaf is a matrix."""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        if next(iter(shared["model"].values())).dim() != 2:
            from fedloom.errors import TrainingError

            raise TrainingError("a matrix was expected")
        return super().client(task, shared, own, data)


class Misspelt(FedAvg):
    """Corrects nothing, because nothing calls this."""

    def corect(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return step.grad


class KeepsForAbsent(FedAvg):
    """What a client keeps is a part of what it does, as it should be."""

    def init_own(self, task: Task, model: Tree) -> Groups:
        return {**super().init_own(task, model), "last": model}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        middle = {
            name: torch.lerp(leaf, own["last"][name], 0.5) if leaf.is_floating_point() else leaf
            for name, leaf in expand(shared["model"], len(data)).items()
        }
        trained = self.fit(task, middle, shared, own, data)
        return Update({"model": trained.model}, self.weigh(data)), {**trained.own, "last": trained.model}

    def weigh(self, data: Clients) -> torch.Tensor:
        return data.examples.to(torch.float64)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*weights of KeepsForAbsent has no effect", "ignore:.*give positions=")
def test_a_good_algorithm_passes() -> None:
    said: list[str] = []
    check_algorithm(Mine, progress=said.append)
    assert said[0] == "Mine: checking on a dense net …"
    assert len(said) == 4  # one line for each net
    check_algorithm(Mine(lr=0.1, batch_size=5, pull=0.0))
    check_algorithm(Mine, settings={"pull": 0.5, "batch_size": "full"})
    check_algorithm(KeepsForAbsent)
    check_algorithm(Learns)


class Fixed(FedAvg):
    """It fits a model with five features only, and its server begins in some precision."""

    precision: Literal["task", "float32"] = "task"

    def init(self, task: Task, model: Tree) -> Groups:
        dtype = task.torch_dtype if self.precision == "task" else torch.float32
        return {**super().init(task, model), "mean": {"x": torch.zeros(5, dtype=dtype)}}

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        found = cohort.reduce(self.client, {"model": state["model"]})
        return {"model": found["model"], "mean": found["mean"]}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        trained = self.fit(task, expand(shared["model"], len(data)), shared, own, data)
        rows = [data.federation.x[data.rows(position, "train")] for position in range(len(data))]
        features = [look(task, row(trained.model, place), x).features().mean(0) for place, x in enumerate(rows)]
        groups = {"model": trained.model, "mean": {"x": torch.stack(features)}}
        return Update(groups, data.examples, trained=trained, positions={"model": "model"}), trained.own


@pytest.mark.filterwarnings("ignore:.*of Fixed has no effect")
def test_an_algorithm_for_one_kind_of_model_is_checked_on_your_own_task_and_data() -> None:
    draws = np.random.default_rng(1)
    x, y = draws.normal(size=(30, 4)), draws.integers(0, 3, 30)
    federation = Federation.from_arrays(x.astype(np.float32), y, clients=3)
    task = Task("mlp", args={"features": 4, "hidden": [5], "classes": 3})
    said: list[str] = []
    check_algorithm(Fixed, task=task, federation=federation, progress=said.append)
    assert said == ["Fixed: checking on your task in float64 …"]
    with pytest.raises(AssertionError, match="Fixed on your task in float64: the leaves of the server's state"):
        check_algorithm(Fixed(precision="float32"), task=task, federation=federation)
    other = Task("mlp", args={"features": 4, "hidden": [6], "classes": 3})
    with pytest.raises(AssertionError, match="Fixed on your task: the leaves of the server's state"):
        check_algorithm(Fixed, task=other, federation=federation)
    with pytest.raises(InputError, match="takes 'task' and 'federation' together"):
        check_algorithm(Fixed, task=task)


class Doubtful(Mine):
    """Keeps all promises, but its pull and its weights have no effect, and robust rules would judge its positions."""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        trained = self.fit(task, expand(shared["model"], len(data)), shared, own, data)
        return Update({"model": trained.model}, torch.ones(len(data)), trained=trained), trained.own

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return step.grad


def test_what_changes_no_result_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    net = "a dense net"
    monkeypatch.setattr(algorithms, "_NETS", {net: algorithms._NETS[net]})  # the others take long
    with pytest.warns(UserWarning, match="has no effect|give positions=") as warned:
        check_algorithm(Doubtful)
    assert {one.filename for one in warned} == {__file__}  # where it was called
    said = "\n".join(str(one.message) for one in warned)
    assert "The setting weights of Doubtful has no effect: no method that runs reads self.weights." in said
    assert "The setting pull of Doubtful has no effect" in said
    assert "The setting rule" not in said
    assert said.count("Doubtful, 'client': Clients send 'model', which lies near what was shared as 'model'") == 1


def test_facts_about_nets_are_found_once_for_all_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time goes into them. What algorithms record with a net is never used by another one."""
    net = "a dense net"
    monkeypatch.setattr(algorithms, "_NETS", {net: algorithms._NETS[net]})
    check_algorithm(Mine)
    task = algorithms._facts(net).task
    before = {**vars(task)}
    monkeypatch.setattr(algorithms, "probe", lambda *given: pytest.fail("was found before"))
    check_algorithm(Learns)
    assert algorithms._facts(net).task is task
    assert vars(task).keys() == before.keys()


class Bare(FedAvg):
    """A number in the state, where a dict of tensors belongs."""

    def init(self, task: Task, initial: Tree) -> Groups:
        return {**super().init(task, initial), "mu": torch.tensor(0.1)}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (ChangesShared, "changes shared in place"),
        (ChangesState, "was changed in place later"),
        (DependsOnItsRange, "with all clients together, round 1 differs in"),
        (CentresItsGroup, "with pairs of clients side by side, the server's state after round 1 is .* off"),
        (Draws, "draws from a global generator"),
        (DrawsInNumpy, "draws from a global generator"),
        (Remembers, "continuing after round 1, round 2 differs in"),
        (Forgets, "the leaves of the server's state must stay as init gives them|does not run"),
        (Grows, "must always have the leaves that init_own gives it|does not run"),
        (SeesEverybody, "must say linear = False"),
        (CountsTwice, "gives 'model' the weight .* with .* examples, and largest_weight allows .*: override it"),
        (Misspelt, "Misspelt defines `corect`, which fedloom does not call. Did you mean `correct`"),
        (Unbounded, "takes pull = -1.0"),
        (Angry, "must refuse wrong parameters with an InputError, not with KeyError"),
        (Bare, r"Bare.init .*returned a tensor of shape \(\)"),
        (Fails, "Fails on a CNN with batch normalisation does not run: .*a matrix was expected"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*has no effect", "ignore:.*give positions=")
def test_a_broken_promise_is_named(broken: type[FedAvg], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_algorithm(broken)


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        (None, "has no docstring"),
        ("averages.", "without a capital letter"),
        ("Averages the weights of all clients", "a whole sentence"),
        ("It averages.", "too little"),
        ("Averages |w| of all clients.", r"docstring has \| in its first line, which must be plain words"),
    ],
)
def test_a_docstring_should_begin_with_a_plain_sentence(docstring: str | None, sentence: str) -> None:
    """That is said before anything is trained. Pages about fedloom's own algorithms need it; yours may say anything."""
    with pytest.raises(AssertionError, match=sentence):
        check_algorithm(type("Undescribed", (FedAvg,), {"__doc__": docstring, "__module__": "fedloom.algorithms.new"}))
    theirs = type("Undescribed", (Misspelt,), {"__doc__": docstring, "__module__": __name__})
    with pytest.raises(AssertionError, match="does not call"):  # a warning would be an error here
        check_algorithm(theirs)


def test_anything_but_an_algorithm_is_refused() -> None:
    with pytest.raises(TypeError, match="takes an Algorithm"):
        check_algorithm(dict)  # type: ignore[arg-type]


class DoublesInPlace(FedAvg):
    """FedAvg whose clients double the gradient in place, by mistake."""

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        for leaf in step.grad.values():
            leaf.mul_(2)
        return step.grad


class Cuts(FedAvg):
    """FedAvg whose clients lose all but the first row of the gradient."""

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return {name: leaf[:1] for name, leaf in step.grad.items()}


def test_a_correction_in_place_is_found() -> None:
    with pytest.raises(AssertionError, match=r"DoublesInPlace\.correct \(.*\) changes step\.grad\['\S+'\] in place"):
        check_algorithm(DoublesInPlace)


def test_a_correction_of_another_shape_is_named() -> None:
    with pytest.raises(AssertionError, match=r"Cuts\.correct \(.*\) returned a tensor of shape \(1, "):
        check_algorithm(Cuts)
