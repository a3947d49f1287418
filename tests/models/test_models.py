from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from typer.testing import CliRunner

from fedloom import keys, models
from fedloom.cli import app
from fedloom.errors import InputError
from fedloom.models import MODELS, build, describe
from fedloom.task import Task
from fedloom.training.masking import Masked

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


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


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


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"layer_norm": True}, 830_736 + 2 * (256 + 256 + 64)),
        ({"recurrent_dropout": 0.5}, 830_736),
        ({"units": 128}, 10_000 * 16 + 4 * 128 * (16 + 128 + 1) + 10_000 * 129),
        ({"embedding": 6}, 10_000 * 6 + 4 * 64 * (6 + 64 + 1) + 10_000 * 65),
    ],
)
def test_variants_of_the_next_word_model_have_the_parameters_of_their_layers(
    args: dict[str, Any], expected: int
) -> None:
    assert parameters(build("next_word_lstm", **args)) == expected


def test_the_next_word_model_starts_as_in_keras() -> None:
    model = build("next_word_lstm", vocabulary=500, embedding=6, units=8)
    assert model.embedding.weight.abs().max() <= 0.05
    assert model.out.weight.abs().max() <= (6 / 508) ** 0.5
    torch.testing.assert_close(model.recurrent.weight.T @ model.recurrent.weight, torch.eye(8))
    assert model.input.bias.tolist() == [0.0] * 8 + [1.0] * 8 + [0.0] * 16  # the second quarter lets it remember
    assert not model.out.bias.any()


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


@pytest.mark.parametrize("name", ["mnist_2nn", "mnist_cnn"])
@pytest.mark.parametrize("shape", [(28, 28), (1, 28, 28), (784,)])
def test_images_may_come_in_any_shape(name: str, shape: tuple[int, ...]) -> None:
    model, x = build(name), torch.rand(2, 784)
    assert torch.equal(model(x.reshape(2, *shape)), model(x))


def test_the_next_word_model_is_torchs_lstm_with_one_bias() -> None:
    model = build("next_word_lstm", vocabulary=11, embedding=3, units=4)
    lstm, order = nn.LSTM(3, 4, batch_first=True), [0, 1, 3, 2]  # torch has the candidate third, the model last
    with torch.no_grad():
        for ours, theirs in ((model.input.weight, lstm.weight_ih_l0), (model.recurrent.weight, lstm.weight_hh_l0)):
            theirs.copy_(torch.cat([ours.chunk(4)[gate] for gate in order]))
        lstm.bias_ih_l0.copy_(torch.cat([model.input.bias.chunk(4)[gate] for gate in order]))
        lstm.bias_hh_l0.zero_()
    tokens = torch.randint(0, 11, (5, 7))
    expected = model.out(lstm(model.embedding(tokens))[0][:, -1])
    torch.testing.assert_close(model(tokens), expected)


def test_a_normalised_cell_follows_its_definition() -> None:
    model = build("next_word_lstm", vocabulary=11, embedding=3, units=4, layer_norm=True).double()
    tokens = torch.randint(0, 11, (5, 7))
    hidden = memory = torch.zeros(5, 4, dtype=torch.float64)
    with torch.no_grad():
        model.norms["state"].weight.mul_(1.5)

    def normal(name: str, values: torch.Tensor) -> torch.Tensor:
        centred = values - values.mean(1, keepdim=True)
        scaled = centred / (centred.square().mean(1, keepdim=True) + 1e-3).sqrt()
        return scaled * model.norms[name].weight + model.norms[name].bias

    for step in range(7):
        entering = normal("input", model.embedding(tokens[:, step]) @ model.input.weight.T)
        gates = entering + normal("recurrent", hidden @ model.recurrent.weight.T) + model.input.bias
        enter, forget, leave, candidate = gates.chunk(4, 1)
        memory = normal("state", forget.sigmoid() * memory + enter.sigmoid() * candidate.tanh())
        hidden = leave.sigmoid() * memory.tanh()
    torch.testing.assert_close(model(tokens), model.out(hidden))


def test_recurrent_dropout_is_for_training_only() -> None:
    model = build("next_word_lstm", vocabulary=11, embedding=3, units=4, recurrent_dropout=0.5)
    tokens = torch.randint(0, 11, (5, 7))
    assert torch.equal(model.eval()(tokens), model(tokens))
    assert not torch.equal(model.train()(tokens), model(tokens))


def test_recurrent_dropout_drops_candidates_and_never_what_is_remembered() -> None:
    model = build("next_word_lstm", vocabulary=11, embedding=3, units=4, recurrent_dropout=0.5).double()
    tokens, key = torch.randint(0, 11, (5, 7)), torch.tensor([3, 4])
    hidden = memory = torch.zeros(5, 4, dtype=torch.float64)
    for step in range(7):
        gates = model.input(model.embedding(tokens[:, step])) + model.recurrent(hidden)
        enter, forget, leave, candidate = gates.chunk(4, 1)
        kept = (keys.uniform(key, 20, step) >= 0.5).reshape(5, 4)  # the draw of this client, in this step
        memory = forget.sigmoid() * memory + enter.sigmoid() * candidate.tanh() * kept * 2
        hidden = leave.sigmoid() * memory.tanh()
    with Masked(key):
        torch.testing.assert_close(model(tokens), model.out(hidden))


