"""Turn texts into next-word examples, after Goultiaev Tolstokorov 2023 and LEAF, and number words by a vocabulary."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import InputError

URL, EMAIL, USER, SUBREDDIT = SPECIAL = ("<url>", "<email>", "<user>", "<subreddit>")
PADDING, UNKNOWN = "<PAD>", "<UNK>"  # in capitals, because cleaned texts are in lower case and cannot contain them

_UNPRINTABLE = re.compile(r"[^ -~]+")
_URL = re.compile(r"(?<!\w)(?:https?://|www\.)\S+")
_CLOSING = ".,;:!?)]}>'\"*"  # part of the sentence around an address, not of the address
# the search starts where a run of letters begins: starting at every letter would take quadratic time
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_USER = re.compile(r"(?<![\w/])/?u/[\w-]+")
_SUBREDDIT = re.compile(r"(?<![\w/])/?r/\w+")
_WORD = re.compile(
    r"<(?:url|email|user|subreddit)>"
    r"|<3|[:;]-?(?:[()/|]|[dp](?![a-z0-9]))"  # faces
    r"|\d+(?:[.,:/]\d+)+"  # 3.5, 10:30, 1,000,000
    r"|[a-z0-9]+(?:['-][a-z0-9]+)*"  # don't, well-known
    r"|\.{2,}"
    r"|[^\sa-z0-9]"
)


def clean(text: str) -> str:
    r"""Return printable ASCII in lower case with single spaces; addresses, users and subreddits become special tokens.

    >>> clean("See  HTTP://a.b/c, na\u00efve /u/Bob\nor me@x.org!")
    'see <url>, nave <user> or <email>!'
    """
    text = " ".join(html.unescape(text).split())  # first, because a space may be outside ASCII
    text = _UNPRINTABLE.sub("", text).lower()
    text = _URL.sub(lambda found: URL + found[0][len(found[0].rstrip(_CLOSING)) :], text)
    for pattern, token in ((_EMAIL, EMAIL), (_USER, USER), (_SUBREDDIT, SUBREDDIT)):
        text = pattern.sub(token, text)
    return " ".join(text.split())


def words(text: str, symbols: bool = True) -> list[str]:
    """Return the words of a cleaned text, and with `symbols` its symbols.

    >>> words("don't pay $3.50... <url> :)")
    ["don't", 'pay', '$', '3.50', '...', '<url>', ':)']
    """
    found = _WORD.findall(text)
    return found if symbols else [word for word in found if word[0].isalnum() or word in SPECIAL]


def lines(values: Sequence[int], length: int) -> list[Sequence[int]]:
    """Cut values into pieces of `length`; the last one may be shorter.

    >>> lines([1, 2, 3, 4, 5], 2)
    [[1, 2], [3, 4], [5]]
    """
    return [values[start : start + length] for start in range(0, len(values), length)]


def windows(of: Sequence[Sequence[int]], length: int, padding: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Make an example of every beginning of a line with two or more tokens: the last token is the label.

    Examples have `length` tokens, with padding in front.

    >>> x, y = windows([[5, 6, 7], [8]], 3, 0)
    >>> x.tolist(), y.tolist()
    ([[0, 0, 5], [0, 5, 6]], [6, 7])
    """
    table = np.full((len(of), length), padding, dtype=np.int32)
    for row, line in zip(table, of, strict=True):
        row[: len(line)] = line
    counts = np.array([max(len(line) - 1, 0) for line in of], dtype=np.int64)
    owner = np.repeat(np.arange(len(of)), counts)
    label = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + 1  # its position in the line
    place = np.arange(length) - length + label[:, None]
    x = np.where(place >= 0, table[owner[:, None], np.maximum(place, 0)], np.int32(padding))
    return x, table[owner, label].astype(np.int64)


@dataclass(frozen=True)
class Vocabulary:
    """Words by their numbers, including padding and the unknown word.

    >>> vocabulary = Vocabulary.of([["to", "be"], ["to", "go"]], 4)
    >>> vocabulary.words, vocabulary.numbers(["go", "to", "be"])
    (('<PAD>', '<UNK>', 'to', 'be'), [1, 2, 3])
    """

    words: tuple[str, ...]

    @staticmethod
    def of(texts: Iterable[Iterable[str]], size: int) -> Vocabulary:
        """Take padding, the unknown word and the most frequent words, `size` in all. Ties are in alphabetical order."""
        counted = Counter(word for text in texts for word in text)
        order = sorted(counted, key=lambda word: (-counted[word], word))
        return Vocabulary((PADDING, UNKNOWN, *order[: max(size - 2, 0)]))

    @staticmethod
    def load(path: Path) -> Vocabulary:
        """Read a text file with one word per line. Lines are numbered from 0, as in LEAF's vocabulary."""
        try:
            words = tuple(path.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"The vocabulary {path} cannot be read as text ({error}): it must have one word per line. "
                "Pickles are never loaded."
            ) from None
        seen: dict[str, int] = {}
        for line, word in enumerate(words, 1):
            if not word.strip() or word in seen:
                what = f"has '{word}' again, after line {seen[word]}" if word in seen else "is blank"
                raise InputError(f"Line {line} of the vocabulary {path} {what}: every line must be another word.")
            seen[word] = line
        for needed in (PADDING, UNKNOWN):
            if needed not in seen:
                raise InputError(f"The vocabulary {path} has no line {needed}: padding and unknown words need one.")
        return Vocabulary(words)

    def write(self, path: Path) -> None:
        """Write the file that `load` reads, so that other sites number words in the same way."""
        path.write_text("".join(f"{word}\n" for word in self.words), encoding="utf-8")

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    @property
    def padding(self) -> int:
        return self._numbers[PADDING]

    def numbers(self, words: Sequence[str]) -> list[int]:
        """Return the numbers of words. Words outside the vocabulary get the number of the unknown word."""
        unknown = self._numbers[UNKNOWN]
        return [self._numbers.get(word, unknown) for word in words]
