"""A label that is the wrong column is named itself, and not another column that is no number."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.data.build import federate
from fedloom.data.class_names import doubts
from fedloom.errors import InputError
from tests.data.sources.loading import load

ROWS = [f"p{row:03},2024-01-{row + 1:02},{row},{('no', 'yes')[row % 2]}" for row in range(30)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "a.csv").write_text("patient,seen,age,dead\n" + "\n".join(ROWS))
    return tmp_path / "a.csv"


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("patient", r"label = 'patient' has another value in nearly every row.* Is the label dead \(no, yes\)\?"),
        ("seen", r"label = 'seen' is a date, such as 2024-01-01: .* Is the label dead \(no, yes\)\?"),
        ("daed", r"\[data\] label: The file .* has no column 'daed'\. .* Did you mean 'dead'\?"),
        ("dead", r"Line 2 of .* has 'p000' in column 'patient'"),
    ],
)
def test_the_message_is_about_the_label(table: Path, label: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        load("csv", path=table, label=label)


def test_a_model_gets_no_output_for_each_row(table: Path) -> None:
    rows = load("csv", path=table, label="patient", drop=["seen", "dead"])
    assert "Nearly every row has a class of its own, such as p000" in doubts(federate(rows, clients=2))


@pytest.mark.parametrize("task", ["auto", "regression"])
@pytest.mark.parametrize("mark", ["-0,0072", "NA", "unknown"])
def test_numbers_to_predict_are_no_identifier(tmp_path: Path, task: str, mark: str) -> None:
    """What is wrong is another column: its text."""
    rows = "".join(f"town {row % 3};-{row},0072\n" for row in range(30))
    (tmp_path / "x.csv").write_text(f"town;weight\n{rows}town 1;{mark}\n")
    with pytest.raises(InputError) as caught:
        load("csv", path=tmp_path / "x.csv", label="weight", delimiter=";", task=task)
    assert "has 'town 0' in column 'town'" in str(caught.value)
    assert "identifier" not in str(caught.value)


def test_a_regression_of_texts_is_not_told_of_classes(tmp_path: Path) -> None:
    rows = "".join(f"town {row % 3},P{row}\n" for row in range(30))
    (tmp_path / "x.csv").write_text(f"town,weight\n{rows}")
    with pytest.raises(InputError) as caught:
        load("csv", path=tmp_path / "x.csv", label="weight", task="regression")
    assert "a class of its own" not in str(caught.value)
