"""The commands before a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fedloom.data.preprocessing import Column, Preprocessing
from tests.cli.commands import fedloom, in_this_process


def test_algorithms_are_listed_and_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fedloom.algorithms import ALGORITHMS

    in_this_process("algorithms", monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(ALGORITHMS)
    assert all(len(line) <= 80 for line in lines)
    assert len({re.match(r"\S+ +", line).end() for line in lines}) == 1, "the summaries are not aligned"  # type: ignore[union-attr]
    in_this_process("algorithms", "scaffold", monkeypatch=monkeypatch)
    shown = capsys.readouterr().out
    assert re.search(r"server_lr +number, more than 0 \(default 1.0\)", shown)
    assert "c_k ← c_k − c + (w − w_k) / (steps · lr)" in shown
    assert "Secure aggregation: yes: the server needs only sums (not with a rule). On a network: yes." in shown
    assert "Reference: Karimireddy et al." in shown
    in_this_process("algorithms", "scafold", monkeypatch=monkeypatch, code=2)
    assert "Did you mean 'scaffold'?" in capsys.readouterr().err


def test_the_keys_of_a_table_a_source_or_a_word_are_listed_with_defaults_and_meaning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_this_process("keys", monkeypatch=monkeypatch)
    assert "[cohort] Which clients take part in a round." in re.sub(" +", " ", capsys.readouterr().out)
    for word, said in {
        "train": "lr number, more than 0; default: 0.1. The learning rate.",
        "[top]": "rounds whole number, at least 0; default: 10.",
        "csv": 'source = "csv": A CSV file',
        "dirichlet": "alpha number",
        "fedprox": "mu number, at least 0; default: 0.01.",
        "lr": "[train] lr number",
        "dp": "epsilon number, more than 0; default: none.",
        "median": "no keys of its own",
    }.items():
        in_this_process("keys", word, monkeypatch=monkeypatch)
        assert said in " ".join(capsys.readouterr().out.split()), word
    in_this_process("keys", "lr", "--json", monkeypatch=monkeypatch)
    assert [place["table"] for place in json.loads(capsys.readouterr().out)] == ["[train]", "train.clients"]
    in_this_process("keys", "learning_rate", monkeypatch=monkeypatch, code=2)
    assert "no table or key 'learning_rate'. Did you mean 'lr'?" in capsys.readouterr().err


def test_models_are_listed_in_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fedloom.models import MODELS

    monkeypatch.setenv("COLUMNS", "80")
    in_this_process("models", monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(MODELS)
    assert max(map(len, lines)) <= 80


def test_the_graph_of_peers_is_drawn(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    monkeypatch.chdir(folder)
    ring = 'algorithm={ring={name="peer", topology="ring"}, gnp={name="peer", topology="erdos_renyi"}}'
    in_this_process("graph", "small.toml", "--set", ring, monkeypatch=monkeypatch)
    assert "Picture: small-graph.png" in capsys.readouterr().out
    with Image.open(folder / "small-graph.png") as picture:
        assert min(picture.size) > 100
        assert len(set(picture.convert("L").resize((64, 64)).tobytes())) > 2, "the picture is empty"
    in_this_process("graph", "small.toml", monkeypatch=monkeypatch, code=2)
    assert "has no peer-to-peer algorithm" in capsys.readouterr().err


def test_check_shows_the_resolved_file_and_the_cost_and_runs_nothing(folder: Path) -> None:
    done = fedloom("check", "small.toml", folder=folder)
    assert done.stdout.startswith("# small.toml is valid.\n")
    assert "lr = 0.3" in done.stdout
    assert "optimizer_state" not in done.stdout, "a key at its default"
    assert "# 10 clients with 1,797 examples" in done.stdout
    assert "# local sends nothing" in done.stdout
    assert re.search(r"# fedavg sends [\d.]+ kB up and [\d.]+ kB down a round", done.stdout)
    assert not (folder / "runs").exists()
    every_key = fedloom("check", "small.toml", "-v", folder=folder).stdout
    assert 'optimizer_state = "reset"' in every_key
    first = json.loads(fedloom("check", "small.toml", "--json", folder=folder).stdout)["experiment"]
    for shown in (done.stdout, every_key):
        (folder / "resolved.toml").write_text(shown)
        again = fedloom("check", "resolved.toml", "--json", folder=folder)
        assert json.loads(again.stdout)["experiment"] == first


def test_check_takes_the_workers_of_a_run(folder: Path) -> None:
    done = fedloom("check", "small.toml", "--workers", "2", "--json", folder=folder)
    assert json.loads(done.stdout)["experiment"]["run"]["workers"] == 2


def test_check_does_not_show_what_the_table_itself_decides(tmp_path: Path) -> None:
    rows = "".join(f"{n};{n % 2};{'train' if n % 4 else 'test'}\n" for n in range(40))
    (tmp_path / "table.csv").write_text(f"x;y;part\n{rows}")
    (tmp_path / "table.toml").write_text(
        '[data]\nsource = "csv"\npath = "table.csv"\nlabel = "y"\nsplit_column = "part"\n'
        'partition = { name = "iid", clients = 2 }\n[task]\nmodel = "logistic"\n'
    )
    shown = fedloom("check", "table.toml", "-v", folder=tmp_path).stdout
    assert 'split_column = "part"' in shown
    assert "split = " not in shown
    assert "delimiter" not in shown


class Served:
    """Calls commands with a file that only `fedloom serve` can run, and returns what they print."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.file, self.monkeypatch, self.capsys = folder / "served.toml", monkeypatch, capsys

    def write(self, text: str) -> None:
        self.file.write_text(text)

    def __call__(self, name: str, *arguments: str, code: int = 0) -> str:
        in_this_process(name, str(self.file), *arguments, monkeypatch=self.monkeypatch, code=code)
        said = self.capsys.readouterr()
        return said.err if code else said.out


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Served:
    return Served(tmp_path, monkeypatch, capsys)


