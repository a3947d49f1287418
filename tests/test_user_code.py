"""Code that an experiment file names is found, or the message says what to write."""

import importlib
import py_compile
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from fedloom import errors, user_code
from fedloom.algorithm import Algorithm, Groups, Step, Task, Tree, add
from fedloom.algorithms import ALGORITHMS, CLASSES, FedAvg
from fedloom.data.federation import Dataset
from fedloom.errors import InputError
from fedloom.experiment import experiment_file
from fedloom.models import build

NET = "class Net:\n    depth = 3\n\ndef build():\n    return Net()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def test_a_name_with_a_colon_is_your_own_code() -> None:
    assert user_code.is_code("net.py:Net")
    assert user_code.is_code("package.module:Net")
    assert not user_code.is_code("mnist_cnn")


def test_a_file_is_relative_to_the_experiment_and_a_module_has_no_file(folder: Path) -> None:
    assert user_code.code_file("net.py:Net", folder) == (folder / "net.py").resolve()
    assert user_code.code_file("package.module:Net", folder) is None


def test_an_object_is_loaded_from_a_file_or_a_module(folder: Path) -> None:
    assert user_code.code("net.py:Net", folder).depth == 3
    assert user_code.code("torch.nn:Linear", folder, nn.Module) is nn.Linear


def test_two_folders_may_have_files_of_the_same_name(folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    (other / "net.py").write_text(NET.replace("3", "5"))
    assert user_code.code("net.py:Net", folder).depth == 3
    assert user_code.code("net.py:Net", other).depth == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("net.py:", "'net.py:' names no code: write file.py:Name or package.module:Name."),
        (":Net", "':Net' names no code"),
        ("net.py:Nett", "'net.py:Nett': net.py has no 'Nett'. It defines Net, build. Did you mean 'Net'?"),
        ("none.py:Net", "There is no file"),
        ("no_such_module:Net", "'no_such_module:Net': there is no module 'no_such_module'. Write file.py:Name"),
        ("broken.py:Net", "broken.py failed while it was loaded: ZeroDivisionError: division by zero"),
    ],
)
def test_a_mistake_is_explained(folder: Path, name: str, message: str) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    with pytest.raises(InputError, match=re.escape(message)):
        user_code.code(name, folder)


def test_what_a_file_imports_is_not_suggested(folder: Path) -> None:
    (folder / "imports.py").write_text("import torch\n")
    with pytest.raises(InputError, match=r"imports\.py has no 'nosuch'\.$"):
        user_code.code("imports.py:nosuch", folder)


def test_the_fingerprint_of_code_changes_with_its_text(folder: Path) -> None:
    before = user_code.code_fingerprint(user_code.code("net.py:Net", folder))
    file_before = user_code.fingerprint(folder / "net.py")
    changed = folder / "changed.py"
    changed.write_text(NET.replace("3", "4"))
    assert user_code.code_fingerprint(user_code.code("changed.py:Net", folder)) != before
    assert user_code.fingerprint(changed) != file_before
    assert user_code.code_fingerprint(user_code.code("net.py:build", folder)) != before
    assert user_code.code_fingerprint(user_code.code("net.py:Net", folder)()) == before  # an object: its class


def test_shipped_code_is_named_because_its_version_is_recorded() -> None:
    assert user_code.code_fingerprint(nn.Linear) == "torch.nn.modules.linear.Linear"
    assert user_code.code_fingerprint(nn.Linear(2, 2)) == "torch.nn.modules.linear.Linear"


@pytest.mark.parametrize("name", ["os:system", "subprocess:run", "builtins:exec", "os:path", "torch.nn:init"])
@pytest.mark.parametrize("kinds", [(nn.Module,), (nn.Module, Tensor), (tuple, Dataset), (Algorithm,)])
def test_an_installed_object_of_the_wrong_kind_is_refused(name: str, kinds: tuple[type, ...]) -> None:
    with pytest.raises(InputError, match=f"'{name}' cannot be used here: .* It was not called"):
        user_code.code(name, Path(), *kinds)


