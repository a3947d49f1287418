from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from fedloom.errors import InputError
from tests.data.sources.client_files import ANN, BOB, held, load, tff, write


def test_the_files_of_tensorflow_federated(tmp_path: Path) -> None:
    train = tff(
        tmp_path / "train.h5",
        f0001_10={"points": np.float32(ANN["x"]), "label": np.int32(ANN["y"])},
        f0000_14={"points": np.float32(BOB["x"]), "label": np.int32(BOB["y"])},
    )
    test = tff(tmp_path / "test.h5", f0001_10={"points": np.float32([[4, 5]]), "label": np.int32([7])})
    data = load("hdf5", train, test=test)
    assert held(data) == {"f0000_14": (BOB["x"], [0]), "f0001_10": (ANN["x"], [0, 1])}
    assert data.test is not None
    assert data.test[1].tolist() == [1]
    assert load("hdf5", train, shape=[1, 2]).x.shape == (3, 1, 2)


def test_what_is_wrong_in_hdf5_files(tmp_path: Path) -> None:
    two = tff(tmp_path / "two.h5", ann={"a": [1.0], "b": [2.0], "label": [0]})
    with pytest.raises(InputError, match=r"'ann' in .* has a, b besides 'label': say which are the features"):
        load("hdf5", two)
    assert load("hdf5", two, x="b").x.tolist() == [2.0]
    with pytest.raises(InputError, match=r"has no dataset 'labels'\. It has: a, b, label\. Did you mean 'label'"):
        load("hdf5", two, x="a", y="labels")
    text = tff(tmp_path / "text.h5", ann={"tokens": [b"hello"], "label": [0]})
    with pytest.raises(InputError, match="examples of client 'ann' must be numbers"):
        load("hdf5", text)
    with pytest.raises(InputError, match="has no group 'examples'"):
        load("hdf5", tff(tmp_path / "none.h5"))
    short = tff(tmp_path / "short.h5", ann={"x": [1.0, 2.0], "label": [0]})
    with pytest.raises(InputError, match=r"'ann' has 2 examples but labels of shape \(1,\)"):
        load("hdf5", short)
    short.write_bytes(short.read_bytes()[:700])
    with pytest.raises(InputError, match=r"short\.h5 cannot be read as HDF5"):
        load("hdf5", short)


def test_without_h5py_the_way_to_get_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(InputError, match=r"need h5py: pip install 'fedloom\[hdf5\]'"):
        load("hdf5", write(tmp_path / "a.h5", ""))
