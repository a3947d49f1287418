"""The sparse problem of FSVRG's comparison, on texts that are counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedloom.errors import InputError
from fedloom.papers.questions import questions

TEXTS = {
    "ann": ["Where are you?", "I am here, here!", "123", "You are where you are."],
    "bob": ["Why?"],
    "eve": ["I see you", "are you there?"],
}


@pytest.fixture
def texts(tmp_path: Path) -> str:
    lines = [json.dumps({"user": user, "texts": found}) for user, found in TEXTS.items()]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    return "texts.jsonl"


def test_features_are_words_and_labels_are_questions(tmp_path: Path, texts: str) -> None:
    found = questions(texts, tmp_path, words=2, fewest=2)
    # "you" is in four texts and "are" in three; "123" has no word, and bob has too few texts
    assert found.x.tolist() == [[1, 1], [0, 0], [1, 1], [1, 0], [1, 1]]
    assert found.y.tolist() == [1, 0, 0, 0, 1]
    assert found.client is not None
    assert found.client.tolist() == ["ann", "ann", "ann", "eve", "eve"]


def test_an_author_has_at_most_so_many_texts(tmp_path: Path, texts: str) -> None:
    found = questions(texts, tmp_path, fewest=1, most=2)
    assert found.client is not None
    assert found.client.tolist() == ["ann", "ann", "bob", "eve", "eve"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"There is no file .*nothing.jsonl"):
        questions("nothing.jsonl", tmp_path)
