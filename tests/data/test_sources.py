from __future__ import annotations

import bz2
import gzip
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.data.build import federate
from fedloom.data.federation import Dataset
from fedloom.data.sources import SOURCES, source
from fedloom.data.sources.base import cache, encode, targets
from fedloom.data.sources.idx import FILES
from fedloom.errors import InputError


def load(name: str, base: Path = Path(), **fields: Any) -> Dataset:
    return source(name)(**fields).load(base)


# The registry


def test_unknown_sources_are_explained() -> None:
    with pytest.raises(InputError, match=r"There is no source 'digit'.*Did you mean 'digits'"):
        source("digit")


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_unknown_fields_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="no parameter 'colour'"):
        source(name)(
            colour="red", **({"path": "a"} if name != "digits" else {}), **({"label": "b"} if name == "csv" else {})
        )


def test_labels_are_numbered_in_order() -> None:
    assert encode(["dog", "cat", "dog"])[1] == ("cat", "dog")
    codes, classes = encode(["10", "9.0", "9"])
    assert (codes.tolist(), classes) == ([1, 0, 0], ("9", "10"))


def test_the_task_is_guessed_from_the_labels() -> None:
    assert targets(["1", "5"], "auto")[1] == ("1", "5")
    assert targets(["1", "5.5"], "auto")[1] == ()
    assert targets(["1", "5"], "regression")[0].tolist() == [1.0, 5.0]
    assert targets(["0.5", "1.5", "0.5"], "classification")[0].tolist() == [0, 1, 0]
    with pytest.raises(InputError, match="labels of a regression must be numbers"):
        targets(["a", "b"], "regression")
    with pytest.raises(InputError, match="label of example 1 is nan"):
        targets(["1", "nan"], "classification")
    with pytest.raises(InputError, match=r"one list, one per example. Got an array of shape \(2, 2\)"):
        targets(np.zeros((2, 2)), "classification")


# digits


def test_digits_are_bytes_with_a_scale() -> None:
    data = load("digits")
    assert (data.x.shape, data.x.dtype, data.scale) == ((1797, 64), torch.uint8, 1 / 16)
    assert data.x.max() == 16
    assert data.classes == tuple("0123456789")
    assert data.y.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    image = load("digits", image=True)
    assert image.x.shape == (1797, 1, 8, 8)
    assert image.x.reshape(1797, 64).equal(data.x)


# mnist and fashion_mnist


def idx(values: Any) -> bytes:
    array = np.asarray(values, dtype=np.uint8)
    header = bytes([0, 0, 8, array.ndim]) + b"".join(side.to_bytes(4, "big") for side in array.shape)
    return header + array.tobytes()


def write_mnist(folder: Path, rename: Any = lambda name: name, pack: Any = lambda raw: raw) -> None:
    folder.mkdir(exist_ok=True)
    contents = [np.arange(60).reshape(5, 3, 4), [0, 1, 2, 3, 9], np.arange(24).reshape(2, 3, 4), [4, 5]]
    for name, content in zip(FILES, contents, strict=True):
        (folder / rename(name)).write_bytes(pack(idx(content)))


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_in_all_spellings(tmp_path: Path, name: str, dotted: bool, packed: bool) -> None:
    def rename(file: str) -> str:
        return (file.replace("-idx", ".idx") if dotted else file) + (".gz" if packed else "")

    write_mnist(tmp_path / "data", rename, gzip.compress if packed else lambda raw: raw)
    data = load(name, tmp_path, path="data")
    assert (data.x.shape, data.x.dtype, data.scale) == ((5, 1, 3, 4), torch.uint8, 1 / 255)
    assert data.x.flatten().tolist() == list(range(60))
    assert data.y.tolist() == [0, 1, 2, 3, 9]
    assert data.test is not None
    assert data.test[0].shape == (2, 1, 3, 4)
    assert data.test[1].tolist() == [4, 5]
    assert len(data.classes) == 10


