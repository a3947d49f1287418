"""What is found out about a model before the first round."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.data.federation import Federation
from fedloom.data.preprocessing import Preprocessing
from fedloom.errors import InputError
from fedloom.metrics import Metric
from fedloom.task import Task
from fedloom.training.probe import probe
from tests.conftest import (
    FEATURES,
    Cumulative,
    Dense,
    Noisy,
    Normed,
    Pictures,
    Recurrent,
    federation,
    numbers_federation,
)


class Flexible(nn.Module):
    """Gives outputs of any shape."""

    def __init__(self, shape: tuple[int, ...], lose: int = 0) -> None:
        super().__init__()
        self.shape, self.lose = shape, lose
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones(len(x) - self.lose, *self.shape) * self.w


class Pair(Dense):
    """Gives two tensors."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def linear(outputs: int) -> nn.Module:
    return nn.Linear(FEATURES, outputs)


@pytest.mark.parametrize(
    ("model", "masked", "normalises_features", "draws_globally", "groups"),
    [
        (Dense, False, False, False, True),
        (Normed, True, True, False, True),
        (Pictures, True, False, False, True),
        (Cumulative, True, True, False, False),
        (Recurrent, False, False, False, False),  # torch would loop over the lanes, and complain about it in every step
        (Noisy, False, False, True, False),
        (lambda: Recurrent(layers=2, dropout=0.5), False, False, True, False),
    ],
    ids=["dense", "normed", "pictures", "cumulative", "lstm", "rand_like", "lstm dropout"],
)
def test_what_a_model_needs_is_found_by_trying_it(
    model: Any, masked: bool, normalises_features: bool, draws_globally: bool, groups: bool
) -> None:
    found = probe(federation((20,)), Task(model))
    assert (found.layers.masked, found.layers.normalises_features, found.draws_globally) == (
        masked,
        normalises_features,
        draws_globally,
    )
    assert (found.cannot_group == "") == groups
    setup = found.setup(group=4, micro_batch=7)
    assert setup.group == (4 if groups else 1)
    assert (setup.masked, setup.micro_batch) == (masked, 7)


@pytest.mark.parametrize("model", [Dense, Normed, Noisy, Cumulative])
def test_probing_leaves_the_global_generator_alone(model: type[nn.Module]) -> None:
    before = torch.random.get_rng_state()
    assert probe(federation((20,)), Task(model)).setup(group=2).group in (1, 2)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_one_example_is_enough_to_probe() -> None:
    assert probe(federation((1,)), Task(Normed)).layers.normalises_features


def test_a_model_for_other_data_is_refused_with_the_shape_of_an_example() -> None:
    with pytest.raises(
        InputError,
        match=r"The model does not take the data: an example has the shape \(16,\) and is of torch.*RuntimeError",
    ):
        probe(federation((20,)), Task(lambda: nn.Linear(5, 3)))


def test_a_shipped_model_for_other_data_is_named_with_one_that_takes_it() -> None:
    two_classes = replace(federation((20,)), classes=("a", "b"))
    with pytest.raises(InputError, match=r'model digits_mlp does not take the data.* Set model = "mlp" in \[task\]'):
        probe(two_classes, Task("digits_mlp"))


def test_a_shipped_model_for_other_data_is_named_with_its_number_of_classes() -> None:
    lines = r'outputs: set in \[task\]\n  model = "mlp"\n  args = \{ classes = 3 \}$'
    with pytest.raises(InputError, match=f"mlp takes any number of features. The classes are a, b, c. .*{lines}"):
        probe(federation((20,)), Task("digits_mlp"))
    misspelt = replace(federation((20,)), classes=("Benign", "benign", "malignant"))
    with pytest.raises(InputError, match=f"are they spelt differently at some clients. If they really .*{lines}"):
        probe(misspelt, Task("digits_mlp"))


