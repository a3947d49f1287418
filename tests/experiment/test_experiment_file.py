"""The experiment file: what it means, and what is said when it is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedloom.data.split import Split
from fedloom.errors import InputError
from fedloom.experiment import experiment_file
from fedloom.experiment.description import differences, identity

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SMALL = """
rounds = 3
[data]
source = "digits"
partition = { name = "iid", clients = 4 }
"""


def parse(text: str, base: Path = Path()) -> experiment_file.Experiment:
    return experiment_file.parse(tomllib.loads(text), base)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("roundz = 3", ["roundz", "Did you mean 'rounds'?"]),
        ("[trian]\nlr = 1", ["trian", "Did you mean 'train'?"]),
        ("[train]\nmomentun = 0.9", ["[train]", "momentun", "Did you mean 'momentum'?"]),
        ("[train]\nlr = -1", ["[train] lr", "more than 0", "-1"]),
        ('[train]\nlr = "0.1"', ["[train] lr", "a number", "'0.1'"]),
        ('[train]\nbatch_size = "all"', ["[train] batch_size", "a whole number or 'full'", "'all'"]),
        ('[train]\noptimizer = "adm"', ["[train] optimizer", "'adam'", "Did you mean 'adam'?"]),
        ('[train]\noptimizer = "adam"\nmomentum = 0.9', ["momentum", 'optimizer = "sgd"']),
        ("[algorithm]\nfedavgg = {}", ["fedavgg", "Did you mean 'fedavg'?"]),
        ("[algorithm]\nfedavg = { lrr = 1 }", ["[algorithm.fedavg]", "lrr", "Did you mean 'lr'?"]),
        ("[algorithm]\nfedavg = { lr = 0 }", ["[algorithm.fedavg] lr", "more than 0"]),
        (
            '[algorithm]\nfedavg = { weights = "example" }',
            ["[algorithm.fedavg] weights", "'examples' or 'uniform'"],
        ),
        ("[algorithm]\nfedavg = 3", ["[algorithm.fedavg]", "must be a table"]),
        ("[algorithm]\nfedsgd = { momentum = 0.5 }", ["[algorithm.fedsgd]", "'momentum' has no meaning"]),
        ('[data]\nsource = "digitz"', ["digitz", "Did you mean 'digits'?"]),
        ('[data]\nsource = "digits"\npath = "x"', ["[data]", "path", 'source = "digits"']),
        ('[data]\nsource = "npz"\npath = "a.npz"\nlabel = "b"', ["no key 'label'", "Did you mean 'y'?"]),
        ('[data]\nsource = "csv"\npath = "a.csv"\ny = "b"', ["no key 'y'", "Did you mean 'label'?"]),
        ("[data]\nsplit = [0.5, 0.5]", ["[data] split"]),
        ("[data]\nsplit = { train = 1.0, shufle = false }", ["[data.split] has no key 'shufle'", "'shuffle'"]),
        ("[data]\nsplit = { train = 0.5 }", ["three shares", "[0.5, 0.2, 0.2]"]),
        ('[data]\nnormalize = "all"', ["[data] normalize", "'none', 'client' or 'federated'"]),
        ("[cohort]\nfraction = 1.5", ["[cohort] fraction", "at most 1"]),
        ("[cohort]\ncount = 2\nfraction = 0.5", ["count", "fraction"]),
        ('[cohort]\nsampling = "poisson"\ncount = 2', ["cohort.fraction"]),
        ('[evaluate]\nheadline = "last"', ["headline", "last:10"]),
        ('[evaluate]\nstop = "target"', ["stop", "target"]),
        ('[evaluate]\nsplits = ["tests"]', ["[evaluate] splits", "'tests'"]),
        ("[run]\nworkers = 0", ["[run] workers", "at least 1"]),
        ("[run]\ncompile = true", ["[run] compile was removed", "True", "Delete the key"]),
        ("seeds = []", ["seeds", "[1, 2, 3]"]),
        ("seeds = [1, 1]", ["twice"]),
        ("seeds = 20261117", ["number of seeds", "seeds = [20261117]"]),
        ("seeds = 0", ["from 1 to 1,000"]),
        ('seeds = "1"', ["seeds", "[1, 2, 3]"]),
        ("format = 2", ["format = 2"]),
        ('name = "a/b"', ["name", "folder"]),
        ("rounds = -1", ["rounds", "at least 0"]),
        ('data = "digits"', ["[data]", "table"]),
    ],
)
def test_a_wrong_file_is_an_error_that_says_what_is_allowed(text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse(text)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_split_may_be_a_table_that_keeps_the_order() -> None:
    split = "{ train = 0.8, validation = 0.0, test = 0.2, shuffle = false }"
    first = parse(f"[data]\nsplit = {split}")
    assert first.data.split == Split(train=0.8, validation=0.0, test=0.2, shuffle=False)
    assert parse(tomli_w.dumps(first.resolved())).data == first.data


def test_the_resolved_file_means_the_same_as_the_file() -> None:
    first = parse(SMALL + "[algorithm]\nslow = { name = 'fedavg', lr = 0.01, weights = 'uniform' }\nlocal = {}\n")
    again = parse(tomli_w.dumps(first.resolved()))
    assert again.resolved() == first.resolved()
    assert identity(again.description()) == identity(first.description())
    assert again.algorithm["slow"].train.lr == 0.01


def test_what_differs_from_the_defaults_means_the_same_as_the_file() -> None:
    tables = (
        "[train]\nlr = 0.5\n[compress]\nup = { name = 'topk', keep = 0.01 }\n[system]\nspeed = { name = 'lognormal' }\n"
    )
    back = parse(SMALL + tables + "[algorithm]\nback = { name = 'fedavg', lr = 0.1 }\n")  # 0.1 is the default
    assert parse(tomli_w.dumps(back.resolved(defaults=False))).resolved() == back.resolved()
    first = parse(SMALL + "[algorithm]\nslow = { name = 'fedavg', lr = 0.01, weights = 'uniform' }\nlocal = {}\n")
    short = first.resolved(defaults=False)
    assert parse(tomli_w.dumps(short)).resolved() == first.resolved()
    slow = {"name": "fedavg", "weights": "uniform", "lr": 0.01}
    assert short["algorithm"] == {"slow": slow, "local": {"name": "local"}}
    assert short.keys() == {"format", "name", "rounds", "seeds", "data", "algorithm"}


def test_a_number_of_seeds_stands_for_a_list() -> None:
    assert parse("seeds = 3").seeds == (1, 2, 3)
    assert parse("seeds = 3").description() == parse("seeds = [1, 2, 3]").description()


def test_an_algorithm_takes_the_training_table_and_may_override_it() -> None:
    experiment = parse(
        SMALL + "[train]\nlr = 0.5\nepochs = 3\n[algorithm]\nfedavg = {}\nslow = { name = 'fedavg', lr = 0.01 }"
    )
    assert experiment.algorithm["fedavg"].train.lr == 0.5
    assert (experiment.algorithm["slow"].train.lr, experiment.algorithm["slow"].train.epochs) == (0.01, 3.0)


def test_identity_ignores_how_and_how_long_but_nothing_else() -> None:
    def fingerprint(text: str) -> str:
        return identity(parse(text).description())

    assert fingerprint(SMALL) == fingerprint(SMALL + "[run]\nworkers = 7\n")
    assert fingerprint(SMALL) == fingerprint(SMALL.replace("rounds = 3", "rounds = 30"))
    assert fingerprint(SMALL) != fingerprint(SMALL + "[train]\nlr = 0.2\n")
    assert fingerprint(SMALL) != fingerprint("seeds = [2]" + SMALL)


def test_identity_knows_the_users_code(tmp_path: Path) -> None:
    text = SMALL + '[task]\nmodel = "net.py:Net"\n'
    (tmp_path / "net.py").write_text("a = 1")
    before = identity(parse(text, tmp_path).description())
    (tmp_path / "net.py").write_text("a = 2")
    assert identity(parse(text, tmp_path).description()) != before


def test_set_changes_any_key(tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text(SMALL + "[algorithm]\nslow = { name = 'fedavg' }\n")
    experiment = experiment_file.load(file, {"train.lr": 0.7, "algorithm.slow.epochs": 2, "rounds": 9})
    assert (experiment.rounds, experiment.train.lr, experiment.algorithm["slow"].train.epochs) == (9, 0.7, 2.0)
    with pytest.raises(InputError, match="'rounds' is a value, not a table"):
        experiment_file.load(file, {"rounds.lr": 1})
    for key, meant in (
        ("lr", "train.lr"),
        ("learning_rate", "train.lr"),
        ("seed", "seeds, data.seed, task.seed, system.seed"),
    ):
        with pytest.raises(InputError, match=rf"no table or key '{key}' .* Did you mean {meant}\?$"):
            experiment_file.load(file, {key: 1})
    with pytest.raises(InputError, match=r"Did you mean 'rounds'\?$"):
        experiment_file.load(file, {"round": 1})


def test_a_file_that_is_not_there_or_not_toml(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no experiment file"):
        experiment_file.load(tmp_path / "nothing.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(InputError, match="not a valid TOML file"):
        experiment_file.load(tmp_path / "bad.toml")


def test_own_algorithms_are_named_by_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import fedloom as fl\nclass Mine(fl.FedAvg):\n    mu: float = 1.0\nthing = 3\n")
    experiment = parse(SMALL + "[algorithm]\nmine = { name = 'mine.py:Mine', mu = 0.5 }", tmp_path)
    assert experiment.algorithm["mine"].mu == 0.5  # type: ignore[attr-defined]
    for name, words in (
        ("mine.py:Mina", "Did you mean 'Mine'"),
        ("mine.py:thing", "not an Algorithm"),
        ("no.py:X", "no file"),
    ):
        with pytest.raises(InputError, match=words):
            parse(SMALL + f"[algorithm]\nmine = {{ name = '{name}' }}", tmp_path)


def test_a_byte_order_mark_is_fine(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text("rounds = 3", encoding="utf-8-sig")
    assert experiment_file.load(tmp_path / "e.toml").rounds == 3


def test_a_folder_and_another_encoding_are_named(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text("rounds = 3", encoding="utf-16")
    with pytest.raises(InputError, match=r"e\.toml is not a text in UTF-8\. Save it as UTF-8\."):
        experiment_file.load(tmp_path / "e.toml")
    with pytest.raises(InputError, match="is a folder, not an experiment file"):
        experiment_file.load(tmp_path)


def test_waiting_times_decide_the_result_in_virtual_time_only(tmp_path: Path) -> None:
    def fingerprint(text: str) -> str:
        return identity(parse(text, tmp_path).description())

    short, long = ('[cohort]\ndeadline = "1m"\n', '[cohort]\ndeadline = "2m"\n')
    assert fingerprint(short) == fingerprint(long) == fingerprint("")
    timed = "[system]\nstep = 1.0\n"
    assert len({fingerprint(timed), fingerprint(short + timed), fingerprint(long + timed), fingerprint("")}) == 4
    assert fingerprint(timed) == fingerprint(timed + "[run]\nworkers = 2\n")


def test_the_content_of_a_fleets_files_is_part_of_the_identity(tmp_path: Path) -> None:
    text = '[system]\nspeed = { name = "file", file = "fleet.csv" }\n'
    found = set()
    for speed in (1, 2):
        (tmp_path / "fleet.csv").write_text(f"client,speed\n0,{speed}\n")
        found.add(identity(parse(text, tmp_path).description()))
    assert len(found) == 2


def test_the_content_of_every_file_that_training_reads_is_part_of_the_identity(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("class Net: ...\n")
    text = """
    [data]
    source = "csv"
    path = "table.csv"
    label = "y"
    preprocessing = "agreed.json"
    [task]
    model = "net.py:Net"
    args = { sizes = ["wide", "~no such person"], vocabulary = ["words.txt"] }
    init = "start.safetensors"
    """
    names = ("agreed.json", "start.safetensors", "words.txt")
    for name in names:
        (tmp_path / name).write_text("first")
    before = parse(text, tmp_path).description()
    assert sorted(before["files"]) == sorted(names)
    without = parse("").description()
    assert without["files"] == {}
    older = {key: value for key, value in without.items() if key != "files"}
    assert identity(older) == identity(without)  # findings of audits stay
    for name in names:
        (tmp_path / name).write_text("second")
        assert differences(before, parse(text, tmp_path).description()) == [f"the file {name} has changed"]
        (tmp_path / name).write_text("first")


@pytest.mark.parametrize(
    "text",
    [
        '[task]\nmodel = "net.py:Net"\nargs = { note = "note.txt" }\ninit = "note.txt"',
        '[algorithm.mine]\nname = "mine.py:Mine"\nnote = "note.txt"',
    ],
)
def test_files_that_code_opens_in_the_working_directory_belong_to_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    base, name = tmp_path / "sub", "the file note.txt in the working directory"
    base.mkdir()
    monkeypatch.chdir(tmp_path)
    (base / "net.py").write_text("from torch.nn import Linear as Net\n")
    (base / "mine.py").write_text(
        "from fedloom.algorithms.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n"
        '    """Reads a file."""\n\n    note: str = ""\n    """Its name."""\n'
    )

    def said(change: Callable[[], Any]) -> list[str]:
        before = parse(text, base).description()
        change()
        return differences(before, parse(text, base).description())

    there, here = base / "note.txt", Path("note.txt")
    assert said(lambda: here.write_text("first")) == [f"{name} is new, or newly named"]
    assert said(lambda: here.write_text("second")) == [f"{name} has changed"]
    assert said(lambda: there.write_text("first")) == ["the file note.txt is new, or newly named"]
    assert said(lambda: here.write_text("third")) == [f"{name} has changed"]
    assert said(here.unlink) == [f"{name} is gone, or no longer named"]
    monkeypatch.chdir(base)  # then both are the same file
    assert [*parse(text, base).description()["files"]] == ["note.txt"]
    assert said(there.unlink) == ["the file note.txt is gone, or no longer named"]


def test_the_fleet_is_among_the_resolved_tables() -> None:
    with pytest.raises(InputError, match=r"\[system\] .* cannot be read: Is a directory"):
        parse("[system]\nspeed = { name = 'file', file = '.' }\n").description()
    resolved = parse("[system]\nspeed = { name = 'lognormal' }\n").resolved()
    assert resolved["system"]["speed"] == {"name": "lognormal"}
    assert parse("").resolved().keys() == resolved.keys() - {"system"}
    with pytest.raises(InputError, match=r"\[system\] latency must be at least 0"):
        parse("[system]\nlatency = -1.0\n")


@pytest.mark.parametrize(
    ("line", "label"),
    [
        ('FedProx-mu-0.1 = { name = "fedprox" }', "FedProx-mu-0.1"),
        ("fedprox.1 = { mu = 0.1 }", "fedprox.1"),
        ("fedprox.1.5 = { mu = 0.1 }", "fedprox.1.5"),
    ],
)
def test_a_label_that_toml_has_divided_at_its_dot_is_named(line: str, label: str) -> None:
    with pytest.raises(InputError, match=f'is the label meant to be "{label}"\\? Write it in quotes'):
        parse(f"[algorithm]\n{line}")


@pytest.mark.parametrize("line", ['fedprx = { rule = { name = "median" } }', "fedprox = { mo = 0.1 }"])
def test_other_mistakes_are_not_taken_for_a_dot(line: str) -> None:
    with pytest.raises(InputError) as refused:
        parse(f"[algorithm]\n{line}")
    assert "quotes" not in str(refused.value)


def test_a_key_of_an_algorithm_whose_label_has_a_dot_can_be_changed() -> None:
    values = tomllib.loads('[algorithm]\n"prox-0.1" = { name = "fedprox", mu = 0.1 }\n')
    experiment_file.change(values, "algorithm.prox-0.1.mu", 0.5)
    experiment_file.change(values, "train.lr", 0.2)
    assert values == {"algorithm": {"prox-0.1": {"name": "fedprox", "mu": 0.5}}, "train": {"lr": 0.2}}


def test_two_shares_are_no_split() -> None:
    with pytest.raises(
        InputError, match=r"\[data\] split must be three shares: train, validation, test\. Got \[0\.5, 0\.5\]"
    ):
        experiment_file.parse({"data": {"split": [0.5, 0.5]}})


def test_the_copy_of_a_file_without_data_names_none() -> None:
    without = experiment_file.parse({"algorithm": {"fedavg": {}}}, Path())
    assert "data" not in without.as_written()
    agreed = experiment_file.parse({"data": {"preprocessing": "agreed.json"}, "algorithm": {"fedavg": {}}}, Path())
    assert agreed.as_written()["data"] == {"preprocessing": "agreed.json"}
    for one in (without, agreed):  # and it is the same experiment
        again = experiment_file.parse(one.as_written(), Path())
        assert (again.has_data, again.description()) == (False, one.description())
    given = experiment_file.parse({"data": {"source": "digits"}, "algorithm": {"fedavg": {}}}, Path())
    assert given.as_written() == given.resolved()


def test_everything_that_is_wrong_with_the_algorithms_is_said_at_once() -> None:
    wrong = 'scaffold = {}\nfeddc = {}\nother = { name = "fedprox", nu = 1 }'
    with pytest.raises(InputError) as caught:
        parse(f"[train]\nmomentum = 0.9\n[algorithm]\nfedavg = {{}}\n{wrong}")
    assert [line.partition(" ")[0] for line in str(caught.value).split("\n")] == [
        "[algorithm.scaffold]",
        "[algorithm.feddc]",
        "[algorithm.other]",
    ]