def test_an_mlp_computes_what_its_layers_say() -> None:
    model = build("mlp", features=2, hidden=[2], classes=1)
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), ([[1, -1], [2, 0]], [0, 1], [[1, 10]], [5]), strict=True):
            parameter.copy_(torch.tensor(values))
    assert model(torch.tensor([[1.0, 3.0]])).tolist() == [[35.0]]  # relu(-2) + 10 · relu(2 + 1) + 5


def test_an_mlp_without_hidden_layers_is_linear() -> None:
    assert parameters(build("mlp", features=4, hidden=[], classes=3)) == parameters(
        build("logistic", features=4, classes=3)
    )


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
        ("mnist_2nn", {"classes": 3}, r"'mnist_2nn' cannot be built with classes: .*Its args are: none"),
        ("mlp", {}, r"'mlp' cannot be built with no args: .*features.*Its args are: features: .*int"),
        ("mlp", {"features": 0}, r"'features' parameter of mlp must be a whole number from 1\. Got 0"),
        ("mlp", {"features": 2, "hidden": [3, 0.5]}, r"'hidden\[1\]' parameter of mlp .* Got 0\.5"),
        ("mlp", {"features": 2, "hidden": 100}, r"'hidden' parameter of mlp must be a list .* Got 100"),
        ("logistic", {"features": 2, "classes": True}, "'classes' parameter of logistic .* Got True"),
        ("next_word_lstm", {"units": 0}, "'units' parameter of next_word_lstm .* Got 0"),
        ("next_word_lstm", {"recurrent_dropout": 1.0}, r"'recurrent_dropout' .* below 1\. Got 1\.0"),
        ("no_such_package.net:Net", {}, "no module 'no_such_package'"),
        ("torch.nn:Liner", {}, "Did you mean 'Linear'"),
        ("math:pi", {}, r"'math:pi' must be a class or a function\. Got float"),
        ("fedloom.models.mlp:MLP", {"feature": 3}, "'fedloom.models.mlp:MLP' cannot be built with feature: .*features"),
        (
            "torch.nn:Linear",
            {"in_features": -1, "out_features": 2},
            "'torch.nn:Linear' failed while it was built: Run",
        ),
        ("pathlib:PurePosixPath", {}, r"must be a torch\.nn\.Module\. Got PurePosixPath"),
    ],
)
def test_mistakes_are_explained(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(name, **args)


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
    listed = CliRunner().invoke(app, ["models"]).stdout.splitlines()
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


def test_the_net_for_pictures_has_the_published_layers() -> None:
    counts = {name: parameters(part) for name, part in build("natural_images_cnn").named_children()}
    assert list(counts.values()) == [896, 18_496, 73_856, 147_584, 295_168, 2_359_552, 2_056]


# The EEG net


def test_the_eeg_net_has_the_published_layers_and_four_numbers_that_are_not_trained() -> None:
    model = build("eeg_cnn")
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    assert counts == {"time": 780, "space": 19_210, "power": 162, "norm": 4, "out": 846}
    buffers = {name: leaf for name, leaf in model.named_buffers() if leaf.is_floating_point()}
    assert parameters(model) + sum(leaf.numel() for leaf in buffers.values()) == 21_006


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_composing_its_first_convolutions_changes_neither_answers_nor_gradients(mode: str) -> None:
    composed, plain = (build("eeg_cnn", composed=composed).double() for composed in (True, False))
    plain.load_state_dict(composed.state_dict())
    x = torch.randn(5, 64, 256, generator=torch.Generator().manual_seed(0)).double() * 10
    answers = []
    for model in (composed, plain):
        answer = getattr(model, mode)()(x)
        answer.square().sum().backward()
        answers.append(answer.detach())
    torch.testing.assert_close(*answers, rtol=1e-10, atol=1e-12)
    for (name, one), other in zip(composed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-7, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_its_logarithms_make_the_cross_entropy_of_keras() -> None:
    chances, logs = build("eeg_cnn").eval(), build("eeg_cnn", output="log_sigmoid").eval()
    logs.load_state_dict(chances.state_dict())
    x, y = torch.randn(6, 1, 64, 256), torch.tensor([0, 1, 1, 0, 1, 0])
    p = chances(x)
    expected = -(p[torch.arange(6), y] / p.sum(1)).log()  # Keras scales outputs to a sum of one
    torch.testing.assert_close(torch.nn.functional.cross_entropy(logs(x), y, reduction="none"), expected)
    with pytest.raises(InputError, match="'output' of eeg_cnn must be"):
        build("eeg_cnn", output="softmax")
