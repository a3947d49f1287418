from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.data.sources.text_files import load, read, write

ANN = {"user": "ann", "comments": ["To be, or", "not to"], "time": [1, 2]}


BOB = {"user": "bob", "texts": ["Be it so"]}


def test_texts_become_examples_of_their_authors(tmp_path: Path) -> None:
    data = load("texts", write(tmp_path / "a.jsonl", ANN, BOB), line=3)
    assert data.classes == ("<PAD>", "<UNK>", "be", "to", ",", "it", "not", "or", "so")
    assert (data.x.shape, data.scale) == ((5, 3), 1.0)
    # "to be ," | "or" is a line and a rest that is too short, and a text never goes on in the next one
    assert read(data) == {"ann": ["to be", "to be ,", "not to"], "bob": ["be it", "be it so"]}


def test_a_line_may_be_one_text_and_names_may_be_numbers(tmp_path: Path) -> None:
    lines = [{"author": 7, "body": "a b"}, {"author": 8, "body": "c d"}, {"author": 7, "body": "e f"}]
    data = load("texts", write(tmp_path / "a.jsonl", *lines), user="author")
    assert read(data) == {"7": ["a b", "e f"], "8": ["c d"]}


@pytest.mark.data
def test_real_comments_with_leafs_vocabulary(real: Path) -> None:
    folder = real / "reddit_2006"
    words = str(folder / "leaf_reddit_vocab.txt")
    data = load("texts", folder / "reddit_2006q1_by_user.jsonl.xz", authors=2, vocabulary=words)
    assert len(data.classes) == 9_999
    assert np.unique(data.client, return_counts=True)[1].tolist() == [9_445, 6_757]
    assert not (data.y == 0).any()
    assert 0.05 < (data.y == 1).float().mean() < 0.1  # unknown words


def test_roles_of_plays_are_clients_if_they_speak_twice(tmp_path: Path) -> None:
    lines = [
        {"play": "hamlet", "role": "GHOST", "speeches": ["Mark me.", "Adieu, adieu"]},
        {"play": "hamlet", "role": "CRIER", "speeches": ["Silence here"]},
        {"play": "macbeth", "role": "GHOST", "speeches": ["Boo to you", "Out"]},
    ]
    data = load("shakespeare", write(tmp_path / "plays.jsonl", *lines), symbols=False)
    assert read(data) == {"hamlet GHOST": ["mark me", "adieu adieu"], "macbeth GHOST": ["boo to", "boo to you"]}
    assert "silence" in data.classes  # the vocabulary is of all, unless one says otherwise


@pytest.mark.data
def test_real_plays(real: Path) -> None:
    data = load("shakespeare", real / "shakespeare" / "shakespeare_gutenberg_by_role.jsonl.xz", authors=3)
    assert np.unique(data.client).tolist() == ["hamlet HAM", "othello IAGO", "othello OTHELLO"]