def test_without_a_path_the_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path))
    with pytest.raises(
        InputError, match=r"fedloom data get mnist`, or set 'path'.*train-images-idx3-ubyte.*t10k-labels"
    ):
        load("mnist")
    write_mnist(tmp_path / "mnist")
    assert len(load("mnist").y) == 5
    monkeypatch.delenv("FEDLOOM_CACHE")
    assert cache("mnist") == Path.home() / ".cache" / "fedloom" / "mnist"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (0, idx(np.zeros((5, 3, 4)))[:-7], r"promises 60 values \(5 × 3 × 4\) and 53 are there"),
        (0, idx(np.zeros((5, 3, 4))) + b"more", "promises 60 values .* and 64 are there"),
        (0, b"\x00\x00\x08\x03\x00", "and 0 are there"),
        (0, b"<html>", "not an idx file of bytes: it begins with 3c 68 74 6d"),
        (0, b"\x00\x00\x0d\x03" + bytes(12), "not an idx file of bytes: it begins with 00 00 0d 03"),
        (0, b"", "begins with nothing"),
        (0, gzip.compress(idx([1]), mtime=0)[:-9], "not a whole gzip file"),
        (0, idx([0, 1]), r"must hold images \(3 dimensions\) and labels \(1\)"),
        (1, idx([0, 1, 2]), "has 5 images but .* has 3 labels"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path: Path, file: int, content: bytes, message: str) -> None:
    write_mnist(tmp_path)
    (tmp_path / FILES[file]).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load("mnist", path=tmp_path)
    assert FILES[file] in str(caught.value)


def test_missing_idx_files_are_named(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / FILES[3]).unlink()
    with pytest.raises(InputError, match=r"has no t10k-labels-idx1-ubyte \(with or without \.gz\)"):
        load("mnist", path=tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    with pytest.raises(InputError, match=r"no file or folder .*mnits.*Relative paths start at .*Did you mean 'mnist'"):
        load("mnist", tmp_path, path="mnits")


# csv

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


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)])
def test_packed_tables(tmp_path: Path, suffix: str, pack: Any) -> None:
    (tmp_path / f"data.csv{suffix}").write_bytes(pack(TABLE.encode()))
    data = load("csv", tmp_path, path=f"data.csv{suffix}", label="Class", drop=["User"], missing={"?": -1})
    assert data.x[0].tolist() == [0.5, -1.0]
    (tmp_path / f"data.csv{suffix}").write_bytes(pack(TABLE.encode())[:-5])
    with pytest.raises(InputError, match="cannot be read as CSV"):
        load("csv", tmp_path, path=f"data.csv{suffix}", label="Class", drop=["User"], missing={"?": -1})


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
            r"Line 2 of .* has '\?' in column 'Y0'.*missing = \{ \"\?\" = 0 \}.*drop = \[\"Y0\"\]",
        ),
        (TABLE, {"missing": {"?": 0}}, r"Line 2 of .* has 'b' in column 'User'.*drop = \[\"User\"\]"),
        (TABLE, {"label": "Klass"}, r"no column 'Klass'. It has: Class, User, X0, Y0\. Did you mean 'Class'"),
        (TABLE, {"client": "user"}, "no column 'user'.*Did you mean 'User'"),
        (TABLE, {"drop": ["Users"]}, "no column 'Users'.*Did you mean 'User'"),
        (TABLE, {"drop": ["User", "X0", "Y0"]}, "no feature columns besides Class, User, X0, Y0"),
        ("Class,a\n1,\n", {}, 'Line 2 of .* has an empty cell in column \'a\'.*fill = "mean", "zero"'),
        ("Class,a\n1,nan\n", {}, "Line 2 of .* has 'nan' in column 'a', which is not a finite number"),
        ("Class,a\n1,1e999\n", {}, "Line 2 of .* has '1e999' in column 'a'"),
        ("Class,a\n1,1e39\n", {}, "Line 2 of .* has '1e39' in column 'a'"),
        ("Class,a\n1,2\n\n,2\n", {}, "Line 4 of .* has an empty cell in column 'Class': every example needs"),
        ("Class,u,a\n1,,2\n", {"client": "u"}, "Line 2 of .* has an empty cell in column 'u'"),
        ("Class,a\n1,2\n1,2,3\n", {}, "Line 3 of .* has 3 cells, but there are 2 columns"),
        ("Class,a,a\n1,2,3\n", {}, "two columns 'a'"),
        ("Class,a\n", {}, "has no examples"),
        ("", {}, "no column 'Class'"),
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
    with pytest.raises(InputError, match=r"cannot be read as CSV: .*utf-8"):
        load("csv", tmp_path, path="data.csv", label="y")


