"""Model, loss and metrics."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedloom import tree
from fedloom.algorithms.fedavg import FedAvg
from fedloom.errors import InputError
from fedloom.federation.engine import fit
from fedloom.task import Task, leaves
from tests.conftest import CLASSES, FEATURES, Dense, Normed, Recurrent, federation


class Tied(nn.Module):
    """One matrix under two names, a frozen parameter and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("saved", torch.zeros(1))
        self.register_buffer("passing", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_the_same_seed_gives_the_same_initial_weights_whatever_the_global_generator_is() -> None:
    torch.manual_seed(1)
    first = Task(Dense, seed=3).initial()
    torch.manual_seed(2)
    assert tree.sha256(Task(Dense, seed=3).initial()) == tree.sha256(first)
    assert tree.sha256(Task(Dense, seed=4).initial()) != tree.sha256(first)


@pytest.mark.parametrize("init", ["torch", "glorot"])
def test_making_a_model_leaves_the_global_generator_alone(init: str) -> None:
    before = torch.random.get_rng_state()
    Task(Dense, init=init).initial()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_module_brings_its_own_weights_and_stays_as_it_is() -> None:
    module = Dense()
    task = Task(module)
    initial = task.initial()
    for name, leaf in module.state_dict().items():
        assert torch.equal(initial[name], leaf)
    initial["out.bias"].fill_(7)
    task.module.out.bias.data.fill_(8)
    assert not (module.out.bias == 7).any()
    assert not (module.out.bias == 8).any()


def test_a_function_may_build_the_model_with_arguments() -> None:
    def make(width: int) -> nn.Module:
        return nn.Linear(width, 2)

    assert Task(make, args={"width": 5}).initial()["weight"].shape == (2, 5)


def test_what_is_not_a_module_is_refused() -> None:
    with pytest.raises(InputError, match=r"The model '<lambda>' must be a torch\.nn\.Module\. Got int instead\."):
        Task(lambda: 3).build()


def test_glorot_draws_matrices_within_their_bound_and_leaves_normalisation_as_it_was() -> None:
    weights = Task(Normed, init="glorot").initial()
    bound = (6 / (16 + 6)) ** 0.5
    assert 0.8 * bound < weights["hidden.weight"].abs().max() <= bound
    for name in ("hidden.bias", "norm.bias", "out.bias"):
        assert torch.count_nonzero(weights[name]) == 0
    assert torch.equal(weights["norm.weight"], torch.ones(6))
    assert torch.count_nonzero(Task(Recurrent, init="glorot").initial()["lstm.bias_hh_l0"]) == 0
    again = Task(Normed, init="glorot").initial()
    assert tree.sha256(weights) == tree.sha256(again) != tree.sha256(Task(Normed, init="glorot", seed=1).initial())


def test_weights_may_come_from_a_file(tmp_path: Path) -> None:
    wanted = Task(Dense, seed=9).initial()
    save_file(wanted, tmp_path / "weights.safetensors")
    assert tree.sha256(Task(Dense, init=str(tmp_path / "weights.safetensors")).initial()) == tree.sha256(wanted)


def test_a_file_of_weights_that_do_not_fit_is_refused_with_their_names(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({**tree.select(Task(Dense).initial(), ["out.weight", "out.bias"]), "other": torch.ones(1)}, file)
    with pytest.raises(
        InputError, match=r"missing or of another shape: hidden\.weight, hidden\.bias; unknown: other\."
    ):
        Task(Dense, init=str(file)).initial()
    with pytest.raises(InputError, match=r"There is no file .*\. In double quotes a backslash means more than itself"):
        Task(Dense, init="my\tuned.safetensors").initial()
    with pytest.raises(InputError, match=r"must be torch, glorot or a safetensors file\. There is no file .*nowhere"):
        Task(Dense, init=str(tmp_path / "nowhere")).initial()


def test_the_precision_holds_for_all_floating_leaves() -> None:
    weights = Task(Normed, dtype="float64").initial()
    assert {leaf.dtype for name, leaf in weights.items() if name != "norm.num_batches_tracked"} == {torch.float64}
    with pytest.raises(InputError, match=r"The 'dtype' of a task must be float32 or float64\. Got 'float16' instead\."):
        Task(Dense, dtype="float16")


def test_metrics_must_be_a_list_of_known_names() -> None:
    with pytest.raises(InputError, match=r'The \'metrics\' of a task must be a list, such as \["accuracy"\]\.'):
        Task(Dense, metrics="accuracy")
    with pytest.raises(InputError, match="There is no metric 'acc'"):
        Task(Dense, metrics=["acc"])
    with pytest.raises(InputError, match="There is no loss 'nll'"):
        Task(Dense, loss="nll")


def test_leaves_are_parameters_and_saved_buffers_each_once() -> None:
    task = Task(Tied)
    assert list(task.whole(task.initial())) == ["frozen", "first.weight", "saved"] == list(task.form)
    assert task.trainable == ("first.weight",)
    assert task.parameters == 9 + 2


def test_frozen_parameters_are_given_and_not_exchanged() -> None:
    task = Task(Tied)
    assert sorted(task.initial()) == ["first.weight", "saved"]
    assert task.frozen.keys() == {"frozen"}
    assert task.given.keys() == {"frozen", "passing"}
    assert torch.equal(task.whole(task.initial())["frozen"], torch.ones(2))
    assert Task(Dense).frozen == {}
    assert Task(Dense).frozen_sha256 == ""


@pytest.mark.parametrize("init", ["torch", "glorot", "file"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_frozen_parameters_come_from_where_the_others_do(init: str, dtype: str, tmp_path: Path) -> None:
    def half_frozen() -> nn.Module:
        module = Dense()
        module.hidden.requires_grad_(False)
        return module

    if init == "file":
        init = str(tmp_path / "weights.safetensors")
        save_file(Task(Dense, seed=9).initial(), init)
    task, plain = Task(half_frozen, init=init, dtype=dtype), Task(Dense, init=init, dtype=dtype).initial()
    assert sorted(task.frozen) == ["hidden.bias", "hidden.weight"]
    assert tree.sha256(task.whole(task.initial())) == tree.sha256(plain)


@pytest.mark.parametrize("last", [False, True])
def test_a_frozen_parameter_in_the_memory_of_a_trained_one_changes_with_it(last: bool) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)
            frozen, trained = (self.b, self.a) if last else (self.a, self.b)
            frozen.weight = nn.Parameter(trained.weight.data, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    task = Task(Shared)
    assert task.frozen == {}
    assert len(task.initial()) == 4
    *_, record = fit(federation((12, 9)), task, FedAvg(lr=0.1), 2)
    model = record.state["model"]
    assert torch.equal(model["a.weight"], model["b.weight"])
    assert not torch.equal(model["a.weight"], task.initial()["a.weight"])


def test_frozen_parameters_travel_with_the_task_because_building_may_draw_others() -> None:
    drawn = iter(range(100))

    def unseeded() -> nn.Module:
        module = Dense()
        module.hidden.weight = nn.Parameter(torch.full_like(module.hidden.weight, next(drawn)), requires_grad=False)
        return module

    task = Task(unseeded)
    again = cloudpickle.loads(cloudpickle.dumps(task))
    assert again.frozen_sha256 == task.frozen_sha256
    assert again.given.keys() == {"hidden.weight"}


def test_lazy_layers_above_frozen_ones_take_their_sizes_from_an_example() -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 5).requires_grad_(False), nn.LazyLinear(CLASSES))

    task = Task(lazy)
    task.see(federation((12, 9)))
    assert list(task.initial()) == ["1.weight", "1.bias"]
    assert list(cloudpickle.loads(cloudpickle.dumps(task)).frozen) == ["0.weight", "0.bias"]


def test_frozen_parameters_follow_the_task_to_another_device() -> None:
    task = Task(Tied)
    assert task.given["frozen"].device.type == "cpu"
    task.move("meta")
    assert {leaf.device.type for leaf in task.given.values()} == {"meta"}
    assert task.frozen["frozen"].device.type == "cpu"


def test_what_earlier_versions_stored_loses_its_frozen_parameters_if_they_are_the_same() -> None:
    task = Task(Tied)
    groups = {"model": task.whole(task.initial()), "control": {"first.weight": torch.zeros(3, 3)}}
    assert {group: sorted(leaves) for group, leaves in task.without_frozen(groups).items()} == {
        "model": ["first.weight", "saved"],
        "control": ["first.weight"],
    }
    groups["model"]["frozen"] = torch.zeros(2)
    with pytest.raises(InputError, match=r"stored other values of the frozen parameter 'frozen' in 'model'"):
        task.without_frozen(groups)
    assert Task(Dense).without_frozen(groups) is groups


def test_leaves_share_no_memory_with_the_module() -> None:
    module = Dense()
    leaves(module)["out.bias"].fill_(5)
    assert not (module.out.bias == 5).any()


def test_a_task_travels_without_the_module_it_has_built() -> None:
    task = Task(Dense, loss=lambda output, target: (output[:, 0] - target) ** 2, metrics=["top_2"])
    task.module.out.bias.data.fill_(float("nan"))
    assert task.trainable
    again = cloudpickle.loads(cloudpickle.dumps(task))
    assert not {"module", "trainable"} & set(vars(again))
    assert tree.sha256(again.initial()) == tree.sha256(task.initial())
    assert again.losses(torch.tensor([[3.0]]), torch.tensor([1.0])).tolist() == [4.0]
    assert again.measures[0].name == "top_2"


def test_a_loss_means_what_torch_means_by_it() -> None:
    weight = torch.tensor([1.0, 5.0])
    output, target = torch.tensor([[0.3, -0.2], [0.1, 0.4]]), torch.tensor([0, 1])
    found = Task(nn.Linear, args={"in_features": 2, "out_features": 2}, loss=nn.CrossEntropyLoss(weight=weight))
    expected = torch.nn.functional.cross_entropy(output, target, weight=weight)
    assert torch.equal(found.batch_loss(output, target), expected)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.hidden(x)).relu())