def test_check_says_that_protections_leave_nothing_to_measure_without_data_of_the_server(served: Served) -> None:
    text = '[task]\nmodel = "digits_mlp"\n[algorithm]\nfedavg = {{ weights = "uniform" }}\n{}'
    served.write(text.format("[privacy]\nsecure_aggregation = {}\n"))
    assert "# Caution: Nothing will be measured: with [privacy], no metrics leave clients on a network." in served(
        "check"
    )
    assert "Nothing will be measured" not in served("check", "--set", "data.source=digits", "--set", "data.server=1.0")
    served.write(text.format(""))
    assert "Nothing will be measured" not in served("check")


def test_check_says_which_algorithm_it_assumes(served: Served) -> None:
    served.write('[task]\nmodel = "digits_mlp"\n')
    assert "# There is no [algorithm]: fedavg is assumed.\n" in served("check")
    assert "is assumed" not in served("check", "--set", "algorithm.mine.name=fedprox")
    served.write('[task]\nmodel = "digits_mlp"\n[algorithm]\nfedavg = {}\n')
    assert "is assumed" not in served("check")


@pytest.mark.parametrize(("more", "warned"), [((), True), (("cohort.count=10",), False)])
def test_check_warns_of_sums_over_few_clients(served: Served, more: tuple[str, ...], warned: bool) -> None:
    served.write(
        '[task]\nmodel = "digits_mlp"\n[algorithm]\nfedavg = { weights = "uniform" }\n'
        "[privacy]\nsecure_aggregation = {}\n"
    )
    changes = [part for change in more for part in ("--set", change)]
    assert ("# Caution: [privacy] secure_aggregation: a sum may be over only 3" in served("check", *changes)) == warned
    two = (
        "data.source=digits",
        "data.partition.name=iid",
        "data.partition.clients=2",
        "privacy.secure_aggregation.min_clients=2",
    )
    said = served("check", *(part for change in two for part in ("--set", change)))
    assert "each of the two can subtract its own update" in said


