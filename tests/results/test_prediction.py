"""A run's model answers for new examples what it answers for the same examples in the run."""

from __future__ import annotations

import shutil
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.data.preprocessing import Column, Preprocessing
from fedloom.errors import InputError, StoreError
from fedloom.results.prediction import Predictor, predict, predict_file
from fedloom.results.result import Result
from fedloom.training.clients import Clients
from fedloom.training.evaluation import batch, outputs
from tests.results.hospitals import EXPERIMENT, hospitals


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return hospitals(tmp_path_factory.mktemp("hospitals"))


def rows(path: Path, predictor: Predictor) -> list[dict[str, Any]]:
    header, *found = predict_file(predictor, path)
    return [dict(zip(header, row, strict=True)) for row in found]


def test_new_rows_are_prepared_as_the_training_rows_were(result: Result) -> None:
    assert result.plan is not None
    federation, task = result.plan.federation(1), result.plan.task(1)
    data = Clients(federation, (0,))
    x, _ = batch(data, torch.arange(10), task)
    with torch.no_grad():
        expected = torch.softmax(outputs(task, result.weights("fedavg")["model"], x), -1)
    answered = rows(result.folder.parent / "sites" / "berlin.csv", result.predictor("fedavg"))[:10]
    assert [row["patient"] for row in answered] == [f"berlin-{place}" for place in range(10)]
    found = [[float(row[f"probability {name}"]) for name in ("alive", "dead")] for row in answered]
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5)
    assert [row["prediction"] for row in answered] == [("alive", "dead")[int(row.argmax())] for row in expected]


def test_a_frame_gives_a_frame_with_its_index(result: Result) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(result.folder.parent / "sites" / "berlin.csv", sep=";", decimal=",").iloc[3:5]
    found = fl.load(result.folder).predict(frame)
    assert (list(found.index), list(found.columns)) == ([3, 4], ["prediction", "probability alive", "probability dead"])
    answered = rows(result.folder.parent / "sites" / "berlin.csv", result.predictor())[3:5]
    assert found["prediction"].tolist() == [row["prediction"] for row in answered]
    assert found["probability dead"].tolist() == pytest.approx(
        [float(row["probability dead"]) for row in answered], 1e-5
    )
    with pytest.raises(InputError, match=r"Row 3 of the frame has 'ICU' in column 'ward', whose categories are"):
        result.predict(frame.assign(ward="ICU"))


def test_true_and_false_in_a_frame_are_spelt_as_in_the_training_file() -> None:
    pandas = pytest.importorskip("pandas")
    smoker = Preprocessing(
        columns=(Column(name="smoker", categories=("false", "true")),), shape=(2,), classes=("a", "b")
    )
    predictor = Predictor(nn.Identity(), smoker, torch.float32)
    assert predict(predictor, pandas.DataFrame({"smoker": [True, False]}))["prediction"].tolist() == ["b", "a"]
    both = smoker.replace(columns=(Column(name="smoker", categories=("TRUE", "true")),))
    with pytest.raises(InputError, match="has 'True' in column 'smoker'"):
        predict(Predictor(nn.Identity(), both, torch.float32), pandas.DataFrame({"smoker": [True]}))


