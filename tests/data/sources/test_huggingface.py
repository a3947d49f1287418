"""Datasets of Hugging Face's, made here and read from this machine: no test needs a network."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.data.build import federate
from fedloom.data.federation import Dataset
from fedloom.data.sources import source
from fedloom.errors import InputError

TABLE = {"a": [1, 2, 3], "b": [0.5, 0.25, -1.0], "who": ["x", "y", "x"], "label": [4, 9, 4]}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def load(path: Path, **fields: Any) -> Dataset:
    return source("huggingface")(path=path, **fields).load(Path())


def saved(folder: Path, **splits: Any) -> Path:
    import datasets

    datasets.DatasetDict(splits).save_to_disk(folder)
    return folder


def made(**columns: Any) -> Any:
    import datasets

    return datasets.Dataset.from_dict(columns)


@pytest.mark.parametrize("form", ["parquet", "csv", "json", "folder", "disk", "one"])
def test_tables_in_all_forms(tmp_path: Path, form: str) -> None:
    table, path = made(**TABLE), tmp_path / f"data.{form}"
    if form == "disk":
        saved(path, train=table)
    elif form == "one":
        table.save_to_disk(path)
    elif form == "folder":
        path.mkdir()
        table.to_parquet(path / "train.parquet")
    else:
        getattr(table, f"to_{form}")(path)
    data = load(path, client="who")
    assert data.x.tolist() == [[1.0, 0.5], [2.0, 0.25], [3.0, -1.0]]
    assert (data.y.tolist(), data.classes, data.features) == ([0, 1, 0], ("4", "9"), ("a", "b"))
    assert federate(data, split=(1, 0, 0)).names == ["x", "y"]
    assert data.test is None


def test_class_labels_keep_their_names_and_a_test_split_is_the_official_one(tmp_path: Path) -> None:
    import datasets

    def part(labels: list[int]) -> Any:
        table = made(v=[[1, 2]] * len(labels), label=labels)
        return table.cast_column("label", datasets.ClassLabel(names=["no", "yes", "never"]))

    data = load(saved(tmp_path / "d", train=part([1, 0]), test=part([1])))
    assert (data.x.tolist(), data.y.tolist(), data.classes) == ([[1, 2], [1, 2]], [1, 0], ("no", "yes", "never"))
    assert data.test is not None
    assert (data.test[0].tolist(), data.test[1].tolist()) == ([[1, 2]], [1])
    assert load(tmp_path / "d", train="test").y.tolist() == [1]


def test_pictures(tmp_path: Path) -> None:
    import datasets
    from PIL import Image

    pictures = [Image.new("RGB", (9, 7), (10, 20, 30)), Image.new("L", (5, 5), 90)]
    table = made(image=pictures, extra=[1, 2], label=[0, 1])
    assert isinstance(table.features["image"], datasets.Image)
    data = load(saved(tmp_path / "d", train=table), size=[4, 6])
    assert (data.x.shape, data.x.dtype, data.scale) == ((2, 3, 4, 6), torch.uint8, 1 / 255)
    assert data.x[:, :, 1, 1].tolist() == [[10, 20, 30], [90, 90, 90]]
    with pytest.raises(InputError, match=r"Pictures \('image'\) must be the only features"):
        load(tmp_path / "d", x=["image", "extra"])


def test_a_regression(tmp_path: Path) -> None:
    path = saved(tmp_path / "d", train=made(a=[1, 2], price=[0.5, 1.5]))
    assert load(path, y="price").y.tolist() == [0.5, 1.5]
    assert load(path, y="price").classes == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"y": "lable"}, r"has no column 'lable'\. It has: a, b, who, label\. Did you mean 'label'"),
        ({"x": "c"}, "has no column 'c'"),
        ({"client": "whom"}, "has no column 'whom'.*Did you mean 'who'"),
        ({"x": "who"}, r"column 'who' cannot be a feature: it must hold numbers.*Got <U1 of shape \(3,\)"),
        ({"train": "training"}, r"has no split 'training'\. It has: train\. Did you mean 'train'"),
    ],
)
def test_wrong_columns_are_explained(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(saved(tmp_path / "d", train=made(**TABLE)), **fields)


def test_features_that_cannot_be_guessed(tmp_path: Path) -> None:
    table = made(text=["a", "b"], more=["c", "d"], label=[0, 1])
    with pytest.raises(InputError, match=r"which columns are the features, x = .* has: text, more, label"):
        load(saved(tmp_path / "d", train=table))
    with pytest.raises(InputError, match="column 'text' cannot be a feature"):
        load(saved(tmp_path / "e", train=table.remove_columns("more")))


def test_lists_of_several_lengths(tmp_path: Path) -> None:
    path = saved(tmp_path / "d", train=made(v=[[1], [2, 3]], label=[0, 1]))
    with pytest.raises(InputError, match="column 'v' cannot be a feature"):
        load(path, x="v")


def test_files_that_are_no_datasets(tmp_path: Path) -> None:
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match=r"cut\.parquet cannot be read as a dataset of Hugging Face's"):
        load(tmp_path / "cut.parquet")
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(InputError, match=r"a\.txt must end in \.parquet, \.csv, \.json, \.jsonl"):
        load(tmp_path / "a.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty cannot be read as a dataset"):
        load(tmp_path / "empty")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"a": i, "label": i}) + "\n" for i in range(3)))
    assert load(tmp_path / "rows.jsonl").x.tolist() == [0, 1, 2]


def test_by_name_and_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def answer(*given: Any) -> Any:
        asked.append(given)
        if given[0] == "away":
            raise ConnectionError("Couldn't reach 'away' on the Hub")
        return datasets.DatasetDict({"train": made(**TABLE)})

    monkeypatch.setattr(datasets, "load_dataset", answer)
    assert len(source("huggingface")(name="somebody/things", config="small").load(Path()).y) == 3
    assert asked == [("somebody/things", "small")]
    with pytest.raises(InputError, match=r"'away' cannot be downloaded \(ConnectionError: .*set 'path' to"):
        source("huggingface")(name="away").load(Path())


def test_either_a_path_or_a_name() -> None:
    for fields in ({}, {"path": "a", "name": "b"}):
        with pytest.raises(InputError, match=r"needs either 'path' .* or 'name'"):
            source("huggingface")(**fields)


def test_without_the_package_the_way_to_get_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'fedloom\[huggingface\]'"):
        load(tmp_path)
