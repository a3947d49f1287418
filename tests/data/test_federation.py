from __future__ import annotations

import inspect

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