@pytest.mark.parametrize("outputs", [1, 2])
def test_too_few_outputs_for_the_classes_are_refused(outputs: int) -> None:
    message = (
        f"The model gives {outputs} outputs per example, but the labels have 3 classes. The classes are a, b, c. "
        "The model's last layer needs 3 outputs.$"
    )
    with pytest.raises(InputError, match=message):
        probe(federation((20,)), Task(lambda: linear(outputs)))


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        (("alive", "dead", "gone"), r"are alive, dead, gone\. .*: set args = \{ classes = 3 \} in \[task\]\.$"),
        (
            ("2020-01-01", "2020-01-02", "2020-01-03"),
            "The classes look like dates, such as 2020-01-01, .*choose another label",
        ),
        (("1", "2", "3"), 'If they are numbers to predict, set task = "regression"'),
        (
            ("DEAD", "alive", "dead"),
            r"Some may mean the same \(DEAD, dead\): are they spelt differently at some clients\? "
            r"If they really are 3 classes, .*: set args = \{ classes = 3 \} in \[task\]\.$",
        ),
    ],
)
def test_classes_are_named_where_a_shipped_model_has_too_few(classes: tuple[str, ...], said: str) -> None:
    data = replace(federation((20,)), classes=classes)
    with pytest.raises(InputError, match=said):
        probe(data, Task("logistic", args={"features": 16}))


def test_a_shipped_model_for_numbers_says_how_to_give_it_one_output() -> None:
    data = numbers_federation([[1.0, 2.0]] * 4, [1.0, 2.0, 3.0, 4.0], [4])
    with pytest.raises(InputError, match=r"it gave \(2, 2\)\. Set args = \{ classes = 1 \} in \[task\]\.$"):
        probe(data, Task("logistic", loss="mse", args={"features": 2}))


def test_a_wrong_number_of_features_is_named() -> None:
    with pytest.raises(
        InputError, match=r"The data has 16 features, and \[task\] args has features = 12: leave it out"
    ):
        probe(federation((20,)), Task("logistic", args={"features": 12}))


@pytest.mark.parametrize("name", ["auroc_of_3", "recall_of_7"])
def test_a_metric_of_a_class_that_does_not_exist_is_refused(name: str) -> None:
    data = federation((20,))
    with pytest.raises(InputError, match=rf"The metric {name} is about class .*, and there are classes 0 to 2"):
        probe(data, Task("logistic", args={"features": 16, "classes": 3}, metrics=[name]))


def test_more_outputs_than_named_classes_of_a_table_are_refused() -> None:
    too_many = "The model gives 5 outputs per example, but the labels have 3 classes: .* last layer needs 3 outputs"
    with pytest.raises(InputError, match=rf"{too_many}: set args = \{{ classes = 3 \}} in \[task\]\.$"):
        probe(federation((20,)), Task("logistic", args={"classes": 5}))
    of_numbers = replace(federation((20,)), classes=("0", "1", "2"))
    table = replace(of_numbers, preprocessing=Preprocessing(label=("outcome",)))
    with pytest.raises(InputError, match=too_many):
        probe(table, Task(lambda: linear(5)))


@pytest.mark.parametrize(
    "changes",
    [
        {"classes": ("0", "1", "2")},  # arrays, whose last classes may be missing here
        {"x": torch.zeros(20, 1, 4, 4)},  # pictures
    ],
)
def test_more_outputs_than_classes_that_may_be_missing_get_a_caution(changes: dict[str, Any]) -> None:
    data = replace(federation((20,)), **changes)
    wide = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 5))
    found = probe(data, Task(wide))
    assert found.cannot_group == ""
    assert found.caution.startswith("The model gives 5 outputs per example, but the labels have 3 classes.")
    assert probe(data, Task(nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 3)))).caution == ""


def test_a_table_with_one_class_and_a_language_model_with_spare_words_are_no_error() -> None:
    alike = replace(federation((20,)), classes=("alive",), y=torch.zeros(20, dtype=torch.int64))
    assert probe(alike, Task("logistic")).caution == ""
    words = replace(federation((20,)), x=torch.ones(20, 3, dtype=torch.int64))
    assert probe(words, Task("next_word_lstm", args={"vocabulary": 9})).caution == ""


def test_what_is_not_one_output_per_example_is_refused() -> None:
    with pytest.raises(InputError, match=r"must give one output per example\. For 2 examples it gave \(1, 3\)\."):
        probe(federation((20,)), Task(lambda: Flexible((3,), lose=1)))
    with pytest.raises(InputError, match=r'The model returns a tuple, but loss = "cross_entropy" takes a tensor'):
        probe(federation((20,)), Task(Pair))