def test_pandas_and_pyplot_are_not_imported(tmp_path: Path) -> None:
    path = table(tmp_path)
    code = f"""
import sys
from pathlib import Path
from fedloom.data.build import federate
from fedloom.data.describe import plot
from fedloom.data.sources import source
data = source("csv")(path={str(path)!r}, label="Class", client="User", missing={{"?": 0}}).load(Path())
plot(federate(data), {str(tmp_path / "picture.png")!r})
print([name for name in ("pandas", "matplotlib.pyplot") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# images


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    Image.new("RGB", size, colour).save(path)


def test_folders_of_pictures(tmp_path: Path) -> None:
    picture(tmp_path / "dog" / "b.png", (10, 20, 30))
    picture(tmp_path / "cat" / "z.png", (1, 2, 3), size=(50, 2))
    picture(tmp_path / "dog" / "a.PNG", (40, 50, 60))
    (tmp_path / "dog" / "notes.txt").write_text("no picture")
    (tmp_path / ".hidden").mkdir()
    calls: list[tuple[str, int, int | None]] = []
    data = source("images")(path=".", size=[2, 3]).load(tmp_path, progress=lambda *call: calls.append(call))  # type: ignore[call-arg]
    assert (data.x.shape, data.x.dtype, data.scale) == ((3, 3, 2, 3), torch.uint8, 1 / 255)
    assert (data.y.tolist(), data.classes) == ([0, 1, 1], ("cat", "dog"))
    assert data.x[:, :, 1, 2].tolist() == [[1, 2, 3], [40, 50, 60], [10, 20, 30]]
    assert [call[1:] for call in calls] == [(1, 3), (2, 3), (3, 3)]


def test_grey_pictures(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "1.png", (90, 90, 90))
    data = load("images", path=tmp_path, size=[5, 5], channels=1)
    assert data.x.shape == (1, 1, 5, 5)
    assert data.x.unique().tolist() == [90]


def test_pixels_keep_their_place(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10
    (tmp_path / "a").mkdir()
    Image.fromarray(values).save(tmp_path / "a" / "1.png")
    assert load("images", path=tmp_path, size=[2, 4]).x[0].permute(1, 2, 0).tolist() == values.tolist()


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_sixteen_bits_become_eight(tmp_path: Path, suffix: str) -> None:
    values = (np.arange(8, dtype=np.uint16).reshape(2, 4) * 257 * 30) + 100
    (tmp_path / "a").mkdir()
    Image.fromarray(values).save(tmp_path / "a" / f"1.{suffix}")
    assert load("images", path=tmp_path, size=[2, 4], channels=1).x[0, 0].flatten().tolist() == list(range(0, 240, 30))


def test_class_folders_in_two_places_are_not_guessed_at(tmp_path: Path) -> None:
    for part in ("train", "test"):
        picture(tmp_path / "pictures" / part / "cat" / "1.png", (1, 2, 3))
    with pytest.raises(InputError, match=r"in several places: test, train\. Set 'path' to one"):
        load("images", path=tmp_path)
    assert len(load("images", path=tmp_path / "pictures" / "train").y) == 1


@pytest.mark.parametrize("content", [b"not a picture", b"", b"\x89PNG\r\n\x1a\n" + bytes(40)])
def test_a_broken_picture_is_named(tmp_path: Path, content: bytes) -> None:
    picture(tmp_path / "a" / "1.png", (1, 1, 1))
    (tmp_path / "a" / "2.png").write_bytes(content)
    with pytest.raises(InputError, match=r"picture .*2\.png cannot be read .*replace or remove it"):
        load("images", path=tmp_path)


def test_a_cut_off_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    noise = np.random.default_rng(1).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a" / "1.jpg")
    whole = (tmp_path / "a" / "1.jpg").read_bytes()
    (tmp_path / "a" / "1.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"1\.jpg cannot be read"):
        load("images", path=tmp_path)


def test_folders_without_pictures(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no sub-folders"):
        load("images", path=tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(InputError, match=r"class folder .*a has no pictures"):
        load("images", path=tmp_path)
    with pytest.raises(InputError, match="is not a folder"):
        load("images", path=table(tmp_path))


@pytest.mark.parametrize("fields", [{"size": [80]}, {"size": 80}, {"size": [80, 0]}, {"channels": 2}])
def test_wrong_image_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"'{next(iter(fields))}"):
        source("images")(path=".", **fields)


# npz


def test_arrays_with_clients_and_a_test_set(tmp_path: Path) -> None:
    arrays = {"x": np.arange(8).reshape(4, 2), "y": np.array([5, 7, 5, 9]), "client": np.array(["a", "b", "a", "b"])}
    np.savez(tmp_path / "data.npz", **arrays, x_test=np.zeros((1, 2), int), y_test=np.array([8]))  # type: ignore[arg-type]
    data = load("npz", tmp_path, path="data.npz", scale=0.5)
    assert (data.x.tolist(), data.scale) == (arrays["x"].tolist(), 0.5)
    assert (data.y.tolist(), data.classes) == ([0, 1, 0, 3], ("5", "7", "8", "9"))
    assert data.test is not None
    assert data.test[1].tolist() == [2]
    assert data.client is not None
    assert federate(data, server="test").names == ["a", "b"]


def test_arrays_under_other_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", q=np.zeros((3, 2), ">f8"), t=np.array([0.5, 1.5, 2.0]), user=np.array([3, 3, 1]))
    data = load("npz", tmp_path, path="d.npz", x="q", y="t", client="user")
    assert (data.x.dtype, data.classes, data.test) == (torch.float32, (), None)
    assert load("npz", tmp_path, path="d.npz", x="q", y="t", task="classification").classes == ("0.5", "1.5", "2")
    assert load("npz", tmp_path, path="d.npz", x="q", y="t").client is None
    spelt_out = load("npz", tmp_path, path="d.npz", x="q", y="t", client="client")  # as a run's own record does
    assert spelt_out.client is None


def test_labels_that_are_class_numbers_already(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 1)), y=np.array([2, 7], np.int8))
    data = load("npz", tmp_path, path="d.npz", classes=10)
    assert (data.y.tolist(), len(data.classes)) == ([2, 7], 10)
    with pytest.raises(InputError, match="label of example 1 is 7: with 5 classes"):
        federate(load("npz", tmp_path, path="d.npz", classes=5), clients=1)


def test_text_labels_in_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 1)), y=np.array(["dog", "cat"]))
    assert load("npz", tmp_path, path="d.npz").classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("arrays", "fields", "message"),
    [
        ({"x": np.zeros((2, 1)), "z": np.zeros(2)}, {}, "has no array 'y'. It has: x, z"),
        ({"x": np.zeros((2, 1)), "y": np.zeros(2)}, {"client": "user"}, "has no array 'user'"),
        ({"x": np.zeros((2, 1)), "y": np.zeros(2), "x_test": np.zeros((1, 1))}, {}, "both 'x_test' and 'y_test'"),
        ({"x": np.zeros((2, 1)), "y": np.zeros(3)}, {}, "There are 2 examples but 3 labels"),
        ({"x": np.zeros((2, 1)), "y": np.zeros(2), "client": np.zeros(3)}, {}, "2 examples but 3 client names"),
        ({"x": np.array(["a", "b"]), "y": np.zeros(2)}, {}, "Features and labels must be numbers"),
        ({"x": np.array([{}, {}]), "y": np.zeros(2)}, {}, "pickled objects are never loaded"),
    ],
)
def test_wrong_arrays_are_explained(tmp_path: Path, arrays: Any, fields: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(InputError, match=message):
        load("npz", tmp_path, path="d.npz", **fields)


def test_files_that_are_no_npz(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(InputError, match=r"one\.npy is one array, not an \.npz file"):
        load("npz", tmp_path, path="one.npy")
    with pytest.raises(InputError, match=r"text\.npz cannot be read"):
        load("npz", tmp_path, path="text.npz")


# Other people's loaders

LOADERS = """
import numpy as np
from fedloom.data.federation import Dataset
import torch