def test_an_installed_function_may_declare_what_it_returns() -> None:
    assert user_code.code("torch.nn.functional:mse_loss", Path(), nn.Module, Tensor) is nn.functional.mse_loss
    assert user_code.code("fedloom.models:build", Path(), nn.Module) is build
    assert user_code.code("fedloom.algorithms:FedAvg", Path(), Algorithm) is FedAvg


def test_bytecode_beside_a_file_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("value = 'other code'\n")
    py_compile.compile(str(tmp_path / "net.py"), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    (tmp_path / "net.py").write_text("value = 'what people read'\n")
    assert user_code.code("net.py:value", tmp_path) == "what people read"


def test_a_missing_file_has_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^There is no file .*net\.py\.$"):
        user_code.fingerprint(tmp_path / "net.py")


def test_an_error_in_your_code_shows_the_file_the_line_and_the_lines_around_it(folder: Path) -> None:
    (folder / "mine.py").write_text("def half(x):\n    y = x / 2\n    return y[0]\n\n\n" + "# " * 80)
    half = user_code.code("mine.py:half", folder)
    with pytest.raises(TypeError) as caught:
        half(3)
    assert user_code.place_of(caught.value) == (
        f"\n  {folder / 'mine.py'}, line 3, in half"
        "\n       1 | def half(x):\n       2 |     y = x / 2\n  >    3 |     return y[0]"
    )


def test_files_below_the_current_folder_have_short_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "mine.py").write_text("x = 1 / 0  " + "# why " * 40)
    with pytest.raises(InputError, match=r"division by zero\n  mine\.py, line 1, in <module>") as caught:
        user_code.code("mine.py:x", folder)
    assert max(map(len, str(caught.value).splitlines()[1:])) == errors.WIDTH


def test_a_syntax_error_shows_its_line(folder: Path) -> None:
    (folder / "mine.py").write_text("def half(x):\n    return x /\n")
    with pytest.raises(InputError, match=r"SyntaxError: .*\n.*mine\.py, line 2\n(.*\n)*  >    2 \|     return x /$"):
        user_code.code("mine.py:half", folder)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("mu = 0.01", "loaded: Mine.mu has no type. Write `mu: float = 0.01` for a setting"),
        ("weights = 'uniform'", "loaded: Mine.weights has no type."),
        ("def __init__(self): ...", "loaded: Mine defines __init__, and an algorithm has none."),
    ],
)
def test_a_class_that_is_no_record_is_explained_in_plain_words(folder: Path, body: str, said: str) -> None:
    (folder / "mine.py").write_text(f"import fedloom\n\n\nclass Mine(fedloom.FedAvg):\n    {body}\n")
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        user_code.code("mine.py:Mine", folder)
    assert "pydantic" not in str(caught.value)
    assert "\n  >    4 | class Mine" in str(caught.value)


