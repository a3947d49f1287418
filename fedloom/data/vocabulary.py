"""The vocabulary: words and their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedloom.errors import InputError

PADDING, UNKNOWN = "<PAD>", "<UNK>"  # in capitals, because cleaned texts are in lower case and cannot contain them


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
