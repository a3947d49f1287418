"""Texts by author: LEAF's Reddit, JSON lines, Shakespeare by role."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.data.federation import Dataset
from fedloom.data.sources import source
from fedloom.errors import InputError


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def load(name: str, path: Path, **fields: Any) -> Dataset:
    return source(name)(path=path.name, **fields).load(path.parent)


def read(data: Dataset) -> dict[str, list[str]]:
    """Every author's examples in words: without padding, the label last."""
    found: dict[str, list[str]] = {}
    assert data.client is not None
    for client, x, y in zip(data.client, data.x.tolist(), data.y.tolist(), strict=True):
        seen = [data.classes[word] for word in x if word]
        found.setdefault(str(client), []).append(" ".join([*seen, data.classes[y]]))
    return found


ANN = {"user": "ann", "comments": ["To be, or", "not to"], "time": [1, 2]}
BOB = {"user": "bob", "texts": ["Be it so"]}


def test_texts_become_examples_of_their_authors(tmp_path: Path) -> None:
    data = load("texts", write(tmp_path / "a.jsonl", ANN, BOB), line=3)
    assert data.classes == ("<PAD>", "<UNK>", "be", "to", ",", "it", "not", "or", "so")
    assert (data.x.shape, data.scale) == ((5, 3), 1.0)
    # "to be ," | "or" is a line and a rest that is too short, and a text never goes on in the next one
    assert read(data) == {"ann": ["to be", "to be ,", "not to"], "bob": ["be it", "be it so"]}


@pytest.mark.parametrize("packed", [gzip.compress, lzma.compress, bz2.compress])
def test_compressed_files_are_read_as_they_are(tmp_path: Path, packed: Callable[[bytes], bytes]) -> None:
    ending = {gzip.compress: ".gz", lzma.compress: ".xz", bz2.compress: ".bz2"}[packed]
    plain = write(tmp_path / "a.jsonl", ANN, BOB)
    (tmp_path / f"a.jsonl{ending}").write_bytes(packed(plain.read_bytes()))
    assert read(load("texts", tmp_path / f"a.jsonl{ending}")) == read(load("texts", plain))


def test_a_line_may_be_one_text_and_names_may_be_numbers(tmp_path: Path) -> None:
    lines = [{"author": 7, "body": "a b"}, {"author": 8, "body": "c d"}, {"author": 7, "body": "e f"}]
    data = load("texts", write(tmp_path / "a.jsonl", *lines), user="author")
    assert read(data) == {"7": ["a b", "e f"], "8": ["c d"]}


def people(count: int) -> list[dict[str, Any]]:
    return [{"user": f"p{number}", "texts": ["one two"] * number} for number in range(1, count + 1)]


def test_the_most_active_authors_are_chosen(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *people(5), {"user": "a", "texts": ["one two"] * 5})
    assert list(read(load("texts", path, authors=3))) == ["a", "p5", "p4"]
    assert list(read(load("texts", path, max_texts=4, authors=2))) == ["p4", "p3"]
    assert list(read(load("texts", path, min_texts=5))) == ["a", "p5"]
    assert list(read(load("texts", path, authors=["p2", "p1"]))) == ["p2", "p1"]


def test_a_vocabulary_is_built_of_whom_one_says(tmp_path: Path) -> None:
    lines = [{"user": "ann", "texts": ["x y", "x y"]}, {"user": "bob", "texts": ["z z"]}]
    path = write(tmp_path / "a.jsonl", *lines)
    assert load("texts", path, authors=1).classes == ("<PAD>", "<UNK>", "x", "y", "z")
    assert load("texts", path, authors=1, vocabulary_from="chosen").classes == ("<PAD>", "<UNK>", "x", "y")
    only_bob = load("texts", path, vocabulary_from=["bob"])
    assert read(only_bob) == {"ann": ["<UNK> <UNK>", "<UNK> <UNK>"], "bob": ["z z"]}
    assert load("texts", path, vocabulary=3).classes == ("<PAD>", "<UNK>", "x")
    (tmp_path / "words.txt").write_text("<UNK>\n<PAD>\nz\n")
    loaded = load("texts", path, vocabulary="words.txt")
    assert (loaded.classes, loaded.y.tolist()) == (("<UNK>", "<PAD>", "z"), [0, 0, 2])
    assert loaded.x[0].tolist() == [1] * 9 + [0]


def test_padding_is_a_label_only_where_that_is_wanted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"user": "ann", "texts": ["a b", "c"]})
    assert load("texts", path, line=4).y.tolist() == [3]
    as_published = load("texts", path, line=4, pad_lines=True)
    assert as_published.y.tolist() == [3, 0, 0, 0, 0, 0]
    assert as_published.x.tolist()[2] == [0, 2, 3, 0]  # a, b and padding, pre-padded


def test_roles_of_plays_are_clients_if_they_speak_twice(tmp_path: Path) -> None:
    lines = [
        {"play": "hamlet", "role": "GHOST", "speeches": ["Mark me.", "Adieu, adieu"]},
        {"play": "hamlet", "role": "CRIER", "speeches": ["Silence here"]},
        {"play": "macbeth", "role": "GHOST", "speeches": ["Boo to you", "Out"]},
    ]
    data = load("shakespeare", write(tmp_path / "plays.jsonl", *lines), symbols=False)
    assert read(data) == {"hamlet GHOST": ["mark me", "adieu adieu"], "macbeth GHOST": ["boo to", "boo to you"]}
    assert "silence" in data.classes  # the vocabulary is of all, unless one says otherwise


