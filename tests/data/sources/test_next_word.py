from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import InputError
from tests.data.sources.text_files import load, read, write

ANN = {"user": "ann", "comments": ["To be, or", "not to"], "time": [1, 2]}


BOB = {"user": "bob", "texts": ["Be it so"]}


def people(count: int) -> list[dict[str, Any]]:
    return [{"user": f"p{number}", "texts": ["one two"] * number} for number in range(1, count + 1)]


@pytest.mark.parametrize("packed", [gzip.compress, lzma.compress, bz2.compress])
def test_compressed_files_are_read_as_they_are(tmp_path: Path, packed: Callable[[bytes], bytes]) -> None:
    ending = {gzip.compress: ".gz", lzma.compress: ".xz", bz2.compress: ".bz2"}[packed]
    plain = write(tmp_path / "a.jsonl", ANN, BOB)
    (tmp_path / f"a.jsonl{ending}").write_bytes(packed(plain.read_bytes()))
    assert read(load("texts", tmp_path / f"a.jsonl{ending}")) == read(load("texts", plain))


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
            "'b', named in vocabulary_from",
        ),
        ("texts", '{"user": "a", "texts": ["b c"]}', {"authors": 2}, "1 of 1 authors have at least 1 texts, but 2 are"),
        (
            "texts",
            '{"user": "a", "texts": ["b c"]}',
            {"min_texts": 2, "max_texts": 3},
            "0 of 1 authors have 2 to 3 texts",
        ),
        ("texts", "", {}, "0 of 0 authors have at least 1 texts, but 1 are needed"),
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
    (tmp_path / "a.jsonl").write_bytes(b"\xff\x41")
    with pytest.raises(InputError, match="cannot be read"):
        load("texts", tmp_path / "a.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="There are no JSON files"):
        load("leaf_reddit", tmp_path / "empty")


def test_silent_authors_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", {"user": "ann", "texts": ["a b"]}, {"user": "bob", "texts": ["c", "d"]})
    assert list(read(load("texts", path))) == ["ann"]
    assert "Left out 1 of 2 authors" in caplog.text