def test_check_shows_what_sites_agreed_on_though_they_have_the_data(served: Served) -> None:
    columns = (Column(name="age"), Column(name="weight"))
    numbers = {"mean": (50.0, 70.0), "std": (15.0, 9.0)}
    agreed = Preprocessing(columns=columns, **numbers, shape=(2,), classes=("0", "1"), label=("dead",))
    agreed.write(served.file.parent / "agreed.json")
    served.write('[data]\npreprocessing = "agreed.json"\n[task]\nmodel = "logistic"\n[algorithm]\nfedavg = {}\n')
    for options in ((), ("-v",)):
        shown = served("check", *options)
        assert "Without a source in [data], only `fedloom serve` can run this" in shown
        assert '[data]\npreprocessing = "agreed.json"\n' in shown
    assert json.loads(served("check", "--json"))["experiment"]["data"] == {"preprocessing": "agreed.json"}


def test_check_works_without_data_for_experiments_that_are_served(served: Served) -> None:
    served.write('[task]\nmodel = "digits_mlp"\n[cohort]\nstart_when = 3\n[algorithm]\nfedavg = {}\n')
    shown = served("check")
    assert "# 2,410 parameters. Without [data], only `fedloom serve` can run this: agents bring their data." in shown
    assert "[data]\n" not in shown
    found = json.loads(served("check", "--json"))
    assert found["estimate"] is None
    assert found["experiment"]["cohort"]["start_when"] == 3
    assert "Give a partition" in served("check", "--set", "data.source=digits", code=2)


@pytest.mark.parametrize("data", ["", '[data]\nsource = "digits"\npartition = { name = "iid", clients = 4 }\n'])
def test_json_says_what_the_text_of_check_says(data: str, served: Served) -> None:
    served.write(f'{data}[task]\nmodel = "digits_mlp"\n[privacy]\nexample_dp = {{ delta = 0.5 }}\n')
    shown, found = served("check"), json.loads(served("check", "--json"))
    assert any("δ = 0.5 protects hardly anybody" in text for text in found["cautions"])
    assert [f"# Caution: {text}" for text in found["cautions"]] == re.findall("^# Caution: .*", shown, re.MULTILINE)
    assert all(f"# {line}\n" in shown for line in [*found["privacy"]["has"], *found["privacy"]["lacks"]])
    assert (found["note"] is None) == bool(data)
    assert found["note"] is None or f"# {found['note']}\n" in shown


def test_check_of_a_file_whose_data_is_all_the_servers(served: Served, tmp_path: Path) -> None:
    served.write('[data]\nsource = "digits"\nserver = 1.0\n[task]\nmodel = "digits_mlp"\n')
    shown = served("check")
    assert "# 2,410 parameters. With [data] server = 1.0, only `fedloom serve` can run this" in shown
    assert "server = 1.0\n" in shown
    assert "leaves none for the clients" in served("run", "--out", str(tmp_path / "run"), code=2)
    served("check", "--set", "task.model=mnist_cnn", code=2)


