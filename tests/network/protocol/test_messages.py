"""Messages have exactly their fields, and formats of data can be compared."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from fedloom.data.preprocessing import Column, Preprocessing
from fedloom.network.protocol.messages import ClientAnswer, DataFormat, read_answer, write_answer
from fedloom.training.evaluation import Measured
from tests.conftest import federation as some_clients
from tests.network.conftest import HELLO, World, code


def test_a_message_with_unknown_fields_is_rejected(world: World) -> None:
    agent = world.speaker()
    body = json.dumps({**HELLO.model_dump(mode="json"), "extra": 1}).encode()
    reply = agent.send("POST", "/v1/hello", body)
    assert (reply.status_code, code(reply)) == (422, "malformed")


def test_a_format_goes_through_a_message_and_differences_are_named() -> None:
    ours = DataFormat.of(some_clients((4, 4)))
    assert DataFormat.model_validate(ours.message()) == ours
    assert ours.differences(ours) == ""
    theirs = DataFormat(features=ours.features, dtype="int64", classes=("a", "c"))
    mine = DataFormat(features=ours.features, dtype="float32", classes=("a", "b"))
    assert (
        mine.differences(theirs) == 'dtype: "int64" there, "float32" here; classes: ["a", "c"] there, ["a", "b"] here'
    )


def test_tables_that_are_prepared_differently_are_told_what_to_do() -> None:
    plain = some_clients((4, 4))
    wards = (("icu", "surgery"), ("ICU", "surgery"))
    one, two = (
        DataFormat.of(replace(plain, preprocessing=Preprocessing(columns=(Column(name="ward", categories=names),))))
        for names in wards
    )
    assert one != two
    assert "`fedloom data agree`" in one.differences(two)
    assert DataFormat.of(plain).prepared == ""


def test_an_answer_about_many_clients_is_read_in_one_pass() -> None:
    class Counted(dict[str, torch.Tensor]):
        passes = 0

        def items(self) -> object:  # type: ignore[override]
            self.passes += 1
            return super().items()

    scores = {"auroc": torch.rand(3)}
    measured = {split: Measured(3, {"loss": 1.0}, scores, torch.ones(3)) for split in ("validation", "test")}
    parcel = write_answer("ask", [ClientAnswer(client, measured=measured) for client in range(20)])
    tensors = Counted(parcel.tensors)
    _, found = read_answer(parcel.header, tensors)
    assert tensors.passes == 1
    assert list(found) == list(range(20))
    assert all(list(one.measured) == ["validation", "test"] for one in found.values())
    assert torch.equal(found[7].measured["test"].scores["auroc"], scores["auroc"])
    assert found[7].measured["test"].targets is not None
