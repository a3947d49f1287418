"""The documentation works as it is written: every file, command and program in it runs."""

from __future__ import annotations

import csv
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fedloom as fl
from fedloom import user_code
from fedloom.data.download import get
from fedloom.experiment import experiment_file
from fedloom.files import tomllib
from fedloom.testing import check_algorithm
from tests.forked import run_forked

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
EXTRAS = {"ray.md": "ray"}  # pages whose commands need a package that may not be there
# pages whose Python can be run from top to bottom, and how much of it: one page also shows other frameworks' programs
RUNNABLE = {"README.md": None, "how-to/data.md": None, "how-to/python.md": None, "how-to/from-other-frameworks.md": 1}
SLOW_PYTHON = {"README.md", "python.md", "from-other-frameworks.md"}
# pages whose commands need a dataset that is fetched from elsewhere
FETCHED = dict.fromkeys(("four-hospitals.md", "private-hospitals.md"), "heart_disease")
SLOW = {  # pages whose commands take many seconds
    *(
        "metrics.md",
        "predict.md",
        "survival.md",
        "seven-ways.md",
        "time.md",
        "commands.md",
        "results.md",
        "sweeps.md",
        "teach.md",
        "ray.md",
        "first-run.md",
        "your-data-and-model.md",
        "write-an-algorithm.md",
        "four-hospitals.md",
        "deploy.md",
        "private-hospitals.md",
        "README.md",
    ),
}
COMMANDED = [
    pytest.param(
        page,
        marks=[pytest.mark.data] * (page.name in FETCHED) + [pytest.mark.slow] * (page.name in SLOW),
    )
    for page in PAGES
]


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page shows: blocks that start with a comment with a name. Several may make one file."""
    for text in [*blocks(page, "toml"), *blocks(page, "python")]:
        named = re.match(r"# (\S+\.(?:toml|py))\n", text)
        if named:
            with (folder / named[1]).open("a", encoding="utf-8") as file:
                file.write(text)


def title(page: Path) -> str:
    """A page's path as tests name it: relative to docs/, or the name of a file at the top."""
    return page.relative_to(ROOT / "docs").as_posix() if page.is_relative_to(ROOT / "docs") else page.name


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_experiment_files_in_the_documentation_are_valid(page: Path, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    for text in blocks(page, "toml"):
        values = tomllib.loads(text)
        tables = values if values.keys() & {"rounds", "algorithm", *experiment_file.TABLES} else {"data": values}
        assert experiment_file.parse(tables, tmp_path).rounds > 0


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * (page.name in SLOW_PYTHON)) for page in PAGES],
    ids=[title(page) for page in PAGES],
)
def test_python_in_the_documentation_runs(page: Path, tmp_path: Path) -> None:
    code = blocks(page, "python")
    for text in code:
        compile(text, str(page), "exec")
    if title(page) in RUNNABLE and code:
        (tmp_path / "page.py").write_text("\n".join(code[: RUNNABLE[title(page)]]))
        run([sys.executable, "page.py"], tmp_path)


def test_the_algorithm_that_is_added_in_ten_minutes_keeps_all_promises(tmp_path: Path) -> None:
    (code,) = (text for text in blocks(ROOT / "CONTRIBUTING.md", "python") if "class FedProx" in text)
    (tmp_path / "mine.py").write_text(code)
    check_algorithm(user_code.code("mine.py:FedProx", tmp_path))


def test_the_example_of_a_value_that_changes_with_rounds_counts_them_from_one(tmp_path: Path) -> None:
    write_files(ROOT / "docs" / "tutorials" / "write-an-algorithm.md", tmp_path)
    fading = user_code.code("mine.py:Fading", tmp_path)(mu=0.5, decay=0.5)
    task, clients = (
        fl.Task("logistic", args={"features": 2, "classes": 2}),
        fl.Federation.from_arrays(torch.ones(8, 2), [0, 1] * 4, clients=2),
    )
    assert [record.notes["mu"] for record in fl.fit(clients, task, fading, rounds=3)] == [0.5, 0.25, 0.125]


