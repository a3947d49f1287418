from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.errors import InputError
from tests.data.sources.client_files import leaf, load, tff, write


def test_femnist_from_both(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).random((3, 28, 28)).astype(np.float32)
    labels = [0, 61, 10]
    users = {"f0": (slice(0, 1)), "f1": slice(1, 3)}
    write(
        tmp_path / "leaf" / "train" / "all_data_0_niid_0_keep_0_train_9.json",
        leaf(**{u: {"x": pixels[at].reshape(-1, 784).tolist(), "y": labels[at]} for u, at in users.items()}),
    )
    tff(
        tmp_path / "tff" / "fed_emnist_train.h5",
        **{u: {"pixels": pixels[at], "label": labels[at]} for u, at in users.items()},
    )
    tff(tmp_path / "tff" / "fed_emnist_test.h5", f1={"pixels": pixels[:1], "label": [61]})
    one, other = load("femnist", tmp_path / "leaf"), load("femnist", tmp_path / "tff")
    assert one.x.equal(other.x)
    assert one.x.reshape(3, 28, 28).equal(torch.from_numpy(pixels))
    assert one.y.tolist() == other.y.tolist() == labels
    assert len(one.classes) == 62
    assert [one.classes[label] for label in labels] == ["0", "z", "A"]
    assert (one.test, other.test is not None and other.test[1].tolist()) == (None, [61])
    assert load("femnist", tmp_path / "tff", join=True).y.tolist() == [*labels, 61]
    with pytest.raises(InputError, match="set 'path' to the folder that has fed_emnist_train"):
        load("femnist", tmp_path / "tff" / "fed_emnist_train.h5")
