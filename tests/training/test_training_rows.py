"""Clients that cannot train on their rows: they are named, with what to do."""

from __future__ import annotations

import pytest

from fedloom.errors import InputError
from fedloom.task import Task
from fedloom.training.local import Training
from tests.conftest import ALL_TRAIN, Dense, Normed, Pictures, federation
from tests.training.helpers import empty_client, fit


@pytest.mark.parametrize("group", [1, 3])
def test_a_client_without_training_examples_is_named(group: int) -> None:
    message = r"Client 'ben' has no training examples, so it cannot train\. Change data\.split or the partition\."
    with pytest.raises(InputError, match=message):
        fit(Task(Dense), empty_client(), Training(), group)


@pytest.mark.parametrize("group", [1, 3])
def test_batch_norm_of_one_example_names_the_client(group: int) -> None:
    data = federation((6, 1, 8), split=ALL_TRAIN)
    message = (
        r"Client 'client-1' has one training example, but the model's batch normalisation needs at least two in a "
        r"batch\. Leave such clients out, use a larger batch_size, or normalise with nn\.LayerNorm or nn\.GroupNorm\."
    )
    with pytest.raises(InputError, match=message):
        fit(Task(Normed), data, Training(), group)
    with pytest.raises(InputError, match="'client-0' trains on batches of one example"):
        fit(Task(Normed), data, Training(batch_size=1), group)
    # over whole pictures one example has many values per channel
    assert fit(Task(Pictures), data, Training(), group).steps.tolist() == [1, 1, 1]


@pytest.mark.parametrize("group", [1, 2])
def test_a_last_batch_of_one_example_is_an_error_or_left_out(group: int) -> None:
    task, data = Task(Normed, dtype="float64"), federation((8, 17, 4), split=ALL_TRAIN)
    message = r"Client 'client-1' has 17 training examples, so with batch_size = 8 its last batch has one.*drop_last"
    with pytest.raises(InputError, match=message):
        fit(task, data, Training(batch_size=8), group)
    trained = fit(task, data, Training(batch_size=8, epochs=2, drop_last=True), group)
    assert trained.steps.tolist() == [2, 4, 2]  # a client's only batch stays
    assert fit(Task(Dense), data, Training(batch_size=8), group).steps.tolist() == [1, 3, 1]  # not normalised