class Typo(FedAvg):
    """Has methods that fedloom does not know: some are helpers, which it calls itself."""

    def corect(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return add(step.grad, self.rounds(), scale=0.1)

    @property
    def liner(self) -> bool:
        return all(self.fits(one) for one in ())

    def rounds(self) -> Tree:
        return {}

    def fits(self, one: object) -> bool:
        return True

    def plot(self) -> None: ...

    @torch.no_grad()
    def start(self) -> None:
        self.rund()

    def rund(self) -> None: ...

    def validated(self) -> None: ...

    def model(self, task: Task, shared: Groups, own: Groups) -> Tree:
        return shared["model"]


class Heir(Typo):
    """Inherits the mistake."""


def uses(one: Typo) -> None:
    one.validated()


def test_a_method_that_nothing_calls_and_that_is_nearly_one_of_fedlooms_is_found() -> None:
    told = "{0} defines `corect`, which fedloom does not call. Did you mean `correct`?"
    also = "{0} defines `liner`, which fedloom does not call. Did you mean `linear`?"
    for kind in (Typo, Heir):
        assert [*user_code.misspelt(kind)] == [text.format(kind.__name__) for text in (told, also)]
    assert not [said for kind in CLASSES.values() for said in user_code.misspelt(kind)]


@pytest.mark.parametrize("asks", [bool, float, lambda x: x + torch.rand(1)])
def test_what_cannot_be_computed_for_many_clients_is_said_without_torchs_words(asks: Callable[[Any], Any]) -> None:
    with pytest.raises(RuntimeError, match="vmap") as caught:
        torch.vmap(lambda x: x * asks(x))(torch.ones(2))
    said = user_code.said(caught.value)
    assert "file an issue" not in said
    assert "reads_batch = True" in said
    assert "test_user_code.py, line " in said


def test_arithmetic_with_trees_is_hinted_at() -> None:
    tree: Any = {"w": 1}
    with pytest.raises(TypeError, match="unsupported operand") as caught:
        tree - tree
    assert "Weights are trees, which are dicts of tensors: use add, sub" in user_code.said(caught.value)


def test_an_error_in_a_library_has_no_place_in_your_code() -> None:
    with pytest.raises(OSError, match="No such file") as caught:
        Path("/nowhere").read_text()
    assert "test_user_code.py" in user_code.place_of(caught.value)
    assert caught.value.__traceback__ is not None
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # without this test, which is your code
    assert user_code.place_of(caught.value) == ""


def test_a_misspelt_file_is_answered_with_the_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("")
    with pytest.raises(InputError, match=r"nett\.py\. Did you mean 'net\.py'\?$"):
        user_code.code("nett.py:Net", tmp_path)
    with pytest.raises(InputError, match=r"nett\.py\. Did you mean 'net\.py'\?$"):
        user_code.fingerprint(tmp_path / "nett.py")
    with pytest.raises(InputError, match=r"In double quotes a backslash means more than itself"):
        user_code.code("my\net.py:Net", tmp_path)


def test_a_wrong_result_is_described_in_words() -> None:
    assert [user_code.kind_of(value) for value in (None, 1, "", (1, 2))] == ["None", "an int", "a str", "a tuple of 2"]
    assert user_code.kind_of(torch.zeros(2, 3)) == "a tensor of shape (2, 3) and torch.float32"
    error = str(user_code.wrong_return(defined_here, "None", "a number"))
    assert re.fullmatch(
        r"defined_here \(\S*test_user_code\.py, line \d+\) returned None\. It must return a number\.", error
    )


def defined_here() -> None: ...


def test_files_that_code_imports_are_part_of_the_experiment(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import torch, helpers\nfrom parts.head import width\nfrom torch import nn\n")
    (tmp_path / "helpers.py").write_text("from parts import *\nimport net\n")  # one that goes back
    (tmp_path / "parts").mkdir()
    for name in ("__init__", "head", "inner", "unused"):
        (tmp_path / "parts" / f"{name}.py").write_text("width = 1\n" if name != "head" else "from . import inner\n")
    (tmp_path / "unused.py").write_text("width = 1\n")
    found = {file.relative_to(tmp_path).as_posix() for file in user_code.imported_beside(tmp_path / "net.py")}
    assert found == {"helpers.py", "parts/__init__.py", "parts/head.py", "parts/inner.py"}
    values = {"task": {"model": "net.py:Net"}, "algorithm": {"fedavg": {}}}
    before = experiment_file.parse(values, tmp_path).description()["code"]
    assert before.keys() == {"net.py:Net", *found}
    (tmp_path / "helpers.py").write_text("import parts\nimport net\nscale = 2\n")
    after = experiment_file.parse(values, tmp_path).description()["code"]
    assert {name for name in before if before[name] != after[name]} == {"helpers.py"}


USES_HELPERS = """
import parts.inner
import helpers
from helpers import Base, size
from parts import double

class Net(Base):
    depth = double(size)
    other = parts.inner.WORD

def late():
    import helpers
    return helpers.size

def asks():
    return helpers.size
"""


def with_helpers(folder: Path, size: int) -> Path:
    (folder / "parts").mkdir(parents=True)
    (folder / "net.py").write_text(USES_HELPERS)
    (folder / "helpers.py").write_text(f"size = {size}\n\n\nclass Base:\n    def ask(self):\n        return size\n")
    (folder / "parts" / "__init__.py").write_text("from .inner import double\n")
    (folder / "parts" / "inner.py").write_text("WORD = 'in'\n\n\ndef double(x):\n    return 2 * x\n")
    return folder


def test_files_beside_a_file_can_be_imported_and_those_of_two_folders_are_not_mixed_up(tmp_path: Path) -> None:
    before, paths = {*sys.modules}, [*sys.path]
    one, two = (user_code.code("net.py:Net", with_helpers(tmp_path / str(size), size)) for size in (3, 5))
    assert (one.depth, two.depth, one.other) == (6, 10, "in")
    assert (one().ask(), two().ask()) == (3, 5)
    assert (sys.path, sys.meta_path[0].__class__.__name__ == "_Beside") == (paths, False)
    assert all(name.startswith(user_code.PREFIX) for name in {*sys.modules} - before)
    assert user_code.code("net.py:asks", tmp_path / "3")() == 3


def test_a_module_of_the_same_name_elsewhere_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "helpers.py").write_text("size = 7\n")
    monkeypatch.syspath_prepend(elsewhere)
    helpers = importlib.import_module("helpers")
    try:
        assert user_code.code("net.py:Net", with_helpers(tmp_path / "mine", 3)).depth == 6
        assert sys.modules["helpers"] is helpers
    finally:
        del sys.modules["helpers"]


def test_bytecode_of_files_beside_a_file_is_not_run(tmp_path: Path) -> None:
    folder = with_helpers(tmp_path / "mine", 3)
    text = (folder / "helpers.py").read_text()
    (folder / "helpers.py").write_text(text.replace("3", "9"))
    py_compile.compile(str(folder / "helpers.py"), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    (folder / "helpers.py").write_text(text)
    assert user_code.code("net.py:Net", folder).depth == 6


def test_worker_processes_get_what_lies_beside_a_file(tmp_path: Path) -> None:
    folder = with_helpers(tmp_path / "mine", 3)
    sent = cloudpickle.dumps([user_code.code(f"net.py:{name}", folder) for name in ("Net", "asks")])
    there = "import pickle, sys; net, asks = pickle.load(sys.stdin.buffer); print(net.depth, net().ask(), asks())"
    found = subprocess.run([sys.executable, "-c", there], input=sent, capture_output=True, check=True, cwd=tmp_path)
    assert found.stdout.split() == [b"6", b"3", b"3"]


def test_an_import_that_comes_too_late_says_so(tmp_path: Path) -> None:
    late = user_code.code("net.py:late", with_helpers(tmp_path / "mine", 3))
    with pytest.raises(ModuleNotFoundError) as caught:
        late()
    assert "No module named 'helpers'. Import a file that lies beside yours at the top" in user_code.said(caught.value)


def passed_on(cohort: Any) -> None:
    cohort.exchange(None, {}, None)


class Delegating:
    def round(self, cohort: Any) -> None:
        self._give(cohort)

    def _give(self, cohort: Any) -> None:
        passed_on(cohort)


class Unrelated:
    def round(self, cohort: Any) -> None:
        cohort.reduce(None, {})


class WithBuiltins:
    def round(self, cohort: Any) -> list[int]:
        return list(map(int, "12"))


def test_what_a_class_calls_is_found_in_its_methods_and_in_functions_of_its_module() -> None:
    assert user_code.calls(Delegating, "exchange")
    assert not user_code.calls(Unrelated, "exchange")
    assert not user_code.calls(WithBuiltins, "map")  # Python's own is no verb of a cohort


def test_only_peers_exchange_models() -> None:
    found = {name for name, kind in ALGORITHMS.items() if user_code.calls(kind, "exchange")}
    assert found == {"peer"}
