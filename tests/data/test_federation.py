from __future__ import annotations

import inspect
from dataclasses import replace

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
    assert Federation.from_arrays(torch.zeros(3, 2), torch.tensor([0.5, 1.0, 2.0]), clients=1).classes == ()


def test_text_is_not_a_feature_or_a_label() -> None:
    with pytest.raises(InputError, match=r"must be numbers\. Got values of type <U3"):
        Federation.from_arrays(np.zeros((2, 1)), ["cat", "dog"], clients=1)


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