def test_the_loss_for_survival_is_the_partial_likelihood(tmp_path: Path) -> None:
    write_files(ROOT / "docs" / "how-to" / "survival.md", tmp_path)
    loss = user_code.code("cox.py:partial_likelihood", tmp_path)
    risk = torch.tensor([[0.5], [-0.3], [1.2], [0.1]], dtype=torch.float64)
    # the second is lost at 2; the events are at 1 (all four are observed), and twice at 3 (the last two, by Breslow)
    labels = torch.tensor([[1.0, 1.0], [2.0, 0.0], [3.0, 1.0], [3.0, 1.0]])
    at_1, at_3 = sum(math.exp(one) for one in (0.5, -0.3, 1.2, 0.1)), math.exp(1.2) + math.exp(0.1)
    expected = ((math.log(at_1) - 0.5) + (math.log(at_3) - 1.2) + (math.log(at_3) - 0.1)) / 3
    assert loss(risk, labels).item() == pytest.approx(expected)
    assert loss(risk, labels * torch.tensor([1.0, 0.0])).item() == 0  # no event


def test_the_example_of_a_metric_measures_something(tmp_path: Path) -> None:
    write_files(ROOT / "docs" / "how-to" / "metrics.md", tmp_path)
    cost = user_code.code("costs.py:cost", tmp_path)
    outputs = torch.nn.functional.one_hot(torch.tensor([8, 1, 8, 1]), 10).numpy()
    assert cost(outputs, torch.tensor([8, 8, 1, 1]).numpy()) == pytest.approx((10 + 1) / 4)


def test_the_seven_ways_to_copy_are_those_of_the_demo() -> None:
    (shown,) = blocks(ROOT / "docs" / "explanation" / "seven-ways.md", "toml")
    assert shown == (ROOT / "examples" / "seven-ways.toml").read_text(encoding="utf-8")
    demo = tomllib.loads((ROOT / "fedloom/experiment/templates/demo.toml").read_text(encoding="utf-8"))
    given = tomllib.loads(shown)
    assert all(given[table] == demo[table] for table in ("rounds", "seeds", "data", "task", "train", "algorithm"))


def test_the_file_of_the_lesson_about_the_cost_of_privacy_is_among_the_examples() -> None:
    shown = blocks(ROOT / "docs" / "how-to" / "teach.md", "toml")
    assert (ROOT / "examples" / "privacy-cost.toml").read_text(encoding="utf-8") in shown


@pytest.mark.slow
def test_the_page_about_predictions_shows_what_its_commands_print(tmp_path: Path) -> None:
    page = ROOT / "docs" / "how-to" / "predict.md"
    write_files(page, tmp_path)
    run([sys.executable, "make_hospitals.py"], tmp_path)
    run_fedloom(["run", "hospitals.toml", "--no-report", "-q"], tmp_path)
    printed_rows, shown_rows = (
        list(csv.DictReader(text.splitlines()))
        for text in (run_fedloom(["predict", "runs/hospitals", "new.csv"], tmp_path), blocks(page, "text")[0])
    )
    assert len(printed_rows) == len(shown_rows)
    for printed_row, shown_row in zip(printed_rows, shown_rows, strict=True):
        for column, value in printed_row.items():  # machines differ in the last digits of probabilities
            alike = pytest.approx(float(value), abs=1e-4) if column.startswith("probability") else value
            assert (float(shown_row[column]) if column.startswith("probability") else shown_row[column]) == alike


