"""An agent refuses code that differs from the coordinator's; comments and docstrings may differ."""

from __future__ import annotations

import ast
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from fedloom.experiment.experiment_file import parse
from fedloom.federation.work import Place
from fedloom.network.agent.loaded_experiment import check_code
from fedloom.network.agent.policy import Refused
from fedloom.network.protocol.code_fingerprint import PACKAGE, _inspect, code_hashes, different_modules
from fedloom.task import Task
from tests.conftest import Dense
from tests.conftest import federation as some_clients

EXPERIMENT = parse({"algorithm": {"fedavg": {}, "scaffold": {}}})
HASHES = code_hashes(EXPERIMENT)


def file_of(module: str, package: Path) -> Path:
    path = package.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of fedloom."""
    folder = tmp_path_factory.mktemp("copy") / "fedloom"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def changed(package: Path, module: str, text: str) -> dict[str, str]:
    """The hashes of a copy in which one module has another text."""
    file = file_of(module, package)
    before = file.read_text()
    try:
        file.write_text(text)
        return code_hashes(EXPERIMENT, package)
    finally:
        file.write_text(before)


@pytest.mark.parametrize("module", HASHES)
def test_a_changed_line_of_code_is_refused(package: Path, module: str) -> None:
    text = file_of(module, package).read_text()
    *_, last = re.finditer(r"(?m)^( *)(def|class) (\w+)", text) or [None]
    assert last is not None
    edited = f"{text[: last.end()]}_changed{text[last.end() :]}"
    found = changed(package, module, edited)
    assert different_modules(found, HASHES) == [module]
    with pytest.raises(Refused, match=f"not the coordinator's: {re.escape(module)} differ"):
        check_code(HASHES, found)


@pytest.mark.parametrize("module", HASHES)
def test_comments_docstrings_and_formatting_pass(package: Path, module: str) -> None:
    text = file_of(module, package).read_text()
    lines = text.splitlines()
    for node in sorted(ast.walk(ast.parse(text)), key=lambda node: -getattr(node, "lineno", 0)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1 : node.end_lineno] = [f"{' ' * node.col_offset}'''Another docstring.'''"]
    edited = "\n".join(lines).replace("\n\n", "\n# a comment\n\n\n")
    assert edited != text
    check_code(HASHES, changed(package, module, edited))


@pytest.mark.parametrize(
    ("text", "imports"),
    [
        ("if not TYPE_CHECKING:\n  import a", [("a",)]),
        ("if not typing.TYPE_CHECKING:\n  from a import b", [("a.b", "a")]),
        ("if TYPE_CHECKING:\n  import a\nelse:\n  import b", [("b",)]),
        ("if typing.TYPE_CHECKING:\n  import a", []),
        ("try:\n  import a\nexcept ImportError:\n  import b", [("a",), ("b",)]),
        ("def f():\n  import a", [("a",)]),
    ],
)
def test_imports_that_run_are_followed_and_those_for_type_checkers_are_not(
    text: str, imports: list[tuple[str, ...]]
) -> None:
    assert list(_inspect(text.encode())[1]) == imports


def test_the_modules_are_those_that_clients_run_and_no_others(package: Path) -> None:
    assert {
        "fedloom.training.local",
        "fedloom.training.tape",
        "fedloom.data.federation",
        "fedloom.federation.work",
        "fedloom.federation.evaluation",
        "fedloom.algorithms.scaffold",
        "fedloom.models.digits_mlp",
        "fedloom.metrics",
        "fedloom.tree",
    } <= HASHES.keys()
    rooms = {name.split(".")[1] for name in HASHES.keys() - {"fedloom.backends.protocol"}}
    assert not rooms & {"backends", "cli", "experiment", "flower", "network", "papers", "results", "testing", "tuning"}
    assert "fedloom.algorithms.ifca" not in HASHES
    unused = ("results/report.py", "models/mlp.py", "models/mnist_cnn.py", "algorithms/ifca.py")
    for file in (package / name for name in unused):
        file.write_text(file.read_text() + "\nCHANGED = True\n")
    check_code(HASHES, code_hashes(EXPERIMENT, package))


def test_every_function_that_a_client_calls_is_in_a_hashed_module() -> None:
    from fedloom.federation.evaluation import EvaluationWork
    from fedloom.federation.work import ClientWork
    from fedloom.training.probe import probe

    task, data = Task(Dense), some_clients((12, 9))
    algorithm = EXPERIMENT.algorithm["scaffold"]
    called: set[str] = set()

    def note(frame: Any, event: str, value: Any) -> None:
        called.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        place = Place(data, task, probe(data, task).setup(group=1))
        initial = task.initial()
        own = algorithm.init_own(task, initial)
        stacked = {g: {name: leaf[None] for name, leaf in leaves.items()} for g, leaves in own.items()}
        shared = algorithm.init(task, initial)
        work = ClientWork(algorithm, "client", shared, (0,), stacked, 1, 1, 0, "stack", measure=("test",))
        work.perform(place)
        EvaluationWork(algorithm, shared, stacked, (0,), ("test",), 1).perform(place)
    finally:
        sys.setprofile(None)
    hashed = {str(file_of(name, PACKAGE)) for name in HASHES}
    ours = {name for name in called if name.startswith(str(PACKAGE))}
    assert {str(PACKAGE / "training" / "local.py"), str(PACKAGE / "federation" / "evaluation.py")} <= ours
    assert ours <= hashed


NET = """from torch import nn
from helper import width


def net(features, classes):
    return nn.Linear(features, width)
"""


def test_user_code_and_the_files_beside_it_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def at(
        name: str, net: str = NET, helper: str = "from deeper import width\n", deeper: str = "width = 2\n"
    ) -> dict[str, str]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "net.py").write_text(net)
        (folder / "helper.py").write_text(helper)
        (folder / "deeper.py").write_text(deeper)
        monkeypatch.syspath_prepend(str(folder))
        sys.modules.pop("helper", None)
        sys.modules.pop("deeper", None)
        return code_hashes(parse({"algorithm": {"fedavg": {}}, "task": {"model": "net.py:net"}}, folder))

    ours = at("ours")
    assert {"net.py", "helper", "deeper"} <= ours.keys()
    assert different_modules(ours, at("commented", "# a comment\n" + NET)) == []
    assert different_modules(ours, at("other", NET.replace("features, width", "features, 2"))) == ["net.py"]
    assert different_modules(ours, at("beside", helper="width = 3\n")) == ["deeper", "helper"]
    assert different_modules(ours, at("below", deeper="width = 3\n")) == ["deeper"]


def test_a_module_that_only_one_side_has_differs() -> None:
    assert different_modules({"a": "1"}, {"a": "1", "b": "2"}) == ["b"]
    with pytest.raises(Refused, match="a0, a1, a2, a3, a4 and 2 more differ"):
        check_code({f"a{number}": "1" for number in range(7)}, {})
