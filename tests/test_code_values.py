"""Values that your own code uses are part of what an experiment is."""

from __future__ import annotations

import datetime
import enum
import functools
import importlib
import importlib.util
import os
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.code_values import values_fingerprint
from fedloom.errors import InputError
from fedloom.user_code import code_fingerprint

FACTOR = 1.0


class Scaled(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.line, self.factor = nn.Linear(4, 2), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) * self.factor * FACTOR


def helper(output: torch.Tensor) -> torch.Tensor:
    return output * FACTOR


def with_helper(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(helper(output), target)


def made(factor: Any) -> Any:
    return lambda output, target: factor * nn.functional.cross_entropy(output, target)


def of_class(factor: float) -> Any:
    class Own:
        def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return factor * nn.functional.cross_entropy(output, target)

    return Own()


@pytest.mark.parametrize(
    "make",
    [
        lambda value: Scaled(value),
        lambda value: {"factor": value, "names": {"b", "a"}},
        lambda value: functools.partial(with_helper, weight=value),
        lambda value: nn.CrossEntropyLoss(label_smoothing=value),
        lambda value: nn.CrossEntropyLoss(weight=torch.tensor([1.0, value])),
        lambda value: np.array([value, 2.0]),
        lambda value: SimpleNamespace(inner=SimpleNamespace(factor=value)),
        made,
        lambda value: made([value]),
        lambda value: made(made(value)),
        of_class,
        lambda value: of_class(value).__call__,
    ],
)
def test_another_value_gives_another_fingerprint_and_the_same_value_the_same(make: Any) -> None:
    torch.manual_seed(0)
    first = values_fingerprint(make(0.25))
    assert values_fingerprint(make(0.5)) != first
    assert values_fingerprint(make(0.25)) == first


@pytest.mark.parametrize("thing", [with_helper, Scaled, Scaled(), lambda value: with_helper(value, value)])
def test_globals_count_also_those_of_what_is_called(thing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = values_fingerprint(thing)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 2.0)
    assert values_fingerprint(thing) != first


def test_your_own_modules_count_by_what_the_code_mentions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_folder").mkdir()
    (tmp_path / "own_folder" / "inner.py").write_text("K = 0.1\nOTHER = 1\ndef k(): return K\n")
    (tmp_path / "own_helper.py").write_text("import own_folder.inner\ndef loss(o, t): return o - t\n")
    helper = importlib.import_module("own_helper")
    inner = helper.own_folder.inner

    def by_global(o: Any, t: Any) -> Any:
        return own_helper.loss(o, t) * own_helper.own_folder.inner.k()  # type: ignore[name-defined]  # noqa: F821

    def by_closure(o: Any, t: Any) -> Any:
        return [helper.loss(o, t) * inner.k() for _ in range(2)]

    monkeypatch.setitem(globals(), "own_helper", helper)
    seen = [[values_fingerprint(by_global), values_fingerprint(by_closure)]]
    inner.K = 0.3
    seen.append([values_fingerprint(by_global), values_fingerprint(by_closure)])
    (tmp_path / "own_helper.py").write_text("import own_folder.inner\ndef loss(o, t): return (o - t) ** 2\n")
    importlib.reload(helper)
    seen.append([values_fingerprint(by_global), values_fingerprint(by_closure)])
    assert len({one for one, _ in seen}) == len({two for _, two in seen}) == 3
    inner.OTHER = 2
    assert [values_fingerprint(by_global), values_fingerprint(by_closure)] == seen[-1]
    del sys.modules["own_helper"], sys.modules["own_folder"], sys.modules["own_folder.inner"]


def test_two_functions_on_one_line_differ() -> None:
    pairs = [
        (lambda o, t: o - t, lambda o, t: o + t),
        (lambda o, t: o - 1, lambda o, t: o - 2),
        (lambda o, t: [o for _ in t], lambda o, t: [t for _ in t]),
        (lambda o, t: o.mean(), lambda o, t: o.sum()),
    ]
    for one, other in pairs:
        assert values_fingerprint(one) != values_fingerprint(other)
        assert code_fingerprint(one) != code_fingerprint(other)
        assert values_fingerprint(one) == values_fingerprint(one)


def test_what_a_function_imports_where_it_runs_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_parts").mkdir()
    (tmp_path / "own_parts" / "part.py").write_text("K = 1\n")
    (tmp_path / "own_parts" / "near.py").write_text("def near():\n    from .part import K\n    return K\n")
    (tmp_path / "own_scale.py").write_text("SCALE = 1\nOTHER = 1\ndef scaled(o): return o * SCALE\n")

    def by_from(o: Any) -> Any:
        from own_scale import SCALE as factor

        return o * factor

    def by_call(o: Any) -> Any:
        import own_scale

        return [own_scale.scaled(o) for _ in range(2)]

    def inside(o: Any) -> Any:
        def inner() -> Any:
            from own_scale import scaled

            return scaled(o)

        return inner()

    def of_package() -> Any:
        from own_parts import part
        from own_parts.near import near

        return part, near()

    def missing() -> Any:
        import math  # noqa: F401

        import own_nothing

        return own_nothing

    users = [by_from, by_call, inside]
    first, of_parts, nothing = [list(map(values_fingerprint, some)) for some in (users, [of_package], [missing])]
    assert nothing == [values_fingerprint(missing)]
    scale, part = sys.modules["own_scale"], sys.modules["own_parts.part"]
    scale.OTHER = 2  # type: ignore[attr-defined]
    assert list(map(values_fingerprint, users)) == first
    scale.SCALE = part.K = 2  # type: ignore[attr-defined]
    assert all(values_fingerprint(one) != before for one, before in zip(users, first, strict=True))
    near = sys.modules["own_parts.near"].near
    assert values_fingerprint(of_package) != of_parts[0]
    before = values_fingerprint(near)
    part.K = 3  # type: ignore[attr-defined]
    assert values_fingerprint(near) != before
    for name in [name for name in sys.modules if name.startswith(("own_scale", "own_parts"))]:
        del sys.modules[name]


def test_what_is_installed_is_named_but_what_you_gave_to_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    first = values_fingerprint(pytest.approx), values_fingerprint(pytest.MonkeyPatch)
    read: list[Any] = []
    monkeypatch.setattr("fedloom.code_values.code_fingerprint", lambda thing: read.append(thing) or "")
    assert (values_fingerprint(pytest.approx), values_fingerprint(pytest.MonkeyPatch)) == first
    assert not read
    decorated = torch.no_grad()(with_helper)
    before = values_fingerprint(decorated)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert values_fingerprint(decorated) != before


def test_what_training_changes_and_what_holds_itself_does_not_matter() -> None:
    model = Scaled()
    first = values_fingerprint(model)
    with torch.no_grad():
        model.line.weight.zero_()
    assert values_fingerprint(model.train()) == first == values_fingerprint(model.eval())
    ring: list[Any] = [1]
    ring.append(ring)
    assert values_fingerprint(ring) == values_fingerprint(ring)


@pytest.mark.slow
def test_another_process_finds_the_same(tmp_path: Path) -> None:
    script = (
        "from tests.test_code_values import *\n"
        "print(values_fingerprint([with_helper, Scaled(2.0), made({'b', 'a', 'c'}), of_class(0.5)]))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


@pytest.mark.slow
def test_a_run_with_another_value_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    data = fl.Federation.from_arrays(x, (x[:, 0] > 0).astype(int), clients=2)

    def loss_at(factor: float, **more: Any) -> float:
        task = fl.Task(Scaled, args={"factor": factor})
        return fl.run(data, task, fl.FedAvg(lr=0.1), rounds=1, **more).runs[0].final["test_loss"]

    assert loss_at(1.0) != loss_at(5.0)
    assert loss_at(1.0) == loss_at(1.0)
    loss_at(1.0, name="one")
    with pytest.raises(InputError, match=r"holds another experiment(.|\n)*a value in the model's args has changed"):
        loss_at(5.0, name="one")


def with_constant(strength: float, kind: str) -> fl.Algorithm:
    class Mine(fl.FedAvg):
        _private = strength if kind == "private" else 0
        _of_class: ClassVar[float] = strength if kind == "of class" else 0

    if kind == "set later":
        Mine._of_class = strength
    return Mine()


@pytest.mark.parametrize("kind", ["private", "of class", "set later"])
def test_constants_of_an_algorithm_count(kind: str) -> None:
    one, other = (values_fingerprint(with_constant(strength, kind)) for strength in (0.1, 5.0))
    assert one != other
    assert one == values_fingerprint(with_constant(0.1, kind))


def test_code_that_calls_each_other_in_many_ways_takes_no_longer_than_its_size(tmp_path: Path) -> None:
    names = [f"f{number}" for number in range(60)]
    calls = "\n".join(
        f"def {name}(x):\n    return {' + '.join(f'{other}(x)' for other in names)} + K\n" for name in names
    )
    (tmp_path / "tangled.py").write_text(f"K = 1\n{calls}")
    spec = importlib.util.spec_from_file_location("tangled", tmp_path / "tangled.py")
    assert spec is not None
    assert spec.loader is not None
    tangled = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tangled)
    first = values_fingerprint(tangled.f0)  # by every path it would not end
    tangled.K = 2  # type: ignore[attr-defined]
    assert values_fingerprint(tangled.f0) != first


@dataclass(slots=True)
class Slotted:
    scale: float


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def cached(value: float) -> Any:
    @functools.cache
    def scale() -> float:
        return value

    return scale


def with_attribute(value: float) -> Any:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target) * loss.scale  # type: ignore[attr-defined, no-any-return]

    loss.scale = value  # type: ignore[attr-defined]
    return loss


