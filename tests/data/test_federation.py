from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedloom.data.build import federate
from fedloom.data.federation import Federation
from fedloom.errors import InputError
from tests.data.examples import numbered


def test_arrays_of_many_kinds_are_taken() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [1, 2, 3], "y": [0, 1, 0], "who": ["u", "v", "u"]})
    from_pandas = Federation.from_arrays(frame[["a", "b"]], frame["y"], client=frame["who"])
    assert from_pandas.names == ["u", "v"]
    assert from_pandas.x.dtype == torch.float32
    big_endian = np.arange(6, dtype=">u2").reshape(3, 2)
    assert Federation.from_arrays(big_endian, [0, 1, 0], clients=1).x.sum() == 15
    assert Federation.from_arrays(big_endian, frame[["y"]], clients=1).y.shape == (3, 1)
    assert Federation.from_arrays(torch.zeros(3, 2), torch.tensor([0.5, 1.0, 2.0]), clients=1).classes == ()


def test_text_is_not_a_feature() -> None:
    with pytest.raises(InputError, match=r"must be numbers, .* Got values of type <U3"):
        Federation.from_arrays([["cat"], ["dog"]], [0, 1], clients=1)


@pytest.mark.parametrize("kind", [list, np.array, pd.Series, pd.Categorical, lambda y: np.array(y, dtype=object)])
def test_labels_that_are_texts_are_classes_in_the_order_of_their_names(kind: Any) -> None:
    x, y = np.arange(4.0).reshape(4, 1), kind(["dog", "cat", "dog", "emu"])
    made = Federation.from_arrays(x, y, client=["a"] * 4, split=(1, 0, 0))
    assert made.classes == ("cat", "dog", "emu")
    assert dict(zip(made.x[:, 0].tolist(), made.y.tolist(), strict=True)) == {0: 1, 1: 0, 2: 1, 3: 2}


def test_texts_of_an_official_test_set_are_numbered_with_the_others() -> None:
    test = (np.zeros((2, 1)), ["eel", "ant"])
    made = Federation.from_arrays(np.zeros((2, 1)), ["cat", "ant"], clients=1, server="test", test=test)
    assert made.classes == ("ant", "cat", "eel")
    assert made.server["test"][1].tolist() == [2, 0]


def test_texts_that_are_numbers_mean_what_they_mean_in_a_table() -> None:
    assert Federation.from_arrays(np.zeros((2, 1)), ["10", "9"], clients=1).classes == ("9", "10")
    assert Federation.from_arrays(np.zeros((2, 1)), ["1.5", "9"], clients=1).classes == ()


@pytest.mark.parametrize("missing", [None, np.nan, "", 3])
def test_a_missing_label_among_texts_is_refused(missing: Any) -> None:
    with pytest.raises(InputError, match=r"all must be\. Label 1 is"):
        Federation.from_arrays(np.zeros((2, 1)), ["cat", missing], clients=1)


def test_an_identifier_is_not_a_label() -> None:
    with pytest.raises(InputError, match="the largest here is 123456789"):
        Federation.from_arrays(np.zeros((2, 1)), [0, 123456789], clients=1)


def test_built_federations_are_not_kept_alive() -> None:
    import gc
    import weakref

    federation = federate(numbered(), clients=2)
    federation.indices(0, "train")
    gone = weakref.ref(federation)
    del federation
    gc.collect()
    assert gone() is None


def test_the_signature_of_from_arrays_lists_every_option_of_federate() -> None:
    options = set(inspect.signature(federate).parameters) - {"dataset", "agreed"}  # sites agree by files
    assert options < set(inspect.signature(Federation.from_arrays).parameters)


def test_examples_for_tests_are_known_again_whoever_holds_the_others() -> None:
    data = numbered(40)
    even, skewed, other = (
        federate(data, partition={"name": name, "clients": 4}, server=0.2, seed=seed).test_fingerprint
        for name, seed in (("iid", 0), ("shards", 0), ("iid", 1))
    )
    assert even == skewed != other
    assert federate(data, clients=4).test_fingerprint is None  # every partition draws its own tests


def test_splits_that_the_data_says_make_the_same_test_in_every_partition() -> None:
    data = numbered(40, split=np.repeat([0, 2], 20))
    found = [federate(data, clients=clients).test_fingerprint for clients in (2, 4)]
    assert found[0] == found[1] is not None
    assert found[0] != federate(replace(data, split=np.repeat([2, 0], 20)), clients=2).test_fingerprint
