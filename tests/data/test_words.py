"""From what people write to next-word examples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.data.words import Vocabulary, clean, lines, windows, words
from fedloom.errors import InputError


@pytest.mark.parametrize(
    ("written", "cleaned"),
    [
        ("", ""),
        (" \t\r\n ", ""),
        ("Hello,\r\n\tWORLD", "hello, world"),
        ("a\u00a0b\u2003c\u2028d", "a b c d"),  # spaces outside of ASCII separate, too
        ("caf\u00e9 na\u00efve \U0001f600 ok", "caf nave ok"),
        ("bell\x07 nul\x00 del\x7f", "bell nul del"),
        ("\ud800 lone", "lone"),  # JSON can hold half of a character
        ("&gt; a &amp;amp; b &#39;c&#39;", "> a &amp; b 'c'"),
        ("see http://a.b/c?d=e#f.", "see <url>."),
        ("(HTTPS://A.B/C)", "(<url>)"),
        ("[text](http://a.b/x_(y)) more", "[text](<url>)) more"),
        ("www.x.org, wwww.x", "<url>, wwww.x"),
        ("http:// alone", "http:// alone"),
        ("mail John.Doe+tag@mail.example.co.uk!", "mail <email>!"),
        ("not@mail, a@b", "not@mail, a@b"),
        ("http://me@host.org/x", "<url>"),
        ("/u/Some-One and u/other, /r/AskReddit r/x", "<user> and <user>, <subreddit> <subreddit>"),
        ("and/or/else menu/u/x 24/r/7", "and/or/else menu/u/x 24/r/7"),
        ("<PAD> <UNK> <URL>", "<pad> <unk> <url>"),
    ],
)
def test_nasty_texts_are_cleaned(written: str, cleaned: str) -> None:
    assert clean(written) == cleaned


@given(st.text())
def test_cleaned_text_is_plain(text: str) -> None:
    assert re.fullmatch(r"([!-@\[-~]+( [!-@\[-~]+)*)?", clean(text))  # printable ASCII without capitals, single spaces


@given(st.text())
def test_no_character_is_lost_between_words(text: str) -> None:
    cleaned = clean(text)
    assert "".join(words(cleaned)) == cleaned.replace(" ", "")


@pytest.mark.parametrize(
    ("long", "count"),
    [
        ('"a" * 200_000', 1),
        ('"." * 200_000', 1),
        ('"a@" * 100_000', 200_000),
        ('"http://" + "." * 200_000', 2),
        ('"r/" * 99_999', 199_996),
    ],
)
def test_long_texts_do_not_take_quadratic_time(long: str, count: int) -> None:
    code = f"from fedloom.data.words import clean, words; print(len(words(clean({long}))))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=40)
    assert int(told.stdout) == count  # in quadratic time it takes two minutes, and is stopped


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("don't stop-gap rock'n'roll", ["don't", "stop-gap", "rock'n'roll"]),
        ("'tis 'quoted'", ["'", "tis", "'", "quoted", "'"]),
        ("$3.50 1,000,000 10:30 1/2 3.", ["$", "3.50", "1,000,000", "10:30", "1/2", "3", "."]),
        ("wait.... what?! --", ["wait", "....", "what", "?", "!", "-", "-"]),
        (":) ;-) :d :data <3 3<4", [":)", ";-)", ":d", ":", "data", "<3", "3", "<", "4"]),
        ("<url><user> <pad>", ["<url>", "<user>", "<", "pad", ">"]),
        ("a_b", ["a", "_", "b"]),
    ],
)
def test_words_and_symbols_are_told_apart(text: str, found: list[str]) -> None:
    assert words(text) == found


def test_symbols_may_be_left_out() -> None:
    assert words("well, don't: <url> :) 3.5%", symbols=False) == ["well", "don't", "<url>", "3.5"]


@given(st.lists(st.lists(st.integers(1, 9), max_size=13), max_size=6), st.integers(2, 12))
def test_examples_are_all_beginnings_of_all_lines(texts: list[list[int]], length: int) -> None:
    cut = [line for text in texts for line in lines(text, length)]
    assert [token for line in cut for token in line] == [token for text in texts for token in text]
    x, y = windows(cut, length, 0)
    expected = [line[:size] for line in cut for size in range(2, len(line) + 1)]
    padded = [[0] * (length + 1 - len(beginning)) + list(beginning) for beginning in expected]
    assert np.column_stack([x, y]).tolist() == padded
    assert (x.shape, x.dtype, y.dtype) == ((len(expected), length), np.int32, np.int64)


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
