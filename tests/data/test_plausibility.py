"""Probable mistakes in tables are named, and healthy tables are left in peace."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from numpy.typing import NDArray

from fedloom.data.build import divided, federate
from fedloom.data.federation import Dataset, Federation
from fedloom.data.plausibility import suspicions, units_of_sites, unusual
from fedloom.data.preprocessing import Preprocessing, columns_named
from fedloom.data.sources.csv import Csv
from fedloom.errors import InputError
from fedloom.experiment.experiment_file import parse
from fedloom.experiment.plan import Plan

Values = NDArray[Any]
CLIENTS = np.repeat(["clare", "cork", "kerry"], 40)


def table() -> pandas.DataFrame:
    """Three hospitals of 40 patients each."""
    draw = np.random.default_rng(1)
    values = {"age": draw.normal(60, 10, 120).round(), "crp": np.exp(draw.normal(2, 1, 120)).round(2)}
    return pandas.DataFrame({**values, "ward": draw.integers(0, 2, 120).astype(float)})


def labels(x: pandas.DataFrame) -> Values:
    return (x["age"] + 5 * np.log(x["crp"]) + np.random.default_rng(2).normal(0, 8, 120) > 70).astype(int).to_numpy()


def found(x: pandas.DataFrame, y: Values | None = None, normalize: str = "federated") -> list[str]:
    client = np.resize(CLIENTS, len(x)) if len(x) == 120 else np.concatenate([CLIENTS, CLIENTS])
    y = labels(table()) if y is None else y
    return [*suspicions(Federation.from_arrays(x, y, client=client, normalize=normalize))]


@pytest.mark.parametrize("normalize", ["none", "federated", "client"])
def test_a_healthy_table_has_nothing_suspicious(normalize: str) -> None:
    assert found(table(), normalize=normalize) == []


def test_one_class_is_nothing_to_learn() -> None:
    (said,) = found(table(), np.zeros(120, int))
    assert said == "The label has one class only (0): from this data alone there is nothing to learn."


DAYS = pandas.date_range("2020-01-10", periods=120)


@pytest.mark.parametrize("normalize", ["none", "federated", "client"])
def test_dates_that_are_numbers_are_named(normalize: str) -> None:
    days = np.random.default_rng(4).permutation(DAYS.strftime("%Y%m%d").astype(float))
    (said,) = found(table().assign(admitted=days), normalize=normalize)
    assert said.startswith("admitted looks like dates, such as 2020")
    assert found(table().assign(admitted=days + 50), normalize=normalize) == []  # months from 51 on


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%d-%b-%Y", "%Y%m%d"])
def test_a_label_that_is_a_date_is_named(form: str) -> None:
    data = Federation.from_arrays(table(), np.arange(120), client=CLIENTS)
    said = [*suspicions(replace(data, classes=tuple(DAYS.strftime(form))))]
    assert any(one.startswith("The label looks like dates, such as ") for one in said)
    years = replace(data, classes=tuple(map(str, range(2000, 2120))))
    assert not any("dates" in one for one in suspicions(years))


def test_a_label_of_dates_that_are_numbers_is_named() -> None:
    said = found(table(), DAYS.strftime("%Y%m%d").to_numpy().astype(float))
    assert any("The label looks like dates, such as 2020" in one and "take it as a number" in one for one in said)


@pytest.mark.parametrize("normalize", ["none", "federated", "client"])
@pytest.mark.parametrize("mark", [-999.0, 9999.0])
def test_a_number_that_marks_gaps_is_named(mark: float, normalize: str) -> None:
    x = table()
    x.loc[5, "crp"] = mark
    (said,) = found(x, normalize=normalize)
    assert said.startswith(f"crp is {mark:g} in 1 row, far from all other values")


def test_a_number_among_others_marks_no_gap() -> None:
    x = table()
    x["crp"] = np.linspace(900, 1100, 120).round()
    assert x["crp"].eq(999).any()
    assert not any("999" in said for said in found(x))


@pytest.mark.parametrize("factor", [1 / 88.4, 100.0])
def test_a_client_with_another_unit_is_named(factor: float) -> None:
    x = table()
    x.loc[CLIENTS == "cork", "crp"] *= factor
    (said,) = found(x)
    assert said.startswith("crp is about ")
    assert "at cork than elsewhere" in said
    assert found(x, normalize="client") == []  # then units do not matter


def test_a_site_in_another_unit_than_the_one_that_sites_agreed_on_is_told() -> None:
    values = np.random.default_rng(3).normal(1.1, 0.4, size=(50, 1))
    agreed = Preprocessing(columns=columns_named(["creatinine"]), mean=(93.6,), std=(32.6,))

    def said(factor: float) -> list[str]:
        site = Federation.from_arrays(values * factor, np.arange(50) % 2, client=["east"] * 50)
        scaled = (site.x - 93.6) / 32.6
        return [*suspicions(replace(site, x=scaled.float(), features=("creatinine",), preprocessing=agreed))]

    (text,) = said(1.0)
    assert text.startswith("creatinine is about ")
    assert "smaller at this site than elsewhere: is it in another unit there" in text
    assert "set convert = { creatinine = 79.0 } in [data]" in text
    assert said(88.4) == []


def test_gaps_at_some_clients_do_not_hide_another_unit_elsewhere(tmp_path: Path) -> None:
    x = table()
    x["crp"] = np.exp(np.random.default_rng(7).normal(1.0, 0.4, 120))
    x.loc[CLIENTS == "cork", "crp"] *= 9
    others = x.index[CLIENTS != "cork"]
    x.loc[others[::2], "crp"] = np.nan
    x.assign(client=CLIENTS, dead=labels(table())).to_csv(tmp_path / "x.csv", index=False)
    data = {
        "source": "csv",
        "path": "x.csv",
        "client": "client",
        "label": "dead",
        "fill": "mean",
        "normalize": "federated",
    }
    said = " ".join(suspicions(Plan.of(parse({"data": data}, base=tmp_path)).federation(1)))
    assert re.search(r"crp is about (8|9|10|11) times larger at cork than elsewhere", said)


def sites(draw: np.random.Generator) -> dict[str, Values]:
    """Three to ten honest sites of 30 to 800 patients: their means differ by up to a factor of 2."""
    spread, middle = draw.uniform(0.2, 1.0), draw.uniform(-3, 6)
    shifts = draw.uniform(0, np.log(2), draw.integers(3, 11))
    sizes = np.exp(draw.uniform(np.log(30), np.log(800), len(shifts))).astype(int)
    values = [np.exp(draw.normal(middle + shift, spread, size)) for shift, size in zip(shifts, sizes, strict=True)]
    return {f"site {number}": one for number, one in enumerate(values)}


@pytest.mark.parametrize("of_rows", [True, False])
@pytest.mark.parametrize("factor", [1.0, 9.01, 10.0, 0.1, 18.0])
def test_a_tenfold_unit_is_named_at_most_sites_and_honest_sites_are_left_in_peace(factor: float, of_rows: bool) -> None:
    draw, named = np.random.default_rng(5), []
    for _ in range(100):
        found = sites(draw)
        found["site 0"] = found["site 0"] * factor
        if of_rows:
            x, client = np.concatenate([*found.values()]), np.repeat([*found], [len(one) for one in found.values()])
            federation = Federation.from_arrays(pandas.DataFrame({"x": x}), np.arange(len(x)) % 2, client=client)
            said = " ".join(suspicions(federation))
        else:
            said = " ".join(units_of_sites("x", {name: (len(x), x.mean(), x.var()) for name, x in found.items()}))
        named.append((" at site 0 than elsewhere" in said, said.count(" than elsewhere")))
    if factor == 1.0:
        assert sum(count for _, count in named) <= 1  # 1 % of the columns
    else:
        assert sum(found for found, _ in named) >= 95
        assert sum(count - found for found, count in named) <= 1  # another site than that


def test_a_site_with_sicker_patients_has_no_other_unit() -> None:
    x = table().assign(dose=np.random.default_rng(3).normal(10, 8, 120))
    x.loc[CLIENTS == "cork", "dose"] += 45  # more than five times as large, but with the spread of the others
    assert found(x) == []


def test_a_client_with_another_zero_is_named() -> None:
    x = table().assign(temperature=np.random.default_rng(3).normal(37, 0.5, 120))
    x.loc[CLIENTS == "cork", "temperature"] = x["temperature"] * 1.8 + 32
    (said,) = found(x)
    assert said.startswith("temperature is about 98.")
    assert " at cork and 37 elsewhere" in said


def test_of_two_clients_with_different_units_one_is_named() -> None:
    x = table()[CLIENTS != "kerry"]
    x.loc[CLIENTS[:80] == "clare", "crp"] /= 88.4
    federation = Federation.from_arrays(x, np.arange(80) % 2, client=CLIENTS[:80], normalize="federated")
    (said,) = suspicions(federation)
    assert said.startswith("crp is about ")
    assert "times larger at cork than elsewhere" in said


@pytest.mark.parametrize("normalize", ["none", "federated", "client"])
@pytest.mark.parametrize("value", [np.nan, 3.0])
def test_a_column_without_different_values_is_named(value: float, normalize: str) -> None:
    dataset = Dataset(
        torch.tensor(table().assign(lactate=value).to_numpy(), dtype=torch.float32),
        torch.tensor(labels(table())),
        client=CLIENTS,
        classes=("0", "1"),
        features=(*table().columns, "lactate"),
        missing=True,
        preprocessing=Preprocessing(columns=columns_named([*table().columns, "lactate"])),
    )
    federation = divided(dataset) if normalize == "none" else federate(dataset, normalize=normalize)
    assert [*suspicions(federation)] == [
        "lactate is empty or the same in all rows: nothing can be learnt from it. Leave it out with drop."
    ]


@pytest.mark.parametrize("normalize", ["none", "federated", "client"])
def test_a_column_that_one_client_never_filled_in_is_named(tmp_path: Path, normalize: str) -> None:
    x = table().assign(ward=np.where(np.arange(120) % 3, "icu", "day care"), hospital=CLIENTS, y=labels(table()))
    x.loc[CLIENTS == "cork", ["crp", "ward"]] = np.nan
    x.loc[CLIENTS == "kerry", "age"] = 60  # a client's only value is no gap
    x.to_csv(tmp_path / "data.csv", index=False)
    source = Csv(path=tmp_path / "data.csv", label="y", client="hospital", fill="mean", categorical=("ward",))
    dataset = source.load(tmp_path)
    federation = divided(dataset) if normalize == "none" else federate(dataset, normalize=normalize)
    of_client = "all training rows of cork: the model gets 0, which stands for a mean, there."
    of_all = "all rows of cork: the model gets the mean over the other clients there."
    said = [one for one in suspicions(federation) if "is empty in all" in one]
    ends = of_client if normalize == "client" else of_all
    assert said == [f"{name} is empty in {ends}" for name in ("crp", "ward")]


@pytest.mark.parametrize("normalize", ["none", "federated", "client"])
def test_values_that_are_the_mean_and_clients_with_few_rows_are_not_called_empty(
    tmp_path: Path, normalize: str
) -> None:
    x = table().assign(hospital=CLIENTS, y=labels(table()))
    names = np.unique(CLIENTS)
    x["rare"] = (np.arange(120) == 7).astype(int)  # 0 in nearly all rows, and at most clients in all
    x["code"] = np.select([names[0] == CLIENTS, names[1] == CLIENTS], [-1, 1], 0)  # one number for each client
    x.loc[5, "crp"] = np.nan
    few = x.iloc[:3].assign(hospital="tiny", crp=np.nan)
    pandas.concat([x, few]).to_csv(tmp_path / "data.csv", index=False)
    dataset = Csv(path=tmp_path / "data.csv", label="y", client="hospital", fill="mean").load(tmp_path)
    federation = divided(dataset) if normalize == "none" else federate(dataset, normalize=normalize)
    assert [one for one in suspicions(federation) if "is empty in all" in one] == []


def test_a_class_that_probably_means_a_missing_label_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("a,y\n" + "1,yes\n2,no\n3,n/a\n" * 4)
    (said,) = suspicions(federate(Csv(path=tmp_path / "data.csv", label="y").load(tmp_path), clients=2))
    assert said.startswith("The label has the class n/a, ")
    with pytest.raises(InputError, match=r"Line 4 .*'n/a', which means a missing value"):
        Csv(path=tmp_path / "data.csv", label="y", missing={"n/a": np.nan}).load(tmp_path)


@pytest.mark.parametrize(
    "y", [labels(table()), np.arange(120) % 3, np.sin(np.arange(120))], ids=["two", "three", "number"]
)
def test_a_feature_that_gives_the_label_away_is_named(y: Values) -> None:
    (said,) = found(table().assign(leak=3.0 * y + 1), y)
    assert said.startswith("leak alone gives the label away")


def test_a_feature_that_is_the_label_in_nearly_all_rows_is_named() -> None:
    y = (np.arange(120) % 3 == 0).astype(int)
    (said,) = found(table().assign(leak=np.where(np.arange(120) == 60, 0, y)), y)
    assert said.startswith("leak alone gives the label away (AUROC 0.9")


def test_the_number_of_a_row_is_no_feature() -> None:
    (said,) = found(table().assign(number=np.random.default_rng(1).permutation(120) + 1_000_000.0))
    assert said == "number numbers the rows, from 1000000 to 1000119: leave it out with drop."
    (said,) = found(table().assign(number=np.arange(120) - 0.01))  # a zero that is not exact, as after normalisation
    assert said == "number numbers the rows, from 0 to 119: leave it out with drop."


def test_copies_of_rows_are_counted_but_not_where_measurements_are_coarse() -> None:
    x, y = table(), labels(table())
    (said,) = found(pandas.concat([x, x]), np.concatenate([y, y]))
    assert said.startswith("120 of 240 rows repeat another one.")
    assert found(x[["ward"]].assign(sex=np.arange(120) % 2)) == []
    coarse = x[["age", "ward"]].assign(months=12 * x["age"])  # ages in two units do not make rows more different
    assert found(coarse) == []
    (said,) = found(pandas.concat([x.round(), x.round()]), np.concatenate([y, y]))  # no column says which row it is
    assert " of 240 rows repeat another one." in said


def test_a_few_copies_are_named_where_hardly_any_row_would_repeat_by_chance() -> None:
    x = table().assign(pressure=np.random.default_rng(3).normal(120, 9, 120).round(1))
    rows = [*range(120), *range(5)]
    (said,) = suspicions(Federation.from_arrays(x.iloc[rows], labels(x)[rows], clients=1))
    assert said.startswith("5 of 125 rows repeat another one.")


def test_copies_are_found_in_a_table_of_which_some_rows_are_looked_at() -> None:
    draw = np.random.default_rng(1)
    x = np.repeat(draw.normal(0, 1, (7000, 2)), 2, axis=0)  # the copy of a row is the next one
    frame = pandas.DataFrame(x, columns=["age", "crp"])
    (said,) = suspicions(Federation.from_arrays(frame, np.repeat(np.arange(7000) % 2, 2), clients=1))
    assert said.startswith("7,000 of 14,000 rows repeat another one.")


def test_digits_are_healthy() -> None:
    values = {"data": {"source": "digits", "partition": {"name": "iid", "clients": 5}}, "algorithm": {"fedavg": {}}}
    assert [*suspicions(Plan.of(parse(values)).federation(1))] == []


@pytest.mark.data
@pytest.mark.parametrize("normalize", ["federated", "client"])
def test_four_real_hospitals_are_healthy(real: Path, normalize: str) -> None:
    source = Csv(path="heart_disease/heart_disease_4sites.csv", label="num", client="site", fill="mean")  # type: ignore[arg-type]
    assert [*suspicions(federate(source.load(real), normalize=normalize))] == []


def test_values_far_outside_of_the_training_data_are_named() -> None:
    mean, std = np.array([60.0, 5.0]), np.array([10.0, 2.0])
    usual = np.array([[20.0, 5.0], [100.0, 24.0]])
    assert [*unusual(["age", "crp"], usual, mean, std)] == []
    (said,) = unusual(["age", "crp"], usual * [[1e6, 1.0]], mean, std)
    assert said == ("age is outside of what the model knows in 2 of 2 rows, such as 1e+08: it was trained on 60 ± 10.")


def test_values_outside_of_what_training_reached_are_named_by_the_worst() -> None:
    mean, std, reach = np.array([60.0]), np.array([10.0]), np.array([[-4.0], [3.0]])
    assert [*unusual(["age"], np.array([[20.0], [90.0], [np.nan]]), mean, std, reach)] == []
    (said,) = unusual(["age"], np.array([[np.nan], [19.0], [-5.0], [50.0]]), mean, std, reach)
    assert said.startswith("age is outside of what the model knows in 2 of 4 rows, such as -5: it was trained on ")
    assert said.endswith("60 ± 10, with nothing below 20 (in whole standard deviations).")
    (said,) = unusual(["age"], np.array([[95.0]]), mean, std, reach)
    assert said.endswith("60 ± 10, with nothing above 90 (in whole standard deviations).")
    (said,) = unusual(["age"], np.array([[95.0], [2.0]]), mean, std, reach)
    assert said.endswith("60 ± 10, with nothing below 20 or above 90 (in whole standard deviations).")


def test_columns_that_single_precision_cannot_tell_apart_are_named() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(40, 3)) * [1.0, 1.0, 1e6] + [0.0, 1e9, 1e9]
    x[:, 0] = 0.1  # equal values are rounded alike
    labels = draw.integers(2, size=40)
    (found,) = (text for text in suspicions(Federation.from_arrays(x, labels, clients=2)) if "precision" in text)
    assert found.startswith("feature 1 has values from 999999998.741 to")
    assert not any("precision" in text for text in suspicions(Federation.from_arrays(x - 1e9, labels, clients=2)))
    (found,) = Federation.from_arrays(x[:, :1], x[:, 1], clients=2).cautions
    assert found.startswith("the label has values from")


def test_with_bounds_a_column_that_a_client_never_filled_in_gets_their_middle(tmp_path: Path) -> None:
    x = table().assign(hospital=CLIENTS, y=labels(table()))
    x.loc[CLIENTS == "cork", ["crp", "age"]] = np.nan
    x.to_csv(tmp_path / "data.csv", index=False)
    source = Csv(path=tmp_path / "data.csv", label="y", client="hospital", fill="mean")
    federation = federate(source.load(tmp_path), normalize={"crp": [0, 300]})
    said = [one for one in suspicions(federation) if "is empty in all" in one]
    assert said == [
        "age is empty in all rows of cork: the model gets 0 there.",
        "crp is empty in all rows of cork: the model gets the middle of its bounds there.",
    ]