@pytest.mark.parametrize(
    "make",
    [
        Slotted,
        with_attribute,
        cached,
        lambda value: deque([value]),
        lambda value: Holder(np.array([value], object)),
        lambda value: enum.Enum("Scale", {"A": value}).A,  # type: ignore[attr-defined]
        lambda value: datetime.timedelta(value),
    ],
)
def test_values_that_are_not_in_dict_count_too(make: Any) -> None:
    assert values_fingerprint(make(1.0)) == values_fingerprint(make(1.0))
    assert values_fingerprint(make(1.0)) != values_fingerprint(make(2.0))


def test_a_function_without_a_module_has_a_fingerprint() -> None:
    names: dict[str, Any] = {}
    exec("def loss(output, target): return output", {}, names)
    assert values_fingerprint(names["loss"])


@pytest.mark.slow
def test_fingerprints_are_the_same_in_every_process() -> None:
    code = (
        "import datetime, pandas, torch\nfrom fedloom.algorithms import ALGORITHMS\n"
        "from fedloom.code_values import values_fingerprint\n"
        "things = [*(kind() for kind in ALGORITHMS.values()), ALGORITHMS['fedavg'](rule='median')]\n"
        "things += [pandas.Series([1.0, 2.0]), pandas.DataFrame({'a': ['b']}), datetime.date(2026, 1, 1), {'a', 'b'}]\n"
        "things += [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LSTM(2, 2)), torch.optim.SGD, range(3)]\n"
        "print([values_fingerprint(one) for one in things])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
