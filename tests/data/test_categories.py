"""Categories that are probably a mistake are named, and those that no training row has are refused afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedloom.data.agreement import Summary, agree, doubts
from fedloom.data.build import divided, federate
from fedloom.data.categories import misspelt, rare_categories, spelt_differently
from fedloom.data.plausibility import suspicions
from fedloom.data.preprocessing import Column
from fedloom.data.sources.csv import Csv
from fedloom.data.split import Split
from fedloom.errors import InputError

GRADE = Column(name="grade", categories=("II", "III", "IIII", "Post", "Postt"))


def folder(path: Path, **sites: list[str]) -> Csv:
    """Write a file for each site, with a column of grades."""
    (path / "sites").mkdir()
    for site, grades in sites.items():
        rows = "".join(f"{number},{grade},{number % 2}\n" for number, grade in enumerate(grades))
        (path / "sites" / f"{site}.csv").write_text("age,grade,y\n" + rows)
    return Csv(path=path / "sites", label="y", categorical=("grade",))


def test_categories_that_may_mean_the_same_are_named(tmp_path: Path) -> None:
    wards, smokers = ("icu", "ICU", "day care", "day-care", "A+", "A-"), ("yes", "no", "True", "unknown")
    rows = [f"{wards[row % 6]},{smokers[row % 4]},{row % 2}\n" for row in range(24)]
    (tmp_path / "data.csv").write_text("ward,smoker,y\n" + "".join(rows))
    source = Csv(path=tmp_path / "data.csv", label="y", categorical=("ward", "smoker"))
    said = [*suspicions(federate(source.load(tmp_path), clients=2))]
    assert [one.partition(". If so")[0] for one in said] == [
        "ward has categories that may mean the same and are separate features: ICU, icu; day care, day-care",
        "smoker has categories that may mean the same and are separate features: True, yes",
    ]
    (tmp_path / "data.csv").write_text("ward,y\n" + "icu,0\nNA,1\n" * 12)
    source = Csv(path=tmp_path / "data.csv", label="y", categorical=("ward",))
    assert any(
        one.startswith("ward has the category NA,") and 'set missing = { "NA" = nan }' in one
        for one in suspicions(federate(source.load(tmp_path), clients=2))
    )
    (ward,) = spelt_differently([Column(name="ward", categories=("ICU", "icu"), embedded=True)])
    assert "may mean the same and have separate embeddings: ICU, icu." in ward


def test_numbers_that_are_declared_as_categories_are_named() -> None:
    (said,) = rare_categories("crp", [f"{number / 4}" for number in range(80)])
    assert said == "crp has 80 categories, all numbers: take it out of categorical to use it as a number."
    assert [*rare_categories("ward", [str(100 + number % 30) for number in range(80)])] == []  # codes


def test_a_category_of_one_client_that_others_spell_in_another_way_is_named() -> None:
    held = {"oslo": [9, 9, 1, 9, 0], "bern": [9, 9, 0, 9, 2]}
    (said,) = misspelt(GRADE, held)
    assert said == (
        "grade has categories that one client alone has, and that may be misspelt: IIII (1 row of oslo; III?), Postt "
        "(2 rows of bern; Post?). If so, spell them alike in all files."
    )
    # more rows are somebody's own category, unless that client lacks the usual name
    assert [*misspelt(GRADE, {"oslo": [9, 9, 3, 9, 0], "bern": [9, 9, 0, 9, 0]})] == []
    (said,) = misspelt(GRADE, {"oslo": [9, 0, 8, 9, 0], "bern": [9, 9, 0, 9, 0]})
    assert "IIII (8 rows of oslo; III?)" in said
    (said,) = misspelt(Column(name="state", categories=("Pre", "premenopausal")), {"a": [9, 0], "b": [0, 9]})
    assert "Pre (9 rows of a; premenopausal?), premenopausal (9 rows of b; Pre?)" in said


def test_honest_rare_categories_and_numbers_are_left_in_peace() -> None:
    blood = Column(name="blood", categories=("A+", "B-", "AB-", "10", "100"))
    assert [*misspelt(blood, {"oslo": [9, 9, 1, 9, 1], "bern": [9, 9, 0, 9, 0]})] == []


@pytest.mark.parametrize("embed", [None, ("grade",)])
def test_clients_of_a_table_are_compared_and_parts_that_were_drawn_are_not(
    tmp_path: Path, embed: tuple[str, ...] | None
) -> None:
    source = folder(tmp_path, oslo=["II", "Post"] * 9 + ["Postt"], bern=["II", "Post"] * 9)
    dataset = source.model_copy(update={"embed": embed}).load(tmp_path)
    (said,) = (one for one in suspicions(federate(dataset)) if "misspelt" in one)
    assert "may be misspelt: Postt (1 row of oslo; Post?). If so" in said
    drawn = federate(dataset, partition={"name": "iid", "clients": 3})
    assert not [one for one in suspicions(drawn) if "misspelt" in one]


@pytest.mark.parametrize("normalize", ["none", "federated", "client"])
@pytest.mark.parametrize("embed", [None, ("grade",)])
def test_a_category_that_only_tests_have_is_refused_in_predictions(
    tmp_path: Path, normalize: str, embed: tuple[str, ...] | None
) -> None:
    source = folder(tmp_path, oslo=["II", "Post"] * 4 + ["IIII"] * 2, bern=["II", "Post"] * 5)
    dataset = source.model_copy(update={"embed": embed}).load(tmp_path)
    split = Split(train=0.8, validation=0.0, test=0.2, shuffle=False)
    fitted = federate(dataset, split=split, normalize=normalize).preprocessing
    assert fitted.untrained == {"grade": ("IIII",)}

    def encode(grade: str) -> torch.Tensor:
        return fitted.encode({"age": ["1"], "grade": [grade]}, lambda at: f"Line {at + 2}")

    assert len(encode("Post")) == 1
    said = r"Line 2 has 'IIII' in column 'grade', which no training row had, .* It knows II, Post\. Did you mean 'II'\?"
    with pytest.raises(InputError, match=said):
        encode("IIII")


def test_sites_that_agree_hear_of_both(tmp_path: Path) -> None:
    summaries, first_nine = {}, Split(train=0.9, validation=0.0, test=0.1, shuffle=False)
    for site, grades in {"oslo": ["III", "Post"] * 4 + ["IIII", "Postt"], "bern": ["III", "Post"] * 5}.items():
        (tmp_path / site).mkdir()
        dataset = folder(tmp_path / site, **{site: grades}).load(tmp_path / site)
        summaries[site] = Summary.of(divided(dataset, split=first_nine), missing=False)
    agreed = agree(summaries)
    assert agreed.untrained == {"grade": ("Postt",)}
    # one row of oslo may be a slip; the other one is in its test split, which no summary is about
    (said,) = (one for one in doubts(summaries, agreed) if "misspelt" in one)
    assert "IIII (1 row of oslo; III?)" in said
    assert not any("oslo" in one for one in doubts(summaries, agreed, for_everybody=True))