@pytest.mark.parametrize(
    "command",
    [
        ["run", "-q"],
        ["bench"],
        ["graph"],
        ["sweep", "--over", "train.lr=0.1,0.2"],
        ["data", "describe"],
        ["data", "export", "--to", "data.json"],
        ["data", "summarize", "--to", "summary.json"],
        ["audit", "--only", "reconstruction"],
    ],
    ids=" ".join,
)
def test_what_needs_data_says_as_check_does_that_there_is_none(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("served.toml").write_text('[task]\nmodel = "digits_mlp"\n[algorithm]\nfedavg = {}\npeer = {}\n')
    in_this_process(*command, "served.toml", monkeypatch=monkeypatch, code=2)
    assert "Without [data], only `fedloom serve` can run this: agents bring their data." in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        'task={model="os:system", args={command="touch ran"}}',
        'task={loss="os:system"}',
        'data={source="os:system", command="touch ran"}',
        'algorithm={a={name="os:system"}}',
    ],
)
def test_check_calls_no_function_of_an_installed_module_that_is_not_what_the_key_needs(
    folder: Path, change: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    in_this_process("check", "small.toml", "--set", change, monkeypatch=monkeypatch, code=2)
    assert "'os:system' cannot be used here" in capsys.readouterr().err
    assert not (folder / "ran").exists()


@pytest.mark.slow
def test_no_command_runs_code_of_a_run_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    in_this_process("run", "small.toml", "-q", monkeypatch=monkeypatch)
    run = folder / "runs" / "small"
    file = run / "experiment.toml"
    (run / "net.py").write_text("open('ran', 'w').close()\nNet = None\n")
    (folder / "net.py").write_text("open('ran', 'w').close()\nNet = None\n")
    file.write_text(file.read_text().replace('"digits_mlp"', '"net.py:Net"'))
    assert "net.py:Net" in file.read_text()
    in_this_process("show", "runs/small", monkeypatch=monkeypatch)
    in_this_process("report", "runs/small", monkeypatch=monkeypatch)
    capsys.readouterr()
    for command in ("check", "run"):
        in_this_process(command, "runs/small/experiment.toml", monkeypatch=monkeypatch, code=2)
        assert "names code (net.py:Net). Nothing was loaded" in capsys.readouterr().err
    assert not (folder / "ran").exists()
    assert not (run / "ran").exists()


def test_init_writes_a_file_that_checks_and_does_not_overwrite(folder: Path) -> None:
    fedloom("init", "mine.toml", folder=folder)
    fedloom("check", "mine.toml", folder=folder)
    assert "--force" in fedloom("init", "mine.toml", folder=folder, code=2).stderr


def test_the_template_shows_the_true_defaults() -> None:
    import fedloom
    from fedloom.experiment import experiment_file
    from fedloom.files import tomllib

    text = (Path(fedloom.__file__).parent / "experiment/templates/experiment.toml").read_text()
    shown = experiment_file.parse(tomllib.loads(text)).resolved()
    plain = experiment_file.parse(
        {"data": {"partition": shown["data"]["partition"]}, "algorithm": {"fedavg": {}, "local": {}, "pooled": {}}}
    )
    defaults = plain.resolved()
    assert {k: v for k, v in shown.items() if k not in ("name", "rounds")} == {
        k: v for k, v in defaults.items() if k not in ("name", "rounds")
    }


def test_check_finds_errors_in_your_own_algorithm(folder: Path) -> None:
    (folder / "mine.py").write_text(
        "import fedloom as fl\n\n\nclass Mine(fl.FedAvg):\n"
        "    def correct(self, step, shared, own):\n        return shared['nothing']\n"
    )
    mine = 'algorithm={mine={name="mine.py:Mine"}}'
    done = fedloom("check", "small.toml", "--set", mine, folder=folder, code=2)
    assert (
        "A rehearsal with 20 examples failed. Round 1, client '0', local training, step 1 of 6: KeyError" in done.stderr
    )
    assert re.search(
        r"\n  mine\.py, line 6, in correct\n(.*\n)*  >    6 \|         return shared\['nothing'\]", done.stderr
    )
    assert "Traceback" not in done.stderr
    whole = fedloom("-v", "check", "small.toml", "--set", mine, folder=folder, code=2)
    assert "Traceback (most recent call last)" in whole.stderr
    assert whole.stderr.endswith(done.stderr)


def test_check_says_that_a_folder_holds_another_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = '[data]\nsource = "digits"\npartition = { name = "iid", clients = 3 }\n'
    (tmp_path / "e.toml").write_text(f'rounds = 1\n{data}[task]\nmodel = "digits_mlp"\n[run]\nbackend = "serial"\n')
    said = "runs/e holds another experiment, so `fedloom run` will refuse it"

    def checked(*changes: str) -> str:
        capsys.readouterr()
        in_this_process("check", "e.toml", *changes, monkeypatch=monkeypatch)
        return " ".join(capsys.readouterr().out.split())

    assert said not in checked()
    in_this_process("run", "e.toml", "-q", "--no-report", monkeypatch=monkeypatch)
    assert said not in checked("--set", "rounds=2")
    assert said in checked("--set", "train.lr=0.7").replace("# ", "")
    in_this_process("run", "e.toml", "-q", "--set", "train.lr=0.7", monkeypatch=monkeypatch, code=2)
