from __future__ import annotations

import bz2
import gzip
import lzma
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.data.build import federate
from fedloom.data.plausibility import suspicions
from fedloom.data.sources import source
from fedloom.data.sources.csv import PERSON
from fedloom.errors import InputError
from tests.data.sources.loading import load

TABLE = "Class,User,X0,Y0\n1,b,0.5,?\n2,a,1,2\n\n1,b,-3e2, 4 \n"


def table(folder: Path, text: str = TABLE, name: str = "data.csv") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_a_table_with_clients_and_marks_for_missing_values(tmp_path: Path) -> None:
    table(tmp_path)
    data = load("csv", tmp_path, path="data.csv", label="Class", client="User", missing={"?": 0})
    assert data.x.dtype == torch.float32
    assert data.x.tolist() == [[0.5, 0.0], [1.0, 2.0], [-300.0, 4.0]]
    assert (data.y.tolist(), data.classes) == ([0, 1, 0], ("1", "2"))
    assert data.client is not None
    assert data.client.tolist() == ["b", "a", "b"]
    assert data.features == ("X0", "Y0")


def test_one_error_names_all_columns_that_are_not_numbers(tmp_path: Path) -> None:
    table(tmp_path, "y,id,age,sex,admitted\n1,P1,30,m,2026-11-17\n0,P2,,f,2026-11-18\n")
    said = (
        r"'P1' in column 'id'.*that are not numbers: age \(empty cells: fill = .*\); sex \(.*categorical = .*\); "
        r"admitted \(dates: .*drop = \[\"admitted\"\]\)\.$"
    )
    with pytest.raises(InputError, match=said):
        load("csv", tmp_path, path="data.csv", label="y")
    decimals = table(tmp_path, "y;id;crp;bnp\n1;P1;3,5;1\n0;P2;;2,5\n1;P3;3;1.5\n", "decimals.csv")
    with pytest.raises(InputError, match=r"crp \(empty cells: .*\); bnp \(numbers with points and commas\)\.$"):
        load("csv", path=decimals, label="y")
    with pytest.raises(InputError, match=r"looks like a date.*drop = \[\"admitted\"\]\.$"):  # alone, without a list
        load("csv", tmp_path, path="data.csv", label="y", drop=["id"], fill=0, categorical=["sex"])


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)])
def test_packed_tables(tmp_path: Path, suffix: str, pack: Any) -> None:
    (tmp_path / f"data.csv{suffix}").write_bytes(pack(TABLE.encode()))
    data = load("csv", tmp_path, path=f"data.csv{suffix}", label="Class", drop=["User"], missing={"?": -1})
    assert data.x[0].tolist() == [0.5, -1.0]
    (tmp_path / f"data.csv{suffix}").write_bytes(pack(TABLE.encode())[:-5])
    with pytest.raises(InputError, match="cannot be read as CSV"):
        load("csv", tmp_path, path=f"data.csv{suffix}", label="Class", drop=["User"], missing={"?": -1})


def test_an_umlaut_may_be_two_characters(tmp_path: Path) -> None:
    text = "bo\u0308,kla\u0308r,kü,x,y\na\u0308,ü,ö,1,u\u0308\nä,u\u0308,o\u0308,2,ü\n"
    fields: dict[str, Any] = {"path": table(tmp_path, text), "missing": {"u\u0308": 7}, "drop": ["y"]}
    data = load("csv", label="kla\u0308r", client="bö", categorical=["ku\u0308"], **fields | {"missing": {}})
    assert (data.classes, data.features) == (("ü",), ("kü=ö", "x"))
    assert data.client is not None
    assert data.client.tolist() == ["ä", "ä"]
    data = load("csv", label="x", group="bo\u0308", categorical={"kü": ["o\u0308"]}, **fields | {"drop": ["klär"]})
    assert data.x.tolist() == [[1.0, 7.0], [1.0, 7.0]]