def leaf(**users: list[Any]) -> dict[str, Any]:
    held = {user: {"x": comments, "y": [{}] * len(comments)} for user, comments in users.items()}
    return {"users": list(users), "num_samples": [len(x) for x in users.values()], "user_data": held}


def test_leafs_two_forms_hold_the_same(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.json", leaf(ann=["well , <url> now", "yes"], bob=["so what"]))
    comment = [["<BOS>", "well", ",", "<url>"], ["now", "<EOS>", "<PAD>", "<PAD>"]]
    pieces = leaf(ann=[comment, [["<BOS>", "yes", "<EOS>", "<PAD>"]]], bob=[[["<BOS>", "so", "what", "<EOS>"]]])
    cut = write(tmp_path / "cut.json", pieces)
    expected = {"ann": ["well ,", "well , <url>", "well , <url> now"], "bob": ["so what"]}
    assert read(load("leaf_reddit", plain)) == read(load("leaf_reddit", cut)) == expected


def test_leafs_folders_are_put_together_in_the_order_of_time(tmp_path: Path) -> None:
    for number, part in enumerate(("train", "val", "test")):
        (tmp_path / "data" / part).mkdir(parents=True)
        write(tmp_path / "data" / part / f"reddit_0_{part}.json", leaf(ann=[f"now {number}"]))
    assert read(load("leaf_reddit", tmp_path / "data")) == {"ann": ["now 0", "now 1", "now 2"]}


@pytest.mark.parametrize(
    ("name", "content", "fields", "problem"),
    [
        ("texts", "{", {}, "Line 1 of .* is not JSON"),
        ("texts", "[]", {}, "Line 1 of .* must be a JSON object"),
        ("texts", '\n{"usr": "a"}', {}, "Line 2 of .* has no field 'user'.* Did you mean 'usr'"),
        ("texts", '{"user": "a", "words": []}', {}, "Line 1 .* has no field 'texts'. It has: user, words"),
        ("texts", '{"user": null, "texts": []}', {}, "Line 1 .* must name its author. Got None"),
        ("texts", '{"user": "a", "texts": [1]}', {}, r"Line 1 .* must have a list of texts. Got '\[1\]'"),
        ("texts", '{"user": "a", "texts": ["b"]}', {}, "No author in .* wrote two words in one text"),
        ("texts", '{"user": "a", "texts": ["b"]}', {"authors": ["a"]}, "author 'a' in .* never wrote two words"),
        ("texts", '{"user": "ann", "texts": ["b c"]}', {"authors": ["anne"]}, "no author 'anne'.* Did you mean 'ann'"),
        (
            "texts",
            '{"user": "a", "texts": ["b c"]}',
            {"vocabulary_from": ["b"]},
            "'b', who is named in vocabulary_from",
        ),
        ("texts", '{"user": "a", "texts": ["b c"]}', {"authors": 2}, "1 of 1 authors have at least 1 texts, and 2 are"),
        (
            "texts",
            '{"user": "a", "texts": ["b c"]}',
            {"min_texts": 2, "max_texts": 3},
            "0 of 1 authors have 2 to 3 texts",
        ),
        ("texts", "", {}, "0 of 0 authors have at least 1 texts, and 1 are needed"),
        ("shakespeare", '{"play": "a", "speeches": []}', {}, "Line 1 .* has no field 'role'"),
        ("leaf_reddit", '{"users": []}', {}, "has no field 'user_data'. It has: users"),
        ("leaf_reddit", '{"user_data": []}', {}, "must be a table of users. Got list"),
        ("leaf_reddit", '{"user_data": {"a": {"y": []}}}', {}, "The user 'a' in .* has no list 'x'"),
        ("leaf_reddit", '{"user_data": {"a": {"x": [3]}}}', {}, "neither a string nor pieces of words: 3"),
        ("leaf_reddit", '{"user_data": {"a": {"x": [["b"]]}}}', {}, "neither a string nor pieces of words"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, name: str, content: str, fields: dict[str, Any], problem: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(InputError, match=problem):
        load(name, tmp_path / "a.json", **fields)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(b'{"user": "a"}\n' * 99)[:40])
    with pytest.raises(InputError, match="cannot be read"):
        load("texts", tmp_path / "a.jsonl.xz")
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot be read"):
        load("texts", tmp_path / "a.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="There are no JSON files"):
        load("leaf_reddit", tmp_path / "empty")


def test_silent_authors_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", {"user": "ann", "texts": ["a b"]}, {"user": "bob", "texts": ["c", "d"]})
    assert list(read(load("texts", path))) == ["ann"]
    assert "Left out 1 of 2 authors" in caplog.text


@pytest.mark.data
def test_real_comments_with_leafs_vocabulary(real: Path) -> None:
    folder = real / "reddit_2006"
    words = str(folder / "leaf_reddit_vocab.txt")
    data = load("texts", folder / "reddit_2006q1_by_user.jsonl.xz", authors=2, vocabulary=words)
    assert len(data.classes) == 9_999
    assert np.unique(data.client, return_counts=True)[1].tolist() == [9_445, 6_757]
    assert not (data.y == 0).any()
    assert 0.05 < (data.y == 1).float().mean() < 0.1  # unknown words


@pytest.mark.data
def test_real_plays(real: Path) -> None:
    data = load("shakespeare", real / "shakespeare" / "shakespeare_gutenberg_by_role.jsonl.xz", authors=3)
    assert np.unique(data.client).tolist() == ["hamlet HAM", "othello IAGO", "othello OTHELLO"]
