"""The commands about data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import fedloom, in_this_process


def test_data_describe_draws_who_holds_what(folder: Path) -> None:
    done = fedloom("data", "describe", "small.toml", folder=folder)
    assert "Picture: small-data.png" in done.stdout
    assert (folder / "small-data.png").is_file()
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_data_describe_says_whose_clients_they_are_if_every_seed_draws_its_own(folder: Path) -> None:
    changes = ("--set", "seeds=[4, 5]", "--set", "data.seed='run'", "--set", "data.partition={name='iid', clients=3}")
    done = fedloom("data", "describe", "small.toml", *changes, folder=folder)
    assert "These are the clients of seed 4: every seed draws its own." in done.stdout


def test_data_describe_prints_json(folder: Path) -> None:
    done = fedloom("data", "describe", "small.toml", "--json", folder=folder)
    found = json.loads(done.stdout)
    assert found["picture"] == "small-data.png"
    assert sum(one["examples"] for one in found["clients"]) == found["examples"]
    assert all(one["largest"]["class"] in found["classes"] for one in found["clients"])


def test_data_get_offline_names_what_to_fetch_by_hand(folder: Path) -> None:
    (folder / "bin").mkdir()
    done = fedloom("data", "get", "nonsense", folder=folder, code=2)
    assert "mnist" in done.stderr


def test_sites_agree_on_preprocessing_without_showing_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for site, wards in {"berlin": ("icu", "general"), "oslo": ("ICU", "general")}.items():
        rows = "".join(f"{age},{wards[age % 2]},{('no', 'yes')[age % 3 == 0]}\n" for age in range(20, 40))
        (tmp_path / f"{site}.csv").write_text(f"age,ward,dead\n{rows}")
        data = f'source = "csv"\npath = "{site}.csv"\nlabel = "dead"\ncategorical = ["ward"]\nnormalize = "federated"'
        (tmp_path / f"{site}.toml").write_text(
            f'[site]\nname = "{site}"\n[data]\n{data}\npartition = {{ name = "iid", clients = 1 }}\n'
        )
        file = f"summary-{site[0]}.json"
        in_this_process("data", "summarize", f"{site}.toml", "--to", file, monkeypatch=monkeypatch)
        told = capsys.readouterr().out
        assert f"{file}: 2 columns, 3 features of 1 client(s) of {site}\n  ward: " in told
        assert "\n  dead: no, yes\nIt holds the names above" in told
        in_this_process("data", "summarize", f"{site}.toml", "--to", file, monkeypatch=monkeypatch, code=2)
        assert f"{file} exists already" in capsys.readouterr().err
    in_this_process("data", "agree", "summary-b.json", "summary-o.json", monkeypatch=monkeypatch)
    told = capsys.readouterr()
    assert "ward: ICU, general, icu\ndead: no, yes\nAgreed: preprocessing.json." in told.out
    assert "berlin has no ward = ICU. Is it spelt differently there?" in told.err
    in_this_process("data", "agree", "summary-b.json", "summary-o.json", monkeypatch=monkeypatch, code=2)
    assert "preprocessing.json exists already" in capsys.readouterr().err
    in_this_process("data", "agree", "summary-b.json", "summary-o.json", "--force", monkeypatch=monkeypatch)
    assert "Agreed: preprocessing.json." in capsys.readouterr().out
    site = (tmp_path / "oslo.toml").read_text()
    (tmp_path / "oslo.toml").write_text(site.replace("[data]", '[data]\npreprocessing = "preprocessing.json"'))
    in_this_process("data", "describe", "oslo.toml", monkeypatch=monkeypatch)
    assert "4 features: age, ward=ICU, ward=general, ward=icu" in capsys.readouterr().out


def test_sites_hear_of_classes_that_are_spelt_differently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for site, dead in {"berlin": "dead", "oslo": "Dead"}.items():
        rows = "".join(f"{7 * age % 41},{('alive', dead)[age % 3 == 0]}\n" for age in range(40))
        (tmp_path / f"{site}.csv").write_text(f"age,outcome\n{rows}")
        data = f'source = "csv"\npath = "{site}.csv"\nlabel = "outcome"'
        (tmp_path / f"{site}.toml").write_text(f'[site]\nname = "{site}"\n[data]\n{data}\n')
        in_this_process("data", "summarize", f"{site}.toml", "--to", f"{site}.json", monkeypatch=monkeypatch)
    in_this_process("data", "agree", "berlin.json", "oslo.json", monkeypatch=monkeypatch)
    told = capsys.readouterr().err
    assert "berlin has no outcome = Dead. Is it spelt differently there?" in told
    assert "oslo has no outcome = dead. Is it spelt differently there?" in told
    assert "Caution: outcome has classes that may mean the same and are learnt as different ones: Dead, dead." in told


def test_a_sites_examples_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "berlin.csv").write_text("age,dead\n" + "20,no\n30,yes\n" * 10)
    data = '[data]\nsource = "csv"\npath = "berlin.csv"\nlabel = "dead"\n'
    (tmp_path / "berlin.toml").write_text(f'[site]\nname = "berlin"\n{data}')
    in_this_process("data", "export", "berlin.toml", "--to", "berlin.json", monkeypatch=monkeypatch)
    assert capsys.readouterr().out == "berlin.json: 20 examples of 1 clients\n"


def test_a_sites_file_needs_no_partition_to_be_summarised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{7 * age % 41},{('icu', 'general')[age % 2]},{('no', 'yes')[age % 3 == 0]}\n" for age in range(40))
    (tmp_path / "berlin.csv").write_text(f"age,ward,dead\n{rows}")
    data = '[data]\nsource = "csv"\npath = "berlin.csv"\nlabel = "dead"\ncategorical = ["ward"]\n'
    for name, text in {"bare": data, "named": f'[site]\nname = "berlin"\n{data}'}.items():
        (tmp_path / f"{name}.toml").write_text(text)
        in_this_process("data", "summarize", f"{name}.toml", "--to", f"{name}.json", monkeypatch=monkeypatch)
        assert f"{name}.json: 2 columns, 3 features of 1 client(s)" in capsys.readouterr().out


def test_a_site_hears_of_probable_mistakes_in_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tables = {"berlin": lambda age: age * 1.1, "oslo": lambda age: -999 if age == 60 else age / 80}
    for site, crp in tables.items():
        rows = "".join(f"{age % 37},{crp(age)},{('no', 'yes')[age % 3 == 0]}\n" for age in range(20, 80))
        (tmp_path / f"{site}.csv").write_text(f"age,crp,dead\n{rows}")
        data = f'source = "csv"\npath = "{site}.csv"\nlabel = "dead"'
        (tmp_path / f"{site}.toml").write_text(f'[site]\nname = "{site}"\n[data]\n{data}\nsplit = [1, 0, 0]\n')
        in_this_process("data", "summarize", f"{site}.toml", "--to", f"{site}.json", monkeypatch=monkeypatch)
    assert capsys.readouterr().err.startswith("Caution: crp is -999 in 1 row, far from all other values")
    in_this_process("join", "https://x", "--site", "oslo.toml", "--dry-run", monkeypatch=monkeypatch)
    told = capsys.readouterr().out
    assert "\nCaution: crp is -999 in 1 row" in told
    assert "Data: Federation(1 clients, 60 examples" in told  # a site's file that names no clients is one
    (tmp_path / "oslo.csv").write_text((tmp_path / "oslo.csv").read_text().replace("-999", "0.75"))
    in_this_process("data", "summarize", "oslo.toml", "--to", "oslo.json", "--force", monkeypatch=monkeypatch)
    in_this_process("data", "agree", "berlin.json", "oslo.json", monkeypatch=monkeypatch, code=2)
    told = capsys.readouterr().err
    assert "Nothing was written. Correct it there and summarize again or, if the values are right" in told
    assert "set convert = { crp = 88.0 } in [data] at oslo, with the exact factor, times one that is set" in told
    assert not (tmp_path / "preprocessing.json").exists()
    in_this_process("data", "agree", "berlin.json", "oslo.json", "--force", monkeypatch=monkeypatch)
    told = capsys.readouterr().err
    assert "Caution: crp is about 88 times smaller at oslo than elsewhere" in told
    assert "set convert = { crp = 88.0 } in [data] at oslo, with the exact factor, times one that is set" in told
    (tmp_path / "oslo.toml").write_text((tmp_path / "oslo.toml").read_text() + "convert = { crp = 88.0 }\n")
    in_this_process("data", "summarize", "oslo.toml", "--to", "oslo.json", "--force", monkeypatch=monkeypatch)
    in_this_process("data", "agree", "berlin.json", "oslo.json", "--to", "agreed.json", monkeypatch=monkeypatch)
    assert capsys.readouterr().err == ""
    data = (tmp_path / "oslo.toml").read_text()
    (tmp_path / "oslo.toml").write_text(f'{data}preprocessing = "agreed.json"\n')
    in_this_process("join", "https://x", "--site", "oslo.toml", "--dry-run", monkeypatch=monkeypatch)
    assert "Data: Federation(1 clients, 60 examples" in capsys.readouterr().out


def test_a_site_may_lack_a_column_that_others_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ages = [(20 + 7 * row % 50, ("no", "yes")[row % 3 == 0]) for row in range(60)]
    (tmp_path / "oslo.csv").write_text("age,dead\n" + "".join(f"{age},{dead}\n" for age, dead in ages))
    (tmp_path / "berlin.csv").write_text(
        "age,bnp,ward,dead\n" + "".join(f"{age},{age % 11},{('icu', 'er')[age % 2]},{dead}\n" for age, dead in ages)
    )
    keys = 'label = "dead"\ndrop = ["height"]\noptional = ["bnp", "ward"]\ncategorical = ["ward"]\nfill = "mean"\n'
    for site in ("oslo", "berlin"):
        data = f'[site]\nname = "{site}"\n[data]\nsource = "csv"\npath = "{site}.csv"\n{keys}'
        (tmp_path / f"{site}.toml").write_text(data)
        (tmp_path / f"{site}-agreed.toml").write_text(f'{data}preprocessing = "agreed.json"\n')
        in_this_process("data", "summarize", f"{site}.toml", "--to", f"{site}.json", monkeypatch=monkeypatch)
    said = capsys.readouterr()
    assert "oslo.json: 1 columns, 1 features" in said.out
    assert "Caution: [data] drop names the column 'height', which this table lacks." in said.err
    in_this_process("data", "agree", "oslo.json", "berlin.json", "--to", "agreed.json", monkeypatch=monkeypatch)
    told = capsys.readouterr()
    assert "ward: er, icu" in told.out
    assert "spelt differently" not in told.err
    assert "Caution: bnp is empty in all training rows of oslo: the model gets the mean there." in told.err
    shapes = []
    for site in ("oslo", "berlin"):
        in_this_process("join", "https://x", "--site", f"{site}-agreed.toml", "--dry-run", monkeypatch=monkeypatch)
        shown = capsys.readouterr().out
        shapes.append(next(line for line in shown.splitlines() if "the shape" in line))
        assert ("bnp is empty or the same in all rows" in shown) == (site == "oslo")
        assert "with drop" not in shown
    assert "[4]" in shapes[0] == shapes[1]
    in_this_process("data", "describe", "oslo-agreed.toml", monkeypatch=monkeypatch)
