from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.data.vocabulary import Vocabulary
from fedloom.errors import InputError


def test_the_most_frequent_words_are_kept_and_ties_are_alphabetical() -> None:
    texts = [["b", "a", "c"], ["c", "b", "a"], ["d", "c"]]
    assert Vocabulary.of(texts, 5).words == ("<PAD>", "<UNK>", "c", "a", "b")
    assert Vocabulary.of(texts, 100).words == ("<PAD>", "<UNK>", "c", "a", "b", "d")
    assert Vocabulary.of([], 100).words == ("<PAD>", "<UNK>")


def test_numbers_are_lines_from_zero_and_unknown_words_share_one(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("<PAD>\n<UNK>\n.\nthe\n<BOS>\n")
    vocabulary = Vocabulary.load(file)
    assert vocabulary.numbers(["the", ".", "queen", "<PAD>"]) == [3, 2, 1, 0]
    assert vocabulary.padding == 0


def test_a_written_vocabulary_is_read_as_it_was(tmp_path: Path) -> None:
    built = Vocabulary.of([["'", "<url>", "a", '"']], 10)
    built.write(tmp_path / "words.txt")
    assert Vocabulary.load(tmp_path / "words.txt") == built


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"<PAD>\n<UNK>\na\na\n", "Line 4 of the vocabulary .* has 'a' again, after line 3"),
        (b"<PAD>\n\n<UNK>\n", "Line 2 .* is blank"),
        (b"<PAD>\na\n", "has no line <UNK>"),
        (b"", "has no line <PAD>"),
        (b"\x80\x04\x95", "cannot be read as text .* Pickles are never loaded"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "words.txt").write_bytes(content)
    with pytest.raises(InputError, match=problem):
        Vocabulary.load(tmp_path / "words.txt")