def test_an_umlaut_in_a_file_or_frame_may_be_two_characters(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    columns = (Column(name="fläche"), Column(name="ward", categories=("Chirurgie", "Gynäkologie")))
    fitted = Preprocessing(columns=columns, shape=(3,))
    made = Predictor(nn.Identity(), fitted, torch.float32)
    frame = pandas.DataFrame({"fla\u0308che": [2.0], "ward": ["Gyna\u0308kologie"]})
    frame.to_csv(tmp_path / "new.csv", index=False)
    expected = [2.0, 0.0, 1.0]
    assert predict(made, frame).to_numpy().tolist() == [expected]
    _, row = predict_file(made, tmp_path / "new.csv")
    assert [float(one) for one in row] == expected
    with pytest.raises(InputError, match="The frame has two columns 'fläche'"):
        predict(made, frame.assign(fläche=1.0))


def test_empty_columns_and_values_outside_of_the_training_data_are_said() -> None:
    columns = (Column(name="age"), Column(name="ward", categories=("a", "b")), Column(name="crp"))
    fitted = Preprocessing(columns=columns, missing=True, shape=(4,), mean=(60, 0, 0, 5), std=(10, 1, 1, 2))
    x = torch.tensor([[-5.0, nan, nan, nan], [50.0, nan, nan, nan]])
    empty = [f"{name} is empty in all rows: the model takes the mean of its training data." for name in ("ward", "crp")]
    assert Predictor(nn.Identity(), fitted, torch.float32).cautions(x) == empty
    reach = fitted.replace(reach=((-4, 0, 0, -1), (4, 1, 1, 9)))
    *said, age = Predictor(nn.Identity(), reach, torch.float32).cautions(x)
    assert said == empty
    assert age.startswith("age is outside of what the model knows in 1 of 2 rows, such as -5")


def test_a_column_that_some_tables_lack_counts_as_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    columns = (Column(name="age"), Column(name="ward", categories=("a", "b")), Column(name="bnp"))
    keys: dict[str, Any] = {"columns": columns, "optional": ("ward", "bnp"), "shape": (4,), "label": tuple("wxyz")}
    statistics = {"missing": True, "mean": (0, 5, 5, 9), "std": (1, 1, 1, 1)}
    made = Predictor(nn.Identity(), Preprocessing(marks={"": nan}, **keys, **statistics), torch.float32)
    path, told = tmp_path / "new.csv", list[str]()
    path.write_text("id;age\n1;3,5\n2;4,5\n")
    _, *found = predict_file(made, path, told.append)
    assert found == [["1", "3.5", "0", "0", "0"], ["2", "4.5", "0", "0", "0"]]
    assert told == [
        f"{name} is empty in all rows: the model takes the mean of its training data." for name in keys["optional"]
    ]
    pandas = pytest.importorskip("pandas")
    assert predict(made, pandas.DataFrame({"age": [3.5]})).values.tolist() == [[3.5, 0, 0, 0]]
    zero = Predictor(nn.Identity(), Preprocessing(marks={"": 0.0}, **keys), torch.float32)
    assert next(reversed([*predict_file(zero, path, told.append)])) == ["2", "4.5", "0", "0", "0"]
    assert told[2:] == [f"The table lacks the column {name}: it counts as 0 in all rows." for name in keys["optional"]]
    predict(zero, pandas.DataFrame({"age": [3.5]}))
    assert told[-1] in caplog.text
    path.write_text("age,BNP\n1,2\n")
    with pytest.raises(InputError, match=r"lacks the column bnp.*'BNP'"):
        list(predict_file(made, path))
    path.write_text("bnp\n1\n")
    with pytest.raises(InputError, match="lacks the column age"):
        list(predict_file(made, path))


def test_an_array_of_a_table_gets_cautions_too(caplog: pytest.LogCaptureFixture) -> None:
    fitted = Preprocessing(columns=(Column(name="age"),), shape=(1,), mean=(60,), std=(10,))
    predict(Predictor(nn.Identity(), fitted, torch.float32), np.array([[60.0], [999.0]]))
    assert "age is outside of what the model knows in 1 of 2 rows, such as 999" in caplog.text


def test_without_a_global_model_a_client_is_needed(result: Result) -> None:
    with pytest.raises(InputError, match=r"local has no .* which has one \(fedavg.*\), or a client.*: berlin, oslo"):
        result.predictor("local")
    weights = {name: result.predictor("local", client=name).model.state_dict() for name in ("berlin", "oslo")}
    assert not torch.equal(weights["berlin"]["out.weight"], weights["oslo"]["out.weight"])
    assert list(result.weights("local")) == ["berlin", "oslo"]


def test_a_clients_own_normalisation_is_used(tmp_path: Path) -> None:
    found = hospitals(tmp_path, EXPERIMENT.replace('"federated"', '"client"'))
    with pytest.raises(InputError, match=r'normalize = "client".*Say whose to use\. Known: berlin, oslo'):
        found.predictor("fedavg")
    own = found.predictor("fedavg", client="oslo")
    assert own.mean.tolist() == list(found.preprocessing(1).clients["oslo"][0])


def test_an_older_run_without_a_file_is_prepared_from_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = hospitals(tmp_path)
    before = found.preprocessing(1)
    (found.folder / "preprocessing-1.json").unlink()
    monkeypatch.chdir(tmp_path)
    assert repr(fl.load(found.folder).preprocessing(1)) == repr(before)
    with (tmp_path / "sites" / "oslo.csv").open("a") as file:
        file.write("oslo-40,199,icu,2,dead\n")
    with pytest.raises(StoreError, match="The data has changed since this run began"):
        fl.load(found.folder).preprocessing(1)


def test_the_model_of_every_seed_predicts_without_the_data_of_the_run(tmp_path: Path) -> None:
    found = hospitals(tmp_path, "seeds = [1, 2, 3]\n" + EXPERIMENT)
    new = (tmp_path / "sites" / "berlin.csv").rename(tmp_path / "new.csv")
    shutil.rmtree(tmp_path / "sites")
    first = repr(found.preprocessing(1))
    loaded = fl.load(found.folder.rename(tmp_path / "moved"))
    for seed in (1, 2, 3):
        assert repr(loaded.preprocessing(seed)) == first
        assert len(rows(new, loaded.predictor("fedavg", seed))) == 40


class Given(nn.Module):
    """Returns its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_numbers_are_in_the_units_of_the_labels() -> None:
    made = Predictor(Given(), Preprocessing(shape=(1,), target=(10.0, 2.0)), torch.float32)
    assert predict(made, [[1.0], [-3.0]]) == {"prediction": [12.0, 4.0]}


def test_one_logit_is_the_probability_of_the_second_class() -> None:
    made = Predictor(Given(), Preprocessing(shape=(1,), classes=("no", "yes")), torch.float32)
    assert predict(made, [[0.0], [100.0]]) == {
        "prediction": ["no", "yes"],
        "probability no": [0.5, 0.0],
        "probability yes": [0.5, 1.0],
    }


def test_many_classes_have_one_probability_and_several_labels_a_column_each() -> None:
    many = Predictor(Given(), Preprocessing(shape=(60,), classes=tuple(map(str, range(60)))), torch.float32)
    assert predict(many, 100.0 * np.eye(60)[[7]]) == {"prediction": [7], "probability": [1.0]}
    two = Predictor(Given(), Preprocessing(shape=(2,), label=("a", "b")), torch.float32)
    assert predict(two, [[1.0, 2.0]]) == {"prediction a": [1.0], "prediction b": [2.0]}
    labels = Predictor(Given(), Preprocessing(shape=(2,), label=("a", "b")), torch.float32, has_logits=True)
    chosen = {"prediction a": [0], "prediction b": [1]}
    assert predict(labels, [[0.0, 100.0]]) == chosen | {"probability a": [0.5], "probability b": [1.0]}


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (("1", "2", "3"), [3, 1]),
        (("-1", "0", "10"), [10, -1]),
        (("1", "2", "x"), ["x", "1"]),
        (("01", "02", "03"), ["03", "01"]),
        (("0", "1", "9" * 19), ["9" * 19, "0"]),
        (("0.5", "1", "2"), ["2", "0.5"]),
    ],
)
def test_classes_that_are_whole_numbers_are_predicted_as_numbers(
    classes: tuple[str, ...], expected: list[Any], tmp_path: Path
) -> None:
    pandas = pytest.importorskip("pandas")
    columns = tuple(Column(name=name) for name in "abc")
    made = Predictor(Given(), Preprocessing(columns=columns, shape=(3,), classes=classes), torch.float32)
    scores = [[0.0, 0.0, 9.0], [9.0, 0.0, 0.0]]
    in_array, in_frame = predict(made, scores), predict(made, pandas.DataFrame(scores, columns=[*"abc"]))
    assert in_array["prediction"] == in_frame["prediction"].tolist() == expected
    assert (in_frame["prediction"] == pandas.Series(expected)).mean() == 1.0
    assert [*in_array][1:] == [*in_frame.columns][1:] == [f"probability {name}" for name in classes]
    (tmp_path / "new.csv").write_text("a,b,c\n0,0,9\n9,0,0\n")
    assert [str(row["prediction"]) for row in rows(tmp_path / "new.csv", made)] == [str(one) for one in expected]


def test_integers_are_scaled_as_in_training() -> None:
    made = Predictor(Given(), Preprocessing(shape=(2,), scale=0.5), torch.float64)
    assert made.prepared(torch.tensor([[3, 4]], dtype=torch.uint8)).tolist() == [[1.5, 2.0]]
    tokens = Predictor(Given(), Preprocessing(shape=(2,)), torch.float32).prepared(torch.tensor([[3, 4]]))
    assert (tokens.dtype, tokens.tolist()) == (torch.int64, [[3, 4]])


def test_arrays_that_do_not_fit_are_refused() -> None:
    made = Predictor(Given(), Preprocessing(shape=(2,)), torch.float32)
    with pytest.raises(InputError, match=r"array of shape \('n', 2\).*Got \(1, 3\)"):
        predict(made, [[1.0, 2.0, 3.0]])
    with pytest.raises(InputError, match=r"missing values \(nan\), and this model was trained without any"):
        predict(made, [[1.0, np.nan]])


@pytest.mark.parametrize("how", [torch.tensor, np.array, lambda rows: np.array(rows, object)])
def test_arrays_of_any_kind_give_the_same_answers(how: Any) -> None:
    made = Predictor(Given(), Preprocessing(shape=(2,)), torch.float32)
    expected = predict(made, [[1.5, 2.0], [3.0, 4.0]])
    array = how([[1.5, 2.0], [3.0, 4.0]])
    assert predict(made, array) == expected
    if isinstance(array, torch.Tensor):
        assert predict(made, array.requires_grad_()) == expected
    else:
        assert predict(made, array[::-1][::-1]) == expected
        assert predict(made, how([[3.0, 4.0], [1.5, 2.0]])[::-1]) == expected


def test_input_that_is_no_table_of_examples_is_explained() -> None:
    pandas = pytest.importorskip("pandas")
    made = Predictor(Given(), Preprocessing(columns=(Column(name="x"),), shape=(1,)), torch.float32)

    class Polars:
        columns = ("x",)

    for given, said in (
        (pandas.DataFrame({"x": []}), "no examples to predict"),
        (np.empty((0, 1)), "no examples to predict"),
        (pandas.DataFrame([[1, 2]], columns=["x", "x"]), "The frame has two columns 'x'"),
        (Path("new.csv"), r"pandas\.read_csv\(file\)\. Got Posix"),
        ("new.csv", "Got str"),
        ({"x": [1.0]}, "Got dict"),
        ([[1.0], [1.0, 2.0]], "Got list"),
        (pandas.Series(["a"]), "Got Series"),
        (pandas.Series([1.0]), r"Got \(1,\)"),
        (3.0, r"Got \(\)"),
        (Polars(), r"must be those of pandas\. Got tests\.Polars: convert it"),
    ):
        with pytest.raises(InputError, match=said):
            predict(made, given)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x\n", "has no examples"),
        ("z\n1\n", "lacks the column x"),
        ("x\n1\n?\n", r"Line 3 of .*new\.csv has '\?' in column 'x'.*This model takes no missing values"),
    ],
)
def test_files_that_do_not_fit_are_explained(tmp_path: Path, text: str, said: str) -> None:
    made = Predictor(Given(), Preprocessing(columns=(Column(name="x"),), shape=(1,)), torch.float32)
    (tmp_path / "new.csv").write_text(text)
    with pytest.raises(InputError, match=said):
        list(predict_file(made, tmp_path / "new.csv"))
    with pytest.raises(InputError, match="There is no file"):
        list(predict_file(made, tmp_path / "newer.csv"))


def test_rows_that_the_model_cannot_take_stay_empty_if_you_ask_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.data.csv_text.ROWS", 3)  # the last block has only bad rows
    fitted = Preprocessing(columns=(Column(name="ward", categories=("a", "b"), embedded=True),), shape=(1,))
    made, told, path = Predictor(Given(), fitted, torch.float32), list[str](), tmp_path / "new.csv"
    path.write_text("id,ward\n1,a\n2,c\n3,b\n4,d\n")
    with pytest.raises(InputError, match=r"Line 3 .* 'c' in column 'ward', .*\. No row is predicted: --skip-bad-rows"):
        list(predict_file(made, path))
    found = list(predict_file(made, path, told.append, skip_bad_rows=True))
    assert found == [["id", "prediction"], ["1", "0"], ["2", ""], ["3", "1"], ["4", ""]]
    (said,) = told
    first, *reasons = said.splitlines()
    assert first == "2 of 4 rows have no prediction:"
    assert [reason.partition(" has ")[0].strip() for reason in reasons] == [f"Line {line} of {path}" for line in (3, 5)]
    path.write_text("id,ward\n1,c\n")
    with pytest.raises(InputError, match=r"The model can take none of the first 1 rows\. The first: Line 2 of"):
        list(predict_file(made, path, skip_bad_rows=True))
    path.write_text("id\n1\n")
    with pytest.raises(InputError, match=r"The table lacks the column ward\.$"):
        list(predict_file(made, path, skip_bad_rows=True))


def test_cautions_are_not_about_rows_that_are_skipped(tmp_path: Path) -> None:
    columns, statistics = (Column(name="age"), Column(name="crp")), {"mean": (60, 5), "std": (1, 1), "missing": True}
    fitted = Preprocessing(columns=columns, marks={"": nan}, shape=(2,), label=("a", "b"), **statistics)
    made, told, path = Predictor(nn.Identity(), fitted, torch.float32), list[str](), tmp_path / "new.csv"
    path.write_text("age,crp\n999,\nold,7\n60,\n")
    list(predict_file(made, path, told.append, skip_bad_rows=True))
    assert told[0].startswith("crp is empty in all rows that are predicted: ")
    assert "in 1 of 2 rows that are predicted, such as 999" in told[1]
    path.write_text("age,crp\n60,\n60,\n")
    list(predict_file(made, path, told.append, skip_bad_rows=True))
    assert told[-1].startswith("crp is empty in all rows: ")


def test_rows_with_too_few_or_too_many_cells_stay_empty_if_you_ask_for_it(tmp_path: Path) -> None:
    made = Predictor(Given(), Preprocessing(columns=(Column(name="x"),), shape=(1,)), torch.float32)
    told, path = list[str](), tmp_path / "new.csv"
    path.write_text("id,x\n1,5\n2\n3,6,7\n4,8\n" + "".join(f"{line},?\n" for line in range(5, 11)))
    with pytest.raises(InputError, match=r"^Line 3 .* has 1 cells, but there are 2 columns\. .*--skip-bad-rows"):
        list(predict_file(made, path))
    found = list(predict_file(made, path, told.append, skip_bad_rows=True))
    assert found[:5] == [["id", "prediction"], ["1", "5"], ["2", ""], ["3", ""], ["4", "8"]]
    first, *reasons, more = told[0].splitlines()
    assert (first, len(reasons), more) == ("8 of 10 rows have no prediction:", 5, "  and 3 more")


def test_the_first_bad_line_is_named_whatever_its_column(tmp_path: Path) -> None:
    fitted = Preprocessing(columns=(Column(name="age"), Column(name="dose")), shape=(2,))
    made, path = Predictor(Given(), fitted, torch.float32), tmp_path / "new.csv"
    path.write_text("age,dose\n1,2\n1,?\n?,2\n1\n")
    with pytest.raises(InputError, match=r"^Line 3 .* in column 'dose'"):
        list(predict_file(made, path))


def test_a_point_beside_decimal_commas_is_a_bad_row_too(tmp_path: Path) -> None:
    made = Predictor(Given(), Preprocessing(columns=(Column(name="x"),), shape=(1,)), torch.float32)
    path = tmp_path / "new.csv"
    path.write_text("id;x\n1;3,5\n2;?\n3;1.234\n")
    found = list(predict_file(made, path, skip_bad_rows=True))
    assert found == [["id", "prediction"], ["1", "3.5"], ["2", ""], ["3", ""]]


def test_outputs_that_belong_to_no_class_have_their_own_probability(tmp_path: Path) -> None:
    columns = tuple(Column(name=name) for name in "abc")
    made = Predictor(
        nn.Identity(), Preprocessing(columns=columns, shape=(3,), classes=("alive", "dead")), torch.float32
    )
    told, path = list[str](), tmp_path / "new.csv"
    path.write_text("a,b,c\n1,0,2\n")
    header, row = predict_file(made, path, told.append)
    assert header == ["prediction", "probability alive", "probability dead", "probability of no class"]
    assert row[0] == "alive"
    assert sum(map(float, row[1:])) == pytest.approx(1, abs=1e-5)
    assert told == [
        "The model has more outputs than classes. What it gives to the others is in 'probability of no class'."
    ]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_a_file_that_says_its_encoding_is_read(tmp_path: Path, encoding: str) -> None:
    fitted = Preprocessing(columns=(Column(name="größe"),), shape=(1,))
    (tmp_path / "new.csv").write_text("größe\n2\n", encoding=encoding)
    made = Predictor(Given(), fitted, torch.float32)
    for given in (None, "latin-1", encoding):
        assert list(predict_file(made, tmp_path / "new.csv", encoding=given)) == [["prediction"], ["2"]]


def test_what_others_wrote_is_no_formula(tmp_path: Path) -> None:
    made = Predictor(Given(), Preprocessing(columns=(Column(name="x"),), shape=(1,)), torch.float32)
    (tmp_path / "new.csv").write_text("id,x\n=1+1,2\n")
    assert list(predict_file(made, tmp_path / "new.csv")) == [["id", "prediction"], ["'=1+1", "2"]]


def test_a_column_called_as_an_answer_is_kept_apart(tmp_path: Path) -> None:
    made = Predictor(Given(), Preprocessing(columns=(Column(name="x"),), shape=(1,)), torch.float32)
    (tmp_path / "new.csv").write_text("x,prediction\n1,old\n")
    assert rows(tmp_path / "new.csv", made) == [{"prediction (given)": "old", "prediction": "1"}]


def test_one_output_for_several_labels_is_the_prediction() -> None:
    risk = Predictor(Given(), Preprocessing(shape=(1,), label=("time", "event")), torch.float32)
    assert predict(risk, [[2.0]]) == {"prediction": [2.0]}


def test_values_far_from_the_training_data_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pandas = pytest.importorskip("pandas")
    columns = (Column(name="ward", categories=("a", "b")), Column(name="age"))
    fitted = Preprocessing(columns=columns, shape=(3,), mean=(0.5, 0.5, 60.0), std=(0.01, 0.01, 10.0))
    made, told = Predictor(Given(), fitted, torch.float32), list[str]()
    (tmp_path / "new.csv").write_text("ward,age\na,61\nb,6.1e7\n")
    list(predict_file(made, tmp_path / "new.csv", told.append))
    assert [said.split(" is ")[0] for said in told] == ["age"]  # categories are never far away
    predict(made, pandas.DataFrame({"ward": ["a"], "age": [6e7]}))
    assert "age is outside of what the model knows in 1 of 1 rows" in caplog.text


def test_a_file_that_is_not_utf_8_is_explained(tmp_path: Path) -> None:
    made = Predictor(Given(), Preprocessing(columns=(Column(name="x"),), shape=(1,)), torch.float32)
    (tmp_path / "new.csv").write_bytes("x,ä\n1,2\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"Save it as UTF-8.* --encoding latin-1"):
        list(predict_file(made, tmp_path / "new.csv"))
    assert list(predict_file(made, tmp_path / "new.csv", encoding="latin-1")) == [["ä", "prediction"], ["2", "1"]]


def test_an_excel_workbook_is_refused_with_how_to_save_it(tmp_path: Path) -> None:
    made = Predictor(Given(), Preprocessing(columns=(Column(name="x"),), shape=(1,)), torch.float32)
    (tmp_path / "new.xlsx").write_bytes(b"PK\x03\x04" + bytes(range(256)))
    with pytest.raises(InputError, match=r"^The file new\.xlsx is an Excel workbook .*: save the sheet as CSV"):
        list(predict_file(made, tmp_path / "new.xlsx"))


def test_cautions_are_about_all_rows_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.data.csv_text.ROWS", 2)
    columns = (Column(name="age"), Column(name="bmi"))
    marks = {"": nan}
    fitted = Preprocessing(columns=columns, shape=(2,), mean=(60.0, 25.0), std=(10.0, 4.0), marks=marks, missing=True)
    made, told = Predictor(Given(), fitted, torch.float32), list[str]()
    (tmp_path / "new.csv").write_text("age,bmi\n61,\n6e7,\n62,24\n7e7,25\n63,26\n")
    assert len(list(predict_file(made, tmp_path / "new.csv", told.append))) == 6
    (said,) = told  # bmi is empty in the first block only
    assert "age is outside of what the model knows in 2 of 5 rows" in said


def test_a_number_that_marks_a_missing_value_is_the_same_in_files_frames_and_arrays(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    columns = (Column(name="crp"), Column(name="stage", categories=("1", "2")))
    fitted = Preprocessing(
        columns=columns, shape=(3,), mean=(5.0, 0.0, 0.0), std=(2.0, 1.0, 1.0), marks={"-999": nan}, missing=True
    )
    made, path = Predictor(Given(), fitted, torch.float32), tmp_path / "new.csv"
    path.write_text("crp,stage\n-999,1\n-999.0,-999.0\n7.5,2\n")
    in_file = [[float(one[f"prediction {place}"]) for place in range(3)] for one in rows(path, made)]
    assert in_file == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.25, 0.0, 1.0]]
    assert predict(made, pandas.read_csv(path)).to_numpy().tolist() == in_file
    array = np.array([[-999.0, 1.0, 0.0], [-999.0, nan, nan], [7.5, 0.0, 1.0]])
    assert np.column_stack([*predict(made, array).values()]).tolist() == in_file


def test_an_empty_row_is_told() -> None:
    columns = (Column(name="age"), Column(name="ward", categories=("a", "b")))
    fitted = Preprocessing(columns=columns, missing=True, shape=(3,), mean=(60, 0, 0), std=(10, 1, 1))
    made = Predictor(nn.Identity(), fitted, torch.float32)
    (said,) = made.cautions(torch.tensor([[50.0, nan, nan], [nan, nan, nan], [nan, 1.0, 0.0]]))
    assert said.startswith("1 of 3 rows are empty: ")


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        ({"": nan, "?": nan}, "leave the cell empty if the value is missing"),
        ({"-999": nan}, "write -999 if the value is missing"),
        ({"": 0.0}, r"This model takes numbers there\. No row"),
    ],
)
@pytest.mark.parametrize("cell", ["NA", "nan"])
def test_a_text_for_a_missing_value_is_explained(tmp_path: Path, marks: dict[str, float], said: str, cell: str) -> None:
    made = Predictor(Given(), Preprocessing(columns=(Column(name="x"),), shape=(1,), marks=marks), torch.float32)
    (tmp_path / "new.csv").write_text(f"x\n1\n{cell}\n")
    with pytest.raises(InputError, match=f"Line 3 of .*has '{cell}' in column 'x'.*{said}"):
        list(predict_file(made, tmp_path / "new.csv"))


@pytest.mark.parametrize(
    ("marks", "embedded", "said"),
    [
        ({"": nan}, False, r"whose categories are icu, er\. If the value is missing, leave the cell empty\. No row"),
        ({"": 0.0}, False, r"If the value is missing, leave the cell empty\. No row"),
        ({"-999": nan}, False, r"If the value is missing, write -999\. No row"),
        ({}, False, r"whose categories are icu, er\. No row"),
        ({"": nan}, True, r"whose categories are icu, er\. No row"),
    ],
)
def test_a_text_for_a_missing_category_is_explained(
    tmp_path: Path, marks: dict[str, float], embedded: bool, said: str
) -> None:
    column = Column(name="ward", categories=("icu", "er"), embedded=embedded)
    made = Predictor(Given(), Preprocessing(columns=(column,), shape=(2,), marks=marks), torch.float32)
    (tmp_path / "new.csv").write_text("ward\ner\nNA\n")
    with pytest.raises(InputError, match=f"Line 3 of .*has 'NA' in column 'ward'.*{said}"):
        list(predict_file(made, tmp_path / "new.csv"))


def test_a_threshold_moves_the_probability_from_which_a_class_is_predicted(result: Result) -> None:
    predictor = result.predictor("fedavg")
    first, second = predictor.preprocessing.classes
    x = predictor.mean + predictor.std * torch.linspace(-1, 1, 51)[:, None]
    probabilities = predictor.answer(x)[f"probability {second}"]
    often = float(np.median(probabilities))
    moved = predictor.with_threshold(often).answer(x)["prediction"]
    assert moved == [second if p >= often else first for p in probabilities]
    assert len({*moved}) == 2
    with pytest.raises(InputError, match=r"The threshold is a probability between 0 and 1\. Got 20"):
        predictor.with_threshold(20)


@pytest.mark.parametrize("reach", [None, ((-3.0, -4.0), (4.0, 4.0))])
def test_a_column_in_another_unit_is_told_once_about_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reach: Any
) -> None:
    """Centimetres where the model takes millimetres: no block of the file has enough rows, and each value may be."""
    pandas = pytest.importorskip("pandas")
    monkeypatch.setattr("fedloom.data.csv_text.ROWS", 6)
    columns = (Column(name="tsize"), Column(name="age"))
    fitted = Preprocessing(columns=columns, shape=(2,), mean=(29.3, 53.0), std=(14.0, 10.0), reach=reach)
    made, told = Predictor(Given(), fitted, torch.float32), list[str]()
    draw = np.random.default_rng(0)
    frame = pandas.DataFrame({"tsize": draw.gamma(4.0, 0.73, 20).round(1), "age": draw.normal(53, 10, 20).round()})
    frame.to_csv(tmp_path / "new.csv", index=False)
    list(predict_file(made, tmp_path / "new.csv", told.append))
    (said,) = told
    assert said.startswith("tsize is about ")
    assert said.endswith("trained on 29.3 ± 14): another unit?")
    predict(made, frame)
    assert said in caplog.text
    caplog.clear()
    predict(made, frame.assign(tsize=frame.tsize * 10))
    assert not caplog.text


def test_with_bounds_nothing_is_said_of_means() -> None:
    columns = (Column(name="age"), Column(name="crp"), Column(name="dose"))
    fitted = Preprocessing(columns=columns, missing=True, shape=(3,), mean=(50.0, 1000.0, 0.0), std=(50.0, 1000.0, 1.0))
    fitted = fitted.replace(bounds={"age": (0.0, 100.0), "crp": (0.0, 2000.0)})
    x = torch.tensor([[30.0, nan, nan]] * 11 + [[130.0, nan, nan]])
    assert Predictor(nn.Identity(), fitted, torch.float32).cautions(x) == [
        "crp is empty in all rows: the model takes the middle of its bounds.",
        "dose is empty in all rows: the model takes 0.",
        "age is beyond its bounds, 0 to 100, in 1 of 12 rows.",
    ]
    small = torch.tensor([[30.0, 5.0 + row, 1.0] for row in range(12)])  # far below the middle of its bounds
    assert Predictor(nn.Identity(), fitted, torch.float32).cautions(small) == []