def test_lazy_layers_take_their_sizes_from_an_example_and_their_weights_from_the_seed() -> None:
    data = federation((20, 20))
    task = Task(Lazy, seed=3)
    with pytest.raises(InputError, match=r"does not know the shape of hidden\.weight, .*give the task an `example`"):
        task.initial()
    task.see(data)
    weights = task.initial()
    assert weights["hidden.weight"].shape == (5, data.x.shape[1])
    assert weights["norm.num_batches_tracked"] == 0
    again = Task(Lazy, seed=3, example=torch.ones(1, data.x.shape[1]))
    assert tree.sha256(again.initial()) == tree.sha256(weights)
    assert tree.sha256(replace(again, example=np.ones((1, data.x.shape[1]))).initial()) == tree.sha256(weights)
    assert tree.sha256(Task(Lazy, seed=4, example=data.example()).initial()) != tree.sha256(weights)
    assert task.build().training
    assert tree.sha256(pickle.loads(pickle.dumps(again)).initial()) == tree.sha256(weights)
    wide = replace(again, dtype="float64").initial()
    assert torch.equal(wide["out.weight"], weights["out.weight"].double())


def test_a_model_that_fails_on_the_first_examples_is_named_with_its_line() -> None:
    with pytest.raises(InputError, match=r"layers their sizes: .*\n.*test_task\.py, line \d+, in forward"):
        Task(Lazy, example=torch.ones(1, 2, 3, 4)).initial()


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(InputError, match="The model Flatten has no parameters, so there is nothing to learn"):
        Task(nn.Flatten).initial()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("around", [lambda part: part, lambda part: nn.Sequential(part, nn.Flatten())])
def test_a_compiled_model_is_refused(around: Callable[[nn.Module], nn.Module]) -> None:
    compiled = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))  # type: ignore[no-untyped-call]
    with pytest.raises(InputError, match=r"compiled by torch\.jit, .* Give the module itself"):
        Task(around(compiled)).build()


def test_a_function_that_returns_a_module_you_hold_leaves_it_as_it_is() -> None:
    net = nn.Linear(2, 2)
    task = Task(lambda: net, dtype="float64")
    assert task.module is not net
    assert task.build() is not task.build()
    assert net.weight.dtype == torch.float32
    assert torch.equal(task.initial()["weight"], net.weight.double())