def pair(count=4): return np.zeros((count, 2)), np.arange(count) % 2
def triple(): return np.zeros((2, 2)), np.array([0, 1]), ["a", "b"]
def dataset(base): return Dataset(torch.zeros(1, 1), torch.zeros(1), features=(base.name,))
def nothing(): return None
number = 3
"""


def test_loaders_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOADERS)
    assert len(load("mine.py:pair", tmp_path).y) == 4
    assert len(load("mine.py:pair", tmp_path, count=7).y) == 7
    assert federate(load("mine.py:triple", tmp_path)).names == ["a", "b"]
    assert load("mine.py:dataset", tmp_path).features == (tmp_path.name,)


def test_loaders_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fedloom_test_loaders.py").write_text(LOADERS)
    monkeypatch.syspath_prepend(tmp_path)
    assert len(load("fedloom_test_loaders:pair").y) == 4


@pytest.mark.parametrize(
    ("reference", "fields", "message"),
    [
        ("mine.py:pear", {}, "mine.py has no 'pear'.*Did you mean 'pair'"),
        ("mine.py:number", {}, "'mine.py:number' must be a function that loads data. Got 3"),
        ("mime.py:pair", {}, "no file .*mime.py"),
        ("no_such_module:pair", {}, "no module 'no_such_module'"),
        ("mine.py:pair", {"size": 3}, "cannot be called with size: .*Its parameters are: count"),
        ("mine.py:nothing", {}, "must return a Dataset.*Got NoneType"),
    ],
)
def test_wrong_loaders_are_explained(tmp_path: Path, reference: str, fields: dict[str, Any], message: str) -> None:
    (tmp_path / "mine.py").write_text(LOADERS)
    with pytest.raises(InputError, match=message):
        load(reference, tmp_path, **fields)


# Real files


@pytest.mark.data
def test_real_mnist(real: Path) -> None:
    data = load("mnist", real, path="mnist")
    assert data.x.shape == (60_000, 1, 28, 28)
    assert data.y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert data.test is not None
    assert data.test[0].shape == (10_000, 1, 28, 28)
    federation = federate(data, partition={"name": "shards", "clients": 100}, server="test")
    assert np.diff(federation.offsets).tolist() == [600] * 100


@pytest.mark.data
def test_real_heart_disease(real: Path) -> None:
    fields = {"path": "heart_disease/heart_disease_4sites.csv", "label": "num", "client": "site"}
    federation = federate(load("csv", real, **fields, fill="mean"), normalize="federated")
    assert np.diff(federation.offsets).tolist() == [303, 294, 123, 200]
    with pytest.raises(InputError, match="has an empty cell in column"):
        load("csv", real, **fields)


@pytest.mark.data
def test_real_activities(real: Path) -> None:
    data = load("npz", real, path="har_hapt/hapt_features30.npz", client="user")
    assert federate(data).names == [str(person) for person in range(1, 31)]
    assert data.classes == tuple("123456")
