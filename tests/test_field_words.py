"""Fields of records in words."""

from __future__ import annotations

from fedloom.experiment.experiment_file import TABLES
from fedloom.field_words import default, meaning, summary, words


def test_a_type_is_said_in_words() -> None:
    assert words({"enum": ["a", "b"]}) == '`"a"` or `"b"`'
    assert words({"type": "array", "items": {"type": "integer"}}) == "list of whole numbers"
    assert words({"type": "number", "exclusiveMinimum": 0, "maximum": 1}) == "number, more than 0, at most 1"
    assert words({"anyOf": [{"type": "string"}, {"type": "null"}]}) == "text"


def test_a_default_is_written_as_an_experiment_file_writes_it() -> None:
    run = TABLES["run"]
    assert default(run, "backend") == 'default: `"vector"`'
    assert default(run, "keep_models") == "default: `false`"


def test_a_record_and_its_fields_say_what_they_mean() -> None:
    assert summary(TABLES["run"]).startswith("[run]: how the experiment is computed.")
    assert meaning(TABLES["train"], "lr") == "The learning rate."