def numbers() -> Federation:
    data = federation((20,))
    return replace(data, y=data.y.float(), classes=())


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (np.arange(20) % 3 + 0.0, r"convert them with labels\.astype\(int\)"),
        (np.arange(20) % 3 + 0.5, 'The labels are numbers, not classes: use loss = "mse"'),
        (np.eye(3)[np.arange(20) % 3], r"one-hot rows: use labels\.argmax\(1\)"),
        (np.eye(3, dtype=int)[np.arange(20) % 3], r"one-hot rows: use labels\.argmax\(1\)"),
        ((np.arange(20) % 3)[:, None], r"The labels are a column: use labels\[:, 0\]\."),
        (np.arange(20) % 3 + 1, r"are 1 to 3\. .* subtract 1 from the labels\. Then the last layer needs 3 outputs\.$"),
    ],
)
def test_labels_that_are_no_class_numbers_are_answered_with_how_to_make_them(labels: Any, said: str) -> None:
    data = Federation.from_arrays(np.ones((20, 16)), labels, client=["a"] * 20)
    with pytest.raises(InputError, match=said):
        probe(data, Task(lambda: linear(3)))


def test_classes_and_numbers_need_losses_of_their_kind() -> None:
    with pytest.raises(
        InputError, match=r'loss = "bce" is for two classes, but the labels have 3\. Use "cross_entropy"\.'
    ):
        probe(federation((20,)), Task(lambda: linear(1), loss="bce"))
    with pytest.raises(
        InputError, match=r'With loss = "mse" the model must give one number per label.*gave \(2, 3\)\.'
    ):
        probe(numbers(), Task(Dense, loss="mse", metrics=[]))


@pytest.mark.parametrize("metric", ["auroc", "f1_macro", "calibration_error"])
def test_metrics_of_classes_need_classes(metric: str) -> None:
    probe(federation((20,)), Task(Dense, metrics=[metric]))
    numbers = replace(federation((20,)), y=torch.zeros(20), classes=())
    with pytest.raises(InputError, match=rf"The metric {metric} is for classes, but the labels are numbers\."):
        probe(numbers, Task(lambda: linear(1), loss="mse", metrics=[metric]))


def test_accuracy_is_for_classes_and_numbers_have_another_default() -> None:
    with pytest.raises(InputError, match="The metric accuracy is for classes, but the labels are numbers"):
        probe(numbers(), Task(lambda: linear(1), loss="mse", metrics=["accuracy"]))
    probe(numbers(), Task(lambda: linear(1), loss="mse"))
    defaults = {loss: [one.name for one in Task(Dense, loss).measures] for loss in ("cross_entropy", "mse", "mae")}
    assert defaults == {"cross_entropy": ["accuracy"], "mse": ["mae"], "mae": ["mae"]}
    assert Task(Dense, "mse", ()).measures == ()


@pytest.mark.parametrize("metric", ["r2", "c_index", "mse", "mae", "rmse"])
def test_metrics_of_numbers_need_numbers(metric: str) -> None:
    probe(numbers(), Task(lambda: linear(1), loss="mse", metrics=[metric]))
    with pytest.raises(
        InputError, match=rf"The metric {metric} is for numbers, but the labels are 3 classes\. .*task = \"reg"
    ):
        probe(federation((20,)), Task(Dense, metrics=[metric]))


def test_a_loss_that_does_not_fit_is_refused() -> None:
    def wrong_shape(output: Tensor, target: Tensor) -> Tensor:
        return torch.ones(7)

    def broken(output: Tensor, target: Tensor) -> Tensor:
        raise RuntimeError("no such thing")

    with pytest.raises(InputError, match="The loss does not depend on what the model gives"):
        probe(federation((20,)), Task(Dense, loss=wrong_shape))
    with pytest.raises(InputError, match=r"The loss does not take the model's output of shape \(2, 3\).*no such thing"):
        probe(federation((20,)), Task(Dense, loss=broken))


