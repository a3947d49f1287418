"""Clients of one call know their rows, names and keys, and do not depend on who else is called."""

from dataclasses import replace

import pytest

from fedloom import keys
from fedloom.errors import TrainingError
from fedloom.training.clients import Clients
from tests.conftest import ALL_TRAIN, federation

DATA = federation((5, 7, 4), split=ALL_TRAIN)
SOME = Clients(DATA, (2, 0), seed=3, round=4, call=1)


def test_they_keep_the_order_of_the_call() -> None:
    assert len(SOME) == 2
    assert SOME.examples.tolist() == [4, 5]
    assert [SOME.name(position) for position in range(2)] == [DATA.name(2), DATA.name(0)]


def test_rows_are_those_of_the_federation() -> None:
    assert SOME.rows(0, "train").sort().values.tolist() == list(range(12, 16))
    assert SOME.rows(1, "train").sort().values.tolist() == list(range(5))


def test_one_by_one_they_are_the_same_clients() -> None:
    assert list(SOME) == [replace(SOME, ids=(2,)), replace(SOME, ids=(0,))]


def test_a_key_depends_on_the_client_and_not_on_its_position() -> None:
    alone = replace(SOME, ids=(0,))
    assert SOME.key(1, "batches", 7) == alone.key(0, "batches", 7) == keys.key(3, "batches", 4, 1, 0, 7)
    assert SOME.key(0, "batches", 7) != SOME.key(1, "batches", 7)
    assert replace(SOME, call=2).key(1, "batches", 7) != SOME.key(1, "batches", 7)


def test_a_group_that_clients_do_not_keep_is_explained() -> None:
    own: dict[str, int] = {}
    shared: dict[str, int] = {}
    told = []
    for groups in (own, shared):
        try:
            if groups is shared:
                shared["drift"]
            own["drift"]
        except KeyError as error:
            told.append(str(SOME.blame(error, "local training", 0)))
    assert "KeyError: 'drift'\n" in told[0]
    assert "test_clients.py, line" in told[0]
    kept = "{**super().init_own(task, model), 'drift': …}"
    assert told[0].endswith(f"begins with init_own: write one that returns {kept}.")
    assert "init_own" not in told[1]


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (IndexError("Target 7 is out of bounds."), "The labels have 3 classes, from 0: does the model give 3 outputs"),
        (
            RuntimeError("element 0 of tensors does not require grad"),
            r"Is there a .detach\(\) or no_grad in forward, or are all",
        ),
    ],
)
def test_errors_in_the_words_of_torch_get_a_hint(error: Exception, hint: str) -> None:
    data = replace(federation((6, 4)), classes=("a", "b", "c"))
    with pytest.raises(TrainingError, match=hint):
        raise Clients(data, (0,)).blame(error, "local training", 0)
