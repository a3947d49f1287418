from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.data.sources.text_files import load, read, write


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