def test_losses_of_torch_and_of_ones_own_are_welcome() -> None:
    for loss in (nn.CrossEntropyLoss(), lambda output, target: output.square().sum(1)):
        assert probe(federation((20,)), Task(Dense, loss=loss)).cannot_group == ""


def test_a_metric_that_does_not_fit_the_output_is_named() -> None:
    with pytest.raises(InputError, match="The metric perplexity does not fit the model's output"):
        probe(numbers(), Task(lambda: linear(1), loss="mse", metrics=["perplexity"]))


def test_a_function_as_a_metric_of_a_model_with_several_outputs_is_refused_with_what_to_write(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(FEATURES, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.out(x), x

    def loss(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs[0], labels)

    def right(outputs: np.ndarray, labels: np.ndarray) -> float:
        return float((outputs.argmax(1) == labels).mean())

    said = r"The metric right .* returns a tuple\. .*scores=lambda output, labels: output\[0\], summary=right\)"
    with pytest.raises(InputError, match=said):
        probe(federation((20,)), Task(Both, loss=loss, metrics=[right]))
    first = Metric("first", scores=lambda output, labels: output[0], summary=right)
    result = fl.run(federation((20, 20)), Task(Both, loss=loss, metrics=[first]), fl.FedAvg(), rounds=1, out=tmp_path)
    assert 0 <= result.runs[0].final["test_first"] <= 1


def test_a_metric_that_is_always_right_is_refused() -> None:
    probe(federation((20,)), Task(Dense, metrics=["top_2"]))
    with pytest.raises(InputError, match="The metric top_3 is always 100 % for a model with 3 outputs"):
        probe(federation((20,)), Task(Dense, metrics=["top_3"]))


@pytest.mark.parametrize("metric", ["top_2", "perplexity", "mse", "mae", "rmse", "r2", "c_index"])
def test_metrics_that_mean_nothing_for_several_labels_are_refused(metric: str) -> None:
    data = federation((20,))
    labels = replace(data, y=torch.nn.functional.one_hot(data.y, 3).float(), classes=())
    with pytest.raises(InputError, match=rf"The metric {metric} is for .*(every example has 3 labels|are 0 or 1).* f1"):
        probe(labels, Task(Dense, loss="bce", metrics=[metric]))
    probe(labels, Task(Dense, loss="bce", metrics=["accuracy", "f1", "balanced_accuracy", "calibration_error"]))


@pytest.mark.parametrize("loss", ["mse", "mae"])
def test_class_numbers_are_never_taken_for_quantities(loss: str) -> None:
    with pytest.raises(InputError, match=f'^loss = "{loss}" is for numbers, but the labels are 3 classes'):
        probe(federation([4, 4]), Task(lambda: linear(1), loss=loss, metrics=()))


def huber(output: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.huber_loss(output.reshape(target.shape), target.float())


@pytest.mark.parametrize("shape", [(), (1,)])
def test_class_numbers_are_never_quantities_for_a_loss_of_your_own(shape: tuple[int, ...]) -> None:
    one_number = Task(Flexible, args={"shape": shape}, loss=huber, metrics=[])
    with pytest.raises(InputError, match=r"one number per example, but the labels are 3 classes") as caught:
        probe(federation((20,)), one_number)
    assert 'set task = "regression" in [data], or in Python give floating-point labels' in str(caught.value)
    assert "the last layer needs 3 outputs" in str(caught.value)
    probe(numbers(), replace(one_number, metrics=["mae"]))
    two = federation((20,))
    two = replace(two, y=two.y % 2, classes=("no", "yes"))
    probe(two, replace(one_number, loss=one_logit))


def one_logit(output: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(output.reshape(target.shape), target.float())


def test_a_loss_for_labels_of_0_and_1_takes_no_other_numbers() -> None:
    numbers = replace(federation((20,)), y=torch.linspace(0, 1, 20), classes=())
    probe(numbers, Task(lambda: linear(1), loss="bce", metrics=()))
    with pytest.raises(InputError, match='loss = "bce" is for labels of 0 and 1, and some labels are other numbers'):
        probe(replace(numbers, y=numbers.y + 1), Task(lambda: linear(1), loss="bce", metrics=()))


@pytest.mark.parametrize("data", [False, True])
def test_a_model_that_changes_its_frozen_parameters_is_refused(data: bool) -> None:
    class Teacher(nn.Module):
        """A second model follows the first one, as in self-distillation."""

        def __init__(self) -> None:
            super().__init__()
            self.student = linear(3)
            self.teacher = linear(3).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                teacher = self.teacher.weight.data if data else self.teacher.weight
                teacher.lerp_(self.student.weight, 0.01)
            return self.student(x) + self.teacher(x)

    with pytest.raises(InputError, match=r"The model changes 'teacher\.weight' while it is used, .* as a buffer"):
        probe(federation((12, 9)), Task(Teacher))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_frozen_parameters_may_have_any_dtype_and_value(kind: torch.dtype) -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Parameter(torch.eye(FEATURES).to(kind), requires_grad=False)
            self.unused = nn.Parameter(torch.tensor(torch.nan), requires_grad=False)
            self.head = linear(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x @ self.features.float())

    task = Task(Quantised)
    probe(federation((12, 9)), task)
    assert not task.without_frozen({"model": dict(task.frozen)})["model"]


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.huber_loss(output.reshape(target.shape), target.to(output.dtype), reduction="none")


def test_with_a_loss_of_your_own_the_default_metric_follows_the_labels() -> None:
    some = replace(federation((20,)), y=torch.linspace(0, 3, 20), classes=())
    task = Task(nn.LazyLinear, args={"out_features": 1}, loss=own_loss)
    probe(some, task)
    assert [metric.name for metric in replace(task).measures] == ["mae"]
    task = Task(Dense, loss=nn.CrossEntropyLoss())
    probe(federation((20,)), task)
    assert [metric.name for metric in task.measures] == ["accuracy"]
    for wrong in ("accuracy", "top_1"):
        task = Task(nn.LazyLinear, args={"out_features": 1}, loss=own_loss, metrics=[wrong])
        with pytest.raises(InputError, match=f"The metric {wrong} is (for classes|always 100 %)"):
            probe(some, task)


def test_a_default_metric_that_does_not_fit_says_what_to_do() -> None:
    task = Task(nn.LazyLinear, args={"out_features": 2}, loss=lambda output, target: output.square().sum(-1))
    with pytest.raises(InputError, match=r"metric mae does not fit .*; the task may have other metrics, or \[\]"):
        probe(replace(federation((20,)), y=torch.linspace(0, 3, 20), classes=()), task)


def mean_of_all(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


ALL_PAIRS = [
    mean_of_all,
    lambda output, target: (output - target).abs(),
    lambda output, target: (output - target).square().sum(1).mean(),
    lambda output, target: (output - target).square().mean().sqrt(),
    lambda output, target: torch.nn.functional.huber_loss(output, target, reduction="sum"),
    lambda output, target: -(target * output.sigmoid().log() + (1 - target) * (1 - output.sigmoid()).log()).mean(),
    lambda output, target: (output.exp() - target * output).mean(),
]
PAIRS = [
    lambda output, target: mean_of_all(output.squeeze(1), target),
    lambda output, target: mean_of_all(output.squeeze(), target),
    lambda output, target: mean_of_all(output[:, 0], target),
    lambda output, target: mean_of_all(output, target[:, None]),
    lambda output, target: mean_of_all(output, target.view_as(output)).sqrt(),
    lambda output, target: output.square().mean(),  # needs no labels
    lambda output, target: (output.mean() - target.mean()).square(),
    lambda output, target: torch.relu(1 - (output - output.T) * (target[:, None] - target).sign()).mean(),
]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("offset", [0.0, 2000.0])
def test_a_loss_that_takes_every_output_with_every_label_is_refused(offset: float) -> None:
    some = replace(federation((20,)), y=torch.linspace(0, 1, 20) + offset, classes=())
    for loss in ALL_PAIRS if not offset else ALL_PAIRS[:5]:
        with pytest.raises(InputError, match=r"loss takes every output with every label: .* \(2, 1\) .* \(2,\)"):
            probe(some, Task(linear, args={"outputs": 1}, loss=loss))
    for loss in PAIRS:
        probe(some, Task(linear, args={"outputs": 1}, loss=loss))


def test_shapes_that_differ_are_right_where_the_loss_pairs_them() -> None:
    probe(federation((20,)), Task(Dense, loss=nn.CrossEntropyLoss()))
    column = replace(federation((20,)), y=torch.linspace(0, 1, 20)[:, None], classes=())
    probe(column, Task(linear, args={"outputs": 1}, loss=mean_of_all))
    flat = Task(lambda: nn.Sequential(linear(1), nn.Flatten(0)), loss=mean_of_all, metrics=[])
    with pytest.raises(InputError, match=r"\(2,\) and the labels \(2, 1\)"):
        probe(column, flat)
    equal = replace(column, y=torch.ones(20))  # nothing to see, and nothing to learn
    probe(equal, Task(linear, args={"outputs": 1}, loss=mean_of_all))


def test_a_metric_that_takes_every_output_with_every_label_is_refused() -> None:
    some = replace(federation((20,)), y=torch.linspace(0, 1, 20), classes=())

    def error(outputs: np.ndarray, labels: np.ndarray) -> float:
        return float(np.abs(outputs - labels).mean())

    per_example = Metric("off", values=lambda output, target: (output - target).abs())
    for metric in (error, per_example):
        with pytest.raises(InputError, match=r"The metric (error|off) takes every output with every label"):
            probe(some, Task(linear, args={"outputs": 1}, loss="mse", metrics=[metric]))
    right = Metric("off", values=lambda output, target: (output[:, 0] - target).abs())
    probe(some, Task(linear, args={"outputs": 1}, loss="mse", metrics=["mae", "r2", "rmse", right]))


def test_a_loss_of_your_own_that_lacks_outputs_says_how_many_there_must_be() -> None:
    def focal(output: Tensor, target: Tensor) -> Tensor:
        chosen = torch.log_softmax(output, -1)[torch.arange(len(target)), target]
        return -((1 - chosen.exp()) ** 2) * chosen

    labels = np.array([2] * 10 + [0, 1])
    data = Federation.from_arrays(np.ones((12, FEATURES), np.float32), labels, clients=2)
    task = Task("mlp", args={"features": FEATURES, "classes": 2}, loss=focal)
    said = r"The model gives 2 outputs per example, but the labels have 3 classes\..*set args = \{ classes = 3 \}"
    with pytest.raises(InputError, match=f"(?s)The loss does not take.*{said}"):
        probe(data, task)


class Mistaken(nn.Module):
    """A first own model, with one of the usual mistakes."""

    def __init__(self, mistake: str) -> None:
        if mistake != "no super":
            super().__init__()
        self.mistake = mistake
        if mistake == "list":
            self.layers = [nn.Linear(FEATURES, 3)]
        elif mistake != "no super":
            self.last = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor | None:
        output: Tensor = self.layers[0](x) if self.mistake == "list" else self.last(x)
        if self.mistake == "no return":
            return None
        return output.argmax(-1) if self.mistake == "argmax" else output


class NoSuper(nn.Module):
    def __init__(self) -> None:
        self.last = nn.Linear(FEATURES, 3)


def of_scores(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, labels)


@pytest.mark.parametrize("loss", ["cross_entropy", of_scores])
@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("list", r"nothing to learn\. Mistaken\.layers holds layers in a list, .*Use nn\.ModuleList\."),
        ("no return", "The model's forward returns nothing: end it with `return`"),
        (
            "argmax",
            r"returns whole numbers \(torch\.int64\), such as the classes that argmax picks\. The loss needs scores",
        ),
        ("no super", r"object has no attribute '_parameters'\. Does its __init__ begin with super\(\)\.__init__\(\)\?"),
    ],
)
def test_the_usual_mistakes_of_a_first_model_are_named(mistake: str, words: str, loss: Any) -> None:
    with pytest.raises(InputError, match=words):
        probe(federation((8, 8)), Task(Mistaken, loss, args={"mistake": mistake}))


def test_a_model_without_super_that_torch_names_is_said_in_words() -> None:
    with pytest.raises(InputError, match=r"call\. Does its __init__ begin with super\(\)\.__init__\(\)\?"):
        probe(federation((8, 8)), Task(NoSuper))
