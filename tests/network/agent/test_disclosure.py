"""What others learn about an error."""

from __future__ import annotations

from fedloom.errors import TrainingError
from fedloom.network.agent.disclosure import error_summary


def test_an_error_is_reported_without_the_values_in_its_message() -> None:
    def model() -> None:
        raise ValueError("could not convert 'Jane Doe' to float")

    try:
        try:
            model()
        except ValueError as error:
            raise TrainingError(f"Round 1, client 'a', training: {error}") from error
    except TrainingError as error:
        told = error_summary(error)
    assert "Jane" not in told
    assert told.startswith("ValueError (its message stays at the site)\n")
    assert told.endswith("in model")
    assert error_summary(TrainingError("the loss is not finite")) == "the loss is not finite"
    assert error_summary(OSError(28, "No space left on device")) == "OSError: No space left on device"