@pytest.mark.parametrize("page", COMMANDED, ids=title)
def test_commands_in_the_documentation_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name in EXTRAS:
        pytest.importorskip(EXTRAS[page.name], reason=f"{EXTRAS[page.name]} is not installed")
    if page.name in FETCHED:
        monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
        get(FETCHED[page.name], from_file=real_data(FETCHED[page.name]))
    write_files(page, tmp_path)
    for text in blocks(page, "sh"):
        for line in text.splitlines():
            command = shlex.split(line, comments=True)
            if command[:2] == ["fedloom", "run"] and page.name in FETCHED:
                command += ["--set", "seeds=[1]"]  # tutorials have several for their statistics; one shows that it runs
            if command[:2] == ["fedloom", "run"] and page.name == "seven-ways.md":
                command += ["--set", "rounds=2", "--no-report"]
            if command[:2] == ["fedloom", "sweep"] and page.name == "teach.md":
                command += ["--set", "rounds=1", "--set", "seeds=[1]"]
            if command[:1] == ["fedloom"]:
                run_fedloom(command[1:], tmp_path)
            elif command[:1] == ["python"] and (tmp_path / command[1]).is_file():
                run([sys.executable, *command[1:]], tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted((ROOT / "examples").rglob("*.toml")), ids=lambda file: file.stem)
def test_examples_run(file: Path, tmp_path: Path) -> None:
    if file.parent.name == "neat":
        pytest.importorskip("neat", reason="neat-python is not installed")
    experiment_file.load(file)
    if file.stem.startswith("mnist"):
        pytest.skip("needs a download; tests marked `data` run it where the data is at hand")
    command = ["run", str(file), "-q", "--set", "rounds=2", "--workers", "1"]
    run_fedloom([*command, "--out", str(tmp_path / "out")], tmp_path)


def test_averaging_written_by_hand_gives_the_weights_of_fedavg() -> None:
    file = ROOT / "examples" / "fedavg_from_scratch.py"
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 60
    by_hand = user_code.code("fedavg_from_scratch.py:AverageByHand", file.parent)
    people = user_code.code("fedavg_from_scratch.py:people", file.parent)
    task = fl.Task(lambda: torch.nn.Linear(64, 10), metrics=["accuracy"])
    states = []
    for algorithm in (by_hand(lr=0.3), fl.FedAvg(lr=0.3)):
        *_, last = fl.fit(people(), task, algorithm, rounds=2, sampling=fl.Sampling(fraction=0.5))
        states.append(last.state["model"])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


@pytest.mark.slow
def test_the_example_from_scratch_learns(tmp_path: Path) -> None:
    told = run([sys.executable, str(ROOT / "examples" / "fedavg_from_scratch.py")], tmp_path)
    accuracy = [float(found) for found in re.findall(r"accuracy (0\.\d+)", told)]
    assert len(accuracy) == 20
    assert accuracy[-1] > 0.85 > 0.3 > accuracy[0]


@pytest.mark.filterwarnings("ignore")  # those of Jupyter's event loop
@pytest.mark.slow
@pytest.mark.parametrize("file", sorted((ROOT / "examples").rglob("*.ipynb")), ids=lambda file: file.stem)
def test_notebooks_run_from_top_to_bottom(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    monkeypatch.setenv("ROUNDS", "2")
    monkeypatch.setenv("SEEDS", "2")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(file, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    told = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "95 % interval" in told
    assert (tmp_path / "runs" / "notebook" / "report.html").is_file()


@pytest.mark.data
@pytest.mark.slow
def test_the_mnist_example_learns(tmp_path: Path) -> None:
    folder = real_data("mnist")
    example = ROOT / "examples" / "mnist-fedavg.toml"
    command = ["run", str(example), "-q", "--json", "--set", "rounds=4"]
    done = run_fedloom([*command, "--set", f"data.path={folder}", "--out", str(tmp_path / "out")], tmp_path)
    accuracy = re.search(r'"server_test_accuracy": ([\d.]+)', done)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.8


def real_data(name: str) -> Path:
    folder = Path(os.environ.get("FEDLOOM_DATA", ROOT.parent / "shared" / "data")) / name
    if not folder.is_dir():
        pytest.skip(f"there is no real data at {folder}; set FEDLOOM_DATA")
    return folder


def run(command: list[str], folder: Path) -> str:
    return printed(subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300))


def run_fedloom(arguments: list[str], folder: Path) -> str:
    return printed(run_forked(*arguments, cwd=folder, timeout=300))


def printed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
