"""Models are found by name, and all of them keep the same promises."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from typer.testing import CliRunner

from fedloom import machine, models
from fedloom.cli import app
from fedloom.errors import InputError
from fedloom.models import MODELS, build, construct, describe
from fedloom.task import Task
from tests.models.helpers import parameters

ARGS: dict[str, dict[str, Any]] = {
    "mlp": {"features": 36, "hidden": [512, 128, 32], "classes": 5},
    "logistic": {"features": 20, "classes": 3},
}
SHAPES = {
    "digits_mlp": (64,),
    "eeg_cnn": (64, 256),
    "logistic": (20,),
    "mlp": (36,),
    "mnist_2nn": (28, 28),
    "mnist_cnn": (28, 28),
    "natural_images_cnn": (3, 80, 80),
    "next_word_lstm": (10,),
    "postures_mlp": (36,),
}
CLASSES = {
    "eeg_cnn": 2,
    "logistic": 3,
    "mlp": 5,
    "natural_images_cnn": 8,
    "next_word_lstm": 10_000,
    "postures_mlp": 5,
}


def examples(name: str, *shape: int) -> torch.Tensor:
    x = torch.rand(*shape, *SHAPES[name])
    return (x * 10_000).long() if name == "next_word_lstm" else x


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mnist_2nn", 199_210),
        ("mnist_cnn", 1_663_370),
        ("digits_mlp", 2_410),
        ("logistic", 63),
        ("mlp", 88_901),
        ("postures_mlp", 88_901),
        ("natural_images_cnn", 2_897_608),
        ("next_word_lstm", 830_736),
        ("eeg_cnn", 21_002),
    ],
)
def test_models_have_exactly_as_many_parameters_as_the_papers_say(name: str, expected: int) -> None:
    assert parameters(build(name, **ARGS.get(name, {}))) == expected


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_one_logit_per_class_and_a_gradient_to_every_parameter(name: str) -> None:
    model = build(name, **ARGS.get(name, {}))
    output = model(examples(name, 4))
    assert output.shape == (4, CLASSES.get(name, 10))
    output.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_models_can_be_stacked(name: str) -> None:
    pair = [build(name, **ARGS.get(name, {})) for _ in range(2)]
    x = examples(name, 2, 3)
    weights, buffers = stack_module_state(pair)
    stacked = vmap(lambda w, b, x: functional_call(pair[0], (w, b), (x,)))(weights, buffers, x)
    torch.testing.assert_close(stacked, torch.stack([model(rows) for model, rows in zip(pair, x, strict=True)]))


def test_a_dotted_path_is_imported() -> None:
    assert isinstance(build("torch.nn:Linear", in_features=2, out_features=1), nn.Linear)
    assert isinstance(build("fedloom.models.mnist_2nn:Mnist2NN"), MODELS["mnist_2nn"])


def test_a_task_finds_models_by_name() -> None:
    assert Task("mnist_2nn").parameters == 199_210
    assert list(Task("logistic", args={"features": 2}).initial()) == ["out.weight", "out.bias"]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("mnist_2n", {}, r"no model 'mnist_2n'\. Known: .*mnist_cnn.*Did you mean 'mnist_2nn'\?"),
        ("linear", {}, "'logistic' with classes = 1 and the loss 'mse' is linear regression"),
        ("mnist_2nn", {"classes": 3}, r"'mnist_2nn' cannot be built with classes: .*Its args are: none"),
        ("mlp", {"layers": 3}, r"'mlp' cannot be built with layers: .*Its args are: features: .*int"),
        ("mlp", {"features": 0}, r"'features' parameter of mlp must be a whole number from 1\. Got 0"),
        ("mlp", {"features": 2, "hidden": [3, 0.5]}, r"'hidden\[1\]' parameter of mlp .* Got 0\.5"),
        ("mlp", {"features": 2, "hidden": 100}, r"'hidden' parameter of mlp must be a list .* Got 100"),
        ("logistic", {"features": 2, "classes": True}, "'classes' parameter of logistic .* Got True"),
        ("next_word_lstm", {"units": 0}, "'units' parameter of next_word_lstm .* Got 0"),
        ("next_word_lstm", {"recurrent_dropout": 1.0}, r"'recurrent_dropout' .* below 1\. Got 1\.0"),
        ("no_such_package.net:Net", {}, "no module 'no_such_package'"),
        ("torch.nn:Liner", {}, "Did you mean 'Linear'"),
        ("math:pi", {}, "'math:pi' cannot be used here: .* a class that inherits from Module"),
        ("fedloom.models.mlp:MLP", {"feature": 3}, "'fedloom.models.mlp:MLP' cannot be built with feature: .*features"),
        (
            "torch.nn:Linear",
            {"in_features": -1, "out_features": 2},
            "'torch.nn:Linear' failed while it was built: Run",
        ),
        ("pathlib:PurePosixPath", {}, "'pathlib:PurePosixPath' cannot be used here: .* It was not called"),
    ],
)
def test_mistakes_are_explained(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(name, **args)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (3.14, r"'mine' must be a class or a function\. Got float"),
        (PurePosixPath, r"must be a torch\.nn\.Module\. Got PurePosixPath"),
    ],
)
def test_what_you_pass_must_build_a_module(model: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        construct("mine", model, {})


def test_classes_and_functions_are_held_to_the_same() -> None:
    with pytest.raises(InputError, match=r"'Linear' cannot be built with width: .*Its args are: in_features"):
        Task(nn.Linear, args={"width": 3}).build()
    with pytest.raises(InputError, match=r"'relu' cannot be built with no args: missing a required argument: 'input'"):
        Task(nn.functional.relu).build()


def test_a_module_that_cannot_be_imported_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fedloom_broken_net.py").write_text("def f(:")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="'fedloom_broken_net:Net' failed while it was imported: SyntaxError"):
        build("fedloom_broken_net:Net")


def test_the_command_lists_them() -> None:
    listed = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["models"]).stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(MODELS)
    assert "2,897,608  3 × 80 × 80" in listed[list(MODELS).index("natural_images_cnn")]
    found = json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)
    assert found[0] == {
        "name": "digits_mlp",
        "parameters": 2410,
        "buffers": 0,
        "inputs": [64],
        "summary": "Dense 64-32-10 with ReLU, for the 8 × 8 digits of scikit-learn.",
    }


def test_every_model_has_a_line_and_a_file_of_its_own() -> None:
    described = {model.name: model for model in describe()}
    assert list(described) == list(MODELS)
    assert {name: model.parameters for name, model in described.items()} == {
        "digits_mlp": 2_410,
        "eeg_cnn": 21_002,
        "logistic": None,
        "mlp": None,
        "mnist_2nn": 199_210,
        "mnist_cnn": 1_663_370,
        "natural_images_cnn": 2_897_608,
        "next_word_lstm": 830_736,
        "postures_mlp": 88_901,
    }
    assert {name: model.buffers for name, model in described.items() if model.buffers} == {"eeg_cnn": 4}
    for name, model in described.items():
        if model.inputs is not None:
            x = torch.zeros(2, *model.inputs, dtype=torch.long if name == "next_word_lstm" else torch.float32)
            assert build(name)(x).shape == (2, CLASSES.get(name, 10))
    for name, model in MODELS.items():
        assert (model.__doc__ or "").strip().count("\n") == 0
        assert model.__module__ == f"fedloom.models.{name}"
    folder = Path(str(models.__file__)).parent
    assert {path.stem for path in folder.glob("*.py")} == {"__init__", *MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_start_as_keras_would(name: str) -> None:
    weights, again, other = (Task(name, args=ARGS.get(name, {}), init="glorot", seed=s).initial() for s in (3, 3, 4))
    for leaf in weights:
        assert weights[leaf].equal(again[leaf])
        if weights[leaf].dim() >= 2:
            outs, ins = weights[leaf].shape[:2]
            field = weights[leaf][0, 0].numel()  # of a kernel
            bound = (6 / (field * (ins + outs))) ** 0.5
            assert not weights[leaf].equal(other[leaf])
            assert weights[leaf].abs().max() <= bound
            assert weights[leaf].std() == pytest.approx(bound / 3**0.5, rel=0.25)
        elif leaf.endswith("bias"):
            assert not weights[leaf].any()


def test_describing_draws_no_random_numbers() -> None:
    before = torch.random.get_rng_state()
    describe()
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_model_that_the_machine_cannot_hold_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: 2_000_000_000)
    wide = {"features": 4, "hidden": [20_000, 20_000], "classes": 2}
    # 4 × 20,000 + 20,000 × 20,000 + 20,000 × 2 weights and 40,002 biases of 4 bytes, three times: 4.8 GB
    with pytest.raises(InputError, match=r"'mlp' with features = 4, .* needs about 4\.8 GB .*, and 2\.0 GB are free"):
        build("mlp", **wide)
    before = torch.random.get_rng_state()
    assert sum(leaf.numel() for leaf in build("mlp", features=4, hidden=[3], classes=2).parameters()) == 23
    torch.manual_seed(1)
    one = build("mlp", features=4, hidden=[3], classes=2)
    torch.manual_seed(1)
    two = MODELS["mlp"](features=4, hidden=[3], classes=2)
    assert all(a.equal(b) for a, b in zip(one.parameters(), two.parameters(), strict=True)), "it draws for itself"
    torch.random.set_rng_state(before)