def test_text_labels_become_sorted_classes(tmp_path: Path) -> None:
    data = load("csv", path=table(tmp_path, "x,kind\n1,dog\n2, cat \n3,dog\n"), label="kind")
    assert (data.y.tolist(), data.classes, data.client) == ([1, 0, 1], ("cat", "dog"), None)


def test_a_regression_in_a_table(tmp_path: Path) -> None:
    path = table(tmp_path, "x,price\n1,10\n2,20\n")
    assert load("csv", path=path, label="price", task="regression").y.tolist() == [10.0, 20.0]
    assert load("csv", path=path, label="price").classes == ("10", "20")


@pytest.mark.parametrize(("fill", "value"), [("zero", 0.0), (7, 7.0), (-0.5, -0.5)])
def test_empty_cells_are_filled_if_asked(tmp_path: Path, fill: Any, value: float) -> None:
    path = table(tmp_path, "x,z,y\n1,,0\n2, ,1\n")
    assert load("csv", path=path, label="y", fill=fill).x[:, 1].tolist() == [value, value]


def test_empty_cells_and_marks_can_be_left_to_normalisation(tmp_path: Path) -> None:
    path = table(tmp_path, "x,z,y\n1,,0\n3, ? ,1\n,7,1\n")
    data = load("csv", path=path, label="y", fill="mean", missing={"?": float("nan")})
    assert data.missing
    assert federate(data, clients=1, split=(1, 0, 0), normalize="federated").x.tolist() == [[-1, 0], [1, 0], [0, 0]]
    assert not load("csv", path=path, label="y", fill="zero", missing={"?": 1}).missing
    with pytest.raises(InputError, match=r"Line 3 of .* has ' \? ' in column 'z'"):
        load("csv", path=path, label="y", fill="mean")
    with pytest.raises(InputError, match=r"Line 2 of .* has 'nan' in column 'x'"):
        load("csv", path=table(tmp_path, "x,y\nnan,0\n"), label="y", fill="mean")


def test_columns_delimiter_and_lines_to_skip(tmp_path: Path) -> None:
    path = table(tmp_path, "0;0;0\n1;5;0\n2;6;1\n")
    data = load("csv", path=path, label="y", columns=["a", "b", "y"], delimiter=";", skip=1)
    assert (data.x.tolist(), data.features) == ([[1.0, 5.0], [2.0, 6.0]], ("a", "b"))


def test_a_byte_order_mark_and_quotes(tmp_path: Path) -> None:
    path = table(tmp_path, '\ufeffx,"y, really"\n"1",0\n2,1\n')
    assert load("csv", path=path, label="y, really").features == ("x",)


