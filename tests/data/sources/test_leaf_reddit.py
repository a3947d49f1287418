from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.data.sources.text_files import load, read, write


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
