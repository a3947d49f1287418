"""A sparse, unbalanced logistic problem like that of Konečný et al. 2016: which messages of people are questions?"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np

from fedloom.data.federation import Dataset, as_dataset
from fedloom.data.sources.texts import Texts
from fedloom.errors import InputError

WORD = re.compile(r"[^\W\d_]+")


def questions(path: str, base: Path, words: int = 2000, fewest: int = 10, most: int = 200) -> Dataset:
    """Load texts by author: 1 for a feature if the text has the word, and 1 as label if it has a question mark.

    The features are the most frequent `words`. Authors with fewer than `fewest` texts are left out, and of each author
    the first `most` texts with a word are used.
    """
    source, file = Texts(path=path), base / path
    if not file.is_file():
        raise InputError(f"There is no file {file}: it must have lines like {{'user': 'ann', 'texts': ['…', '…']}}.")
    chosen: list[tuple[str, set[str], bool]] = []
    for author, texts in source.read(file):
        found = [(set(WORD.findall(str(text).lower())), "?" in str(text)) for text in texts]
        used = [(author, bag, is_question) for bag, is_question in found if bag][:most]
        chosen += used if len(used) >= fewest else []
    counts = Counter(word for _, bag, _ in chosen for word in bag)
    known = {word: place for place, (word, _) in enumerate(counts.most_common(words))}
    x = np.zeros((len(chosen), len(known)), dtype=np.uint8)
    for row, (_, bag, _) in enumerate(chosen):
        x[row, [known[word] for word in bag if word in known]] = 1
    y = np.array([is_question for *_, is_question in chosen], dtype=np.float32)
    return as_dataset(x, y, client=np.array([author for author, *_ in chosen]))