def test_long_tables_are_read_in_blocks(tmp_path: Path) -> None:
    rows = "".join(f"{number},{number % 3}\n" for number in range(20_000))
    data = load("csv", path=table(tmp_path, "x,y\n" + rows), label="y")
    assert data.x.flatten().tolist() == list(range(20_000))
    with pytest.raises(InputError, match=r"Line 20002 of .*data\.csv has 'oops' in column 'x'"):
        load("csv", path=table(tmp_path, "x,y\n" + rows + "oops,1\n"), label="y")


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        (
            TABLE,
            {"client": "User"},
            r"Line 2 of .* has '\?' in column 'Y0'.*missing = \{ \"\?\" = nan \}.*drop = \[\"Y0\"\]",
        ),
        (TABLE, {"missing": {"?": 0}}, r"Line 2 of .* has 'b' in column 'User'.*drop = \[\"User\"\]"),
        (TABLE, {"label": "Klass"}, r"no column 'Klass'. It has: Class, User, X0, Y0\. Did you mean 'Class'"),
        (TABLE, {"client": "user"}, "no column 'user'.*Did you mean 'User'"),
        (TABLE, {"drop": ["Users"]}, "no column 'Users'.*Did you mean 'User'"),
        (TABLE, {"drop": ["User", "X0", "Y0"]}, "no feature columns besides Class, User, X0, Y0"),
        ("Class,a\n1,\n", {}, "Line 2 of .* has an empty cell in column 'a'.*fill = \"mean\" beside"),
        ("Class,a\n1,nan\n", {}, "Line 2 of .* has 'nan' in column 'a', which is not a finite number"),
        ("Class,a\n1,1e999\n", {}, "Line 2 of .* has '1e999' in column 'a'"),
        ("Class,a\n1,1e39\n", {}, "Line 2 of .* has '1e39' in column 'a'"),
        ("Class,a\n1,2\n\n,2\n", {}, "Line 4 of .* has an empty cell in column 'Class': every example needs"),
        (
            "Class,a\n1,NA\nNA,2\n",
            {"missing": {"NA": float("nan")}},
            "Line 3 of .* has 'NA', which means a missing value, in column 'Class': every example needs its label",
        ),
        ("Class,a\n1,NA\n", {}, r'missing = { "NA" = nan } beside normalize'),
        ("Class,u,a\n1,,2\n", {"client": "u"}, "Line 2 of .* has an empty cell in column 'u'"),
        ("Class,a\n1,2\n1,2,3\n", {}, "Line 3 of .* has 3 cells, but there are 2 columns"),
        ("Class,a,a\n1,2,3\n", {}, "two columns 'a'"),
        ("Class,a\n", {}, "has no examples"),
        ("", {}, "The file .* is empty"),
    ],
)
def test_wrong_tables_are_explained(tmp_path: Path, text: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load("csv", path=table(tmp_path, text), **{"label": "Class", **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fill": "median"}, "'fill' parameter of Csv must be 'error', 'zero' or 'mean' or a number. Got 'median'"),
        ({"missing": 3}, "'missing' parameter of Csv must be a table"),
        ({"task": "clustering"}, "'task' parameter of Csv must be 'auto', 'classification' or 'regression'"),
        ({"delimiter": ""}, "'delimiter' parameter of Csv"),
        ({"skip": -1}, "'skip' parameter of Csv must be at least 0"),
    ],
)
def test_wrong_csv_fields_are_explained(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        source("csv")(path="a.csv", label="y", **fields)


def test_a_table_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_bytes("Größe,y\n1,2\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"cannot be read as CSV: .*utf-8.*Save it as UTF-8"):
        load("csv", tmp_path, path="data.csv", label="y")


@pytest.mark.parametrize("encoding", [None, "latin-1"])
@pytest.mark.parametrize("name", ["real.xlsx", "real.csv"])
@pytest.mark.parametrize("first", [b"PK\x03\x04", b"\xd0\xcf\x11\xe0"])
def test_an_excel_workbook_is_recognised_by_its_content(
    tmp_path: Path, first: bytes, name: str, encoding: str | None
) -> None:
    (tmp_path / name).write_bytes(first + bytes(range(256)))
    with pytest.raises(InputError, match=rf"{name} is an Excel workbook.*: save the sheet as CSV .*give that file"):
        load("csv", tmp_path, path=name, label="y", encoding=encoding)


def test_pandas_and_pyplot_are_not_imported(tmp_path: Path) -> None:
    path = table(tmp_path)
    code = f"""
import sys
from pathlib import Path
from fedloom.data.build import federate
from fedloom.data.plausibility import suspicions
from fedloom.data.figure import plot
from fedloom.data.sources import source
from fedloom.data.sources.csv import PERSON
data = source("csv")(path={str(path)!r}, label="Class", client="User", missing={{"?": 0}}).load(Path())
plot(federate(data), {str(tmp_path / "picture.png")!r})
print([name for name in ("pandas", "matplotlib.pyplot") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.data
def test_real_heart_disease(real: Path) -> None:
    fields = {"path": "heart_disease/heart_disease_4sites.csv", "label": "num", "client": "site"}
    federation = federate(load("csv", real, **fields, fill="mean"), normalize="federated")
    assert np.diff(federation.offsets).tolist() == [303, 294, 123, 200]
    with pytest.raises(InputError, match="has an empty cell in column"):
        load("csv", real, **fields)


def test_a_folder_has_a_file_for_each_client(tmp_path: Path) -> None:
    table(tmp_path, "locked by Excel", "~$berlin.csv")
    table(tmp_path, "age;crp;dead\n70;3,5;yes\n50;1;no\n", "berlin.csv")
    table(tmp_path, "age,crp,dead\n30,2.5,no\n", "oslo.csv")
    table(tmp_path, "not a table", "notes.txt")
    data = load("csv", path=tmp_path, label="dead")
    assert data.client is not None
    assert (data.client.tolist(), data.classes) == (["berlin", "berlin", "oslo"], ("no", "yes"))
    assert data.x.tolist() == [[70.0, 3.5], [50.0, 1.0], [30.0, 2.5]]
    assert re.fullmatch(r"In the folder .*\. Left out: notes\.txt\.", data.cautions[0])


def test_copies_in_a_folder_are_left_out_and_named(tmp_path: Path) -> None:
    for name in ("köln.csv", "köln.csv.bak", "köln.csv~", "OSLO.CSV", "lyon.tsv"):
        table(tmp_path, f"age\tdead\n{ord(name[0])}\t1\n", name)
    data = load("csv", path=tmp_path, label="dead")
    assert data.client is not None
    assert sorted(data.client.tolist()) == ["OSLO", "köln", "lyon"]
    assert data.cautions[0].endswith("Left out: köln.csv.bak, köln.csv~.")
    assert data.cautions[0] in suspicions(federate(data))


def test_a_column_that_only_some_files_of_a_folder_have_can_be_left_out(tmp_path: Path) -> None:
    table(tmp_path, "age,crp,patient_id,dead\n1,2,7,1\n", "a.csv")
    table(tmp_path, "age,dead\n3,0\n", "b.csv")
    found = load("csv", path=tmp_path, label="dead", drop=("crp", "patient_id"))
    assert found.features == ("age",)
    assert found.x.tolist() == [[1.0], [3.0]]


def test_a_copy_of_a_file_is_named(tmp_path: Path) -> None:
    for name in ("porto.csv", "porto (1).csv", "lyon.csv"):
        table(tmp_path, f"age,dead\n{len(name.split()[0])},0\n" if name == "lyon.csv" else "age,dead\n9,1\n", name)
    said = [one for one in load("csv", path=tmp_path, label="dead").cautions if "copy" in one]
    assert said == [
        "porto.csv is a copy of porto (1).csv and counts as another client: keep one of them in the folder."
    ]


@pytest.mark.parametrize("other", ["köln.tsv", "köln.csv.gz", "ko\u0308ln.csv"])
def test_two_files_of_a_client_are_refused(tmp_path: Path, other: str) -> None:
    for name in ("köln.csv", other):
        table(tmp_path, "age,dead\n70,1\n", name)
    with pytest.raises(InputError, match=f"(?=.*köln\\.csv)(?=.*{re.escape(other)}).*would both be the client köln"):
        load("csv", path=tmp_path, label="dead")


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("age,dead\n1,0\n", {}, r"b\.csv has no column 'crp', and .*a\.csv has one.*drop = \[\"crp\"\]"),
        ("age,CRP,dead\n1,1,0\n", {}, r"a\.csv has no column 'CRP', and .*b\.csv has one.*Did you mean 'crp'"),
        ("age,crp,dead\n1,1,0\n", {"drop": ("cpr",)}, "The folder .* has no column 'cpr'.*Did you mean 'crp'"),
        ("age,crp,dead\n1,x,0\n", {}, r"Line 2 of .*b\.csv has 'x' in column 'crp'"),
        ("age,crp,dead\n1,1,0\n", {"client": "age"}, "leave out client = 'age'"),
        ("age,crp,dead\n2,1,0\n", {"categorical": {"age": ["1"]}}, r"Line 2 of .*b\.csv has '2' in column 'age'"),
    ],
)
def test_files_of_a_folder_that_do_not_fit_are_named(
    tmp_path: Path, text: str, fields: dict[str, Any], message: str
) -> None:
    table(tmp_path, "age,crp,dead\n1,2,1\n", "a.csv")
    table(tmp_path, text, "b.csv")
    with pytest.raises(InputError, match=message):
        load("csv", path=tmp_path, label="dead", **fields)


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        ({}, "It is empty"),
        (
            {"a.xlsx": b"PK\x03\x04", "b.xlsx": b"PK\x03\x04"},
            r"has a\.xlsx, b\.xlsx\. The file a\.xlsx is an Excel workb",
        ),
        ({"notes.txt": b"", "old.xls": b"\xd0\xcf\x11\xe0"}, r"old\.xls is an Excel workbook: save the sheet as CSV"),
        ({f"{n}.parquet": b"PAR1" for n in range(7)}, r"4\.parquet and 2 more\. Save each table as CSV"),
        ({"berlin/a.csv": b"y\n1\n"}, r"It has berlin/\. Name one of its folders"),
    ],
)
def test_a_folder_without_tables_is_refused_with_what_it_has(
    tmp_path: Path, files: dict[str, bytes], advice: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"has no CSV files: it needs one for each client.*{advice}"):
        load("csv", path=tmp_path, label="y")


WARDS = "ward,age,smoker,y\nicu,1,no,0\nsurgery,2,,1\n"


def test_categories_become_features_in_place(tmp_path: Path) -> None:
    path = table(tmp_path, WARDS)
    data = load("csv", path=path, label="y", categorical=["ward", "smoker"], fill="zero")
    assert data.features == ("ward=icu", "ward=surgery", "age", "smoker=no")
    assert data.x.tolist() == [[1, 0, 1, 1], [0, 1, 2, 0]]
    embedded = load("csv", path=path, label="y", categorical=["ward", "smoker"], embed=["ward"], fill="mean")
    assert embedded.features == ("ward", "age", "smoker=no")
    assert embedded.x[0].tolist() == [0, 1, 1]
    assert bool(embedded.x[1].isnan()[2])


def test_listed_categories_that_are_numbers_may_have_zeros_in_front(tmp_path: Path) -> None:
    path = table(tmp_path, "ward,y\n02,0\n01,1\n")
    assert load("csv", path=path, label="y", categorical={"ward": ["01", "02"]}).x.tolist() == [[0, 1], [1, 0]]


def test_a_number_that_marks_missing_features_may_be_a_label(tmp_path: Path) -> None:
    data = load("csv", path=table(tmp_path, "weight,y\n0,0\n5,1\n"), label="y", missing={"0": float("nan")})
    assert (data.y.tolist(), bool(data.x[0].isnan())) == ([0, 1], True)


def test_an_embedded_category_is_not_normalised(tmp_path: Path) -> None:
    data = load("csv", path=table(tmp_path, WARDS), label="y", categorical=["ward"], embed=["ward"], drop=["smoker"])
    made = federate(data, clients=1, split=(1, 0, 0), normalize="federated")
    assert made.x.tolist() == [[0, -1], [1, 1]]
    assert (made.preprocessing.mean, made.preprocessing.std) == ((0.0, 1.5), (1.0, 0.5))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"categorical": ["wards"]}, "no column 'wards'.*Did you mean 'ward'"),
        ({"categorical": ["y"]}, "The column 'y' is in 'categorical', and it is not a feature"),
        ({"drop": ["y"]}, "The column 'y' is in 'drop', and it is the label"),
        ({"categorical": ["ward"], "embed": ["age"]}, "'categorical' has no column 'age'"),
        ({"categorical": {"ward": ["icu"], "smoker": ["no"]}}, "Line 3 of .* has 'surgery' in column 'ward'"),
        ({"categorical": ["ward"]}, "an empty cell|'no' in column 'smoker'.*looks like yes or no"),
        (
            {"categorical": ["smoker", "ward"], "fill": "error"},
            r"Line 3 of .* has an empty cell in column 'smoker'\. Set fill",
        ),
    ],
)
def test_wrong_categories_are_explained(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load("csv", path=table(tmp_path, WARDS), label="y", **fields)


def test_a_column_says_the_splits(tmp_path: Path) -> None:
    path = table(tmp_path, "x,y,set\n1,0,test\n2,1,train\n3,0,Train\n4,1,val\n5,0,train\n")
    made = federate(load("csv", path=path, label="y", split_column="set"), clients=1)
    parts = {split: made.x[made.indices(0, split)].flatten().tolist() for split in ("train", "validation", "test")}
    assert parts == {"train": [2, 3, 5], "validation": [4], "test": [1]}
    table(tmp_path, "x,y,set\n1,0,tset\n")
    with pytest.raises(
        InputError, match=r"Line 2 of .* has 'tset' in column 'set', which must say train, validation, t"
    ):
        load("csv", path=path, label="y", split_column="set")


def test_several_label_columns_are_numbers(tmp_path: Path) -> None:
    data = load("csv", path=table(tmp_path, "x,a,b\n1,0,1\n2,1,1\n"), label=["a", "b"])
    assert (data.y.tolist(), data.classes, data.features) == ([[0, 1], [1, 1]], (), ("x",))


def test_labels_with_decimal_commas_are_numbers(tmp_path: Path) -> None:
    assert load("csv", path=table(tmp_path, "x;y\n1;2,5\n"), label="y").y.tolist() == [2.5]


def test_files_may_have_their_columns_in_another_order(tmp_path: Path) -> None:
    table(tmp_path, "age,ward,crp,dead\n70,a,3.5,yes\n", "berlin.csv")
    table(tmp_path, "dead,crp,ward,age\nno,2.5,b,30\n", "oslo.csv")
    data = load("csv", path=tmp_path, label="dead", categorical=["ward"])
    assert data.features == ("age", "ward=a", "ward=b", "crp")
    assert data.x.tolist() == [[70.0, 1.0, 0.0, 3.5], [30.0, 0.0, 1.0, 2.5]]


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16-le"])
def test_a_file_in_another_encoding_is_read_if_it_is_named(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "data.csv").write_bytes("ward,y\nMüller,0\nx,1\n".encode(encoding))
    with pytest.raises(InputError, match=r"cannot be read as CSV.*, or set encoding"):
        load("csv", path=tmp_path / "data.csv", label="y", categorical=["ward"])
    found = load("csv", path=tmp_path / "data.csv", label="y", categorical=["ward"], encoding=encoding)
    assert found.features == ("ward=Müller", "ward=x")
    (tmp_path / "data.csv").write_text("ward,y\na,0\n")
    with pytest.raises(InputError, match=r"cannot be read as CSV.*, or set encoding"):
        load("csv", path=tmp_path / "data.csv", label="y", categorical=["ward"], encoding="utf-16")


@pytest.mark.parametrize("one_byte", ["latin-1", "cp1252"])
def test_an_encoding_for_one_file_does_not_garble_those_in_utf_8(tmp_path: Path, one_byte: str) -> None:
    text = "größe,ward,y\n1,Gynäkologie,0\n2,Innere,1\n"
    for name, encoding in (("a", one_byte), ("b", "utf-8"), ("c", "utf-8-sig")):
        (tmp_path / f"{name}.csv").write_bytes(text.encode(encoding))
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress(text.encode()))
    found = load("csv", path=tmp_path, label="y", categorical=["ward"], encoding=one_byte)
    assert found.features == ("größe", "ward=Gynäkologie", "ward=Innere")


def test_an_unknown_encoding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="encoding = 'latin-99' is not known"):
        load("csv", path=tmp_path / "data.csv", label="y", encoding="latin-99")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("patient_id", "MRN", "Fallnr", "Fall-Nr.", "fall_id", "case", "CaseID", "visit", "patientennr"), True),
        (("Aufnahmenummer", "study_case", "hospital visit", "pid"), True),
        (("rainfall", "falls", "visits", "showcase", "bid", "number", "ward"), False),
    ],
)
def test_columns_that_may_say_whose_a_row_is_are_known_by_name(names: tuple[str, ...], found: bool) -> None:
    assert {name: bool(PERSON.search(name)) for name in names} == dict.fromkeys(names, found)


def cautions(folder: Path, rows: list[tuple[object, ...]], header: str, **keys: Any) -> str:
    table(folder, f"{header}\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return " ".join(load("csv", folder, path="data.csv", label="y", **keys).cautions)


def test_a_number_that_identifies_a_patient_is_named_with_what_to_do(tmp_path: Path) -> None:
    visits = [(20_000 + 7 * (at // 2), 30 + at % 40, at % 2) for at in range(80)]
    said = cautions(tmp_path, visits, "patient_id,patient_age,y")
    assert said.startswith(
        "patient_id looks like an identifier and is a feature: 40 different whole numbers in 80 rows"
    )
    assert 'drop = ["patient_id"]. If rows with the same one belong together, set group = "patient_id"' in said
    assert "patient_age" not in cautions(tmp_path, visits, "patient_id,patient_age,y", drop=["patient_id"])
    numbered = [(at + 1000 * (at >= 40), at * 0.5, at % 2) for at in range(80)]  # as two sites number their rows
    assert cautions(tmp_path, numbered, "code,x,y").startswith("code looks like an identifier")
    spread = [(at * at, at * 0.5, at % 2) for at in range(80)]
    assert cautions(tmp_path, spread, "platelets,x,y") == ""


def test_a_column_with_a_category_for_nearly_every_row_is_named(tmp_path: Path) -> None:
    days = [(f"2024-{1 + at % 12:02}-{1 + at // 12:02}", at, at % 2) for at in range(60)]
    said = cautions(tmp_path, days, "day,x,y", categorical=["day"])
    assert 'day has 60 categories, which look like dates: leave it out with drop = ["day"], or use what' in said
    names = [(f"n{at}" if at < 40 else "other", at, at % 2) for at in range(60)]
    said = cautions(tmp_path, names, "name,x,y", categorical=["name"])
    assert 'name has 41 categories, and 40 of them have one row: leave it out with drop = ["name"]' in said
    wards = [(f"n{at % 25}", at, at % 2) for at in range(60)]
    assert cautions(tmp_path, wards, "ward,x,y", categorical=["ward"]) == ""


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_a_file_that_begins_with_the_mark_of_its_encoding_is_read(tmp_path: Path, encoding: str, ending: str) -> None:
    content = "größe,y\n1,0\n2,1\n".encode(encoding)
    (tmp_path / f"data.csv{ending}").write_bytes(gzip.compress(content) if ending else content)
    for given in (None, "latin-1", f"{encoding}-le"):
        loaded = load("csv", path=tmp_path / f"data.csv{ending}", label="y", encoding=given)
        assert (loaded.features, loaded.x.tolist()) == (("größe",), [[1.0], [2.0]])


@pytest.mark.parametrize(("platelets", "refused"), [(("1.576", "935"), True), (("0.576", "1.25"), False)])
def test_a_point_beside_decimal_commas_may_be_one_of_thousands(
    tmp_path: Path, platelets: tuple[str, str], refused: bool
) -> None:
    rows = "".join(f"26,{row % 10};{platelets[row % 2]};{row % 2}\n" for row in range(8))
    table(tmp_path, f"crp;platelets;y\n{rows}")
    said = r"Line 2 of .* has '1\.576' in column 'platelets', .* Write 1,576 if .* or 1576 if it is between thousands"
    with pytest.raises(InputError, match=said) if refused else nullcontext():
        load("csv", tmp_path, path="data.csv", label="y")
