"""What others learn about an error, and what the audit log says about an answer."""

from __future__ import annotations

import math

from fedloom.errors import TrainingError
from fedloom.network.agent.disclosure import answer_facts, error_summary
from fedloom.network.protocol.messages import Assignment, ClientAnswer, write_answer
from fedloom.training.evaluation import Measured


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


def test_the_audit_log_names_the_metrics_that_left_and_not_those_that_were_withheld() -> None:
    facts = {"verb": "evaluate", "label": "fedavg", "seed": 1, "round": 1, "attempt": 1, "cohort": 1, "population": 1}
    assignment = Assignment(id="ask", kind="evaluate", clients=(), splits=("test",), **facts)
    test = Measured(3, {"loss": math.nan, "accuracy": 2.0}, summaries={"auroc": 0.5})
    answers = [ClientAnswer(0, measured={"test": test})]
    left = answer_facts(assignment, answers, write_answer("ask", answers))["left"]
    assert left["metrics"] == ["accuracy", "auroc"]
    assert left["results"][0]["measured"]["test"]["summaries"] == {"auroc": 0.5}
