"""What sources of text share: whose texts are taken, which words are known, and next-word examples made of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import numpy as np
import torch
from annotated_types import Ge
from pydantic import Strict

from fedloom.data.federation import Dataset
from fedloom.data.sources.archive import PACKED, UNREADABLE
from fedloom.data.sources.base import Source, locate
from fedloom.data.vocabulary import Vocabulary
from fedloom.data.words import clean, lines, windows, words
from fedloom.errors import InputError, nearest
from fedloom.record import Count

Text = str | list[str]  # as it was written, or as its words
NOT_TEXT = (*UNREADABLE, UnicodeDecodeError)  # what reading a file may raise
Several = Annotated[int, Strict(), Ge(2)]


class NextWord(Source):
    """Texts by author: an author is a client, an example is some words, its label the next one.

    `authors` is how many of the most active, or their names. `vocabulary` is a file, or the size of one that is built
    from the texts of all authors, of the chosen ones, or of those named in `vocabulary_from`.
    """

    path: Path
    """The file or folder with the texts."""
    authors: Count | tuple[str, ...] | None = None
    """How many of the most active authors to use, or their names. By default, all."""
    min_texts: Count = 1
    """Leave out authors with fewer texts."""
    max_texts: Count | None = None
    """Leave out authors with more texts, such as bots."""
    vocabulary: Several | Path = 10_000
    """A file with one word per line, or the size of a vocabulary to build."""
    vocabulary_from: Literal["all", "chosen"] | tuple[str, ...] = "all"
    """Whose texts the vocabulary is built from: all authors', the chosen ones', or those of the authors named here."""
    line: Several = 10
    """The number of words in an example."""
    symbols: bool = True
    """Keep punctuation as words."""
    pad_lines: bool = False
    """Fill up short lines, so that padding becomes a label."""

    def read(self, path: Path) -> Iterator[tuple[str, list[Text]]]:
        """Authors and some of their texts, in the order of the file."""
        raise NotImplementedError(f"{type(self).__name__} must define read(path)")

    def load(self, base: Path) -> Dataset:
        """Examples in the order of the authors' texts."""
        path = locate(base, self.path)
        texts: dict[str, list[Text]] = {}
        for author, some in self.read(path):
            texts.setdefault(author, []).extend(some)
        chosen = self._chosen(texts)
        vocabulary = self._vocabulary(base, texts, chosen)
        parts = [(author, *self._examples(texts[author], vocabulary)) for author in chosen]
        silent = [author for author, _, y in parts if not len(y)]
        if silent and isinstance(self.authors, tuple):
            raise InputError(f"The author '{silent[0]}' in {path} never wrote two words in one text: leave them out.")
        if len(silent) == len(parts):
            raise InputError(f"No author in {path} wrote two words in one text: there are no next words to learn.")
        if silent:
            logging.getLogger("fedloom").warning(
                f"Left out {len(silent):,} of {len(parts):,} authors who never wrote two words in one text."
            )
        return Dataset(
            torch.from_numpy(np.concatenate([x for _, x, _ in parts])),
            torch.from_numpy(np.concatenate([y for _, _, y in parts])),
            client=np.repeat([author for author, _, _ in parts], [len(y) for _, _, y in parts]),
            classes=vocabulary.words,
        )

    def _chosen(self, texts: dict[str, list[Text]]) -> list[str]:
        """The authors who become clients, the most active first."""
        if isinstance(self.authors, tuple):
            self._known(self.authors, texts, "authors")
            return list(self.authors)
        most = self.max_texts or max(map(len, texts.values()), default=0)
        able = [author for author, written in texts.items() if self.min_texts <= len(written) <= most]
        wanted = self.authors or max(len(able), 1)
        if len(able) < wanted:
            limit = f"{self.min_texts} to {most:,}" if self.max_texts else f"at least {self.min_texts}"
            found = f"{len(able):,} of {len(texts):,} authors"
            raise InputError(f"In {self.path}, {found} have {limit} texts, and {wanted:,} are needed.")
        return sorted(able, key=lambda author: (-len(texts[author]), author))[:wanted]

    def _known(self, wanted: Iterable[str], texts: dict[str, list[Text]], field: str) -> None:
        for author in wanted:
            if author not in texts:
                raise InputError(
                    f"The file {self.path} has no author '{author}', who is named in {field}.{nearest(author, texts)}"
                )

    def _vocabulary(self, base: Path, texts: dict[str, list[Text]], chosen: list[str]) -> Vocabulary:
        if isinstance(self.vocabulary, Path):
            return Vocabulary.load(locate(base, self.vocabulary))
        if isinstance(self.vocabulary_from, tuple):
            self._known(self.vocabulary_from, texts, "vocabulary_from")
            counted: Iterable[str] = self.vocabulary_from
        else:
            counted = texts if self.vocabulary_from == "all" else chosen
        return Vocabulary.of((self._words(text) for author in counted for text in texts[author]), self.vocabulary)

    def _words(self, text: Text) -> list[str]:
        return words(clean(text), self.symbols) if isinstance(text, str) else text

    def _examples(self, texts: list[Text], vocabulary: Vocabulary) -> tuple[Any, Any]:
        numbered = (vocabulary.numbers(self._words(text)) for text in texts)
        cut = [line for numbers in numbered for line in lines(numbers, self.line)]
        if self.pad_lines:
            cut = [[*line, *[vocabulary.padding] * (self.line - len(line))] for line in cut]
        return windows(cut, self.line, vocabulary.padding)


def opened(path: Path) -> TextIO:
    """A text file, plain or compressed."""
    file: TextIO = PACKED.get(path.suffix, open)(path, "rt", encoding="utf-8-sig")
    return file


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in a file with one on each line, plain or compressed, and where each stands."""
    try:
        with opened(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"Line {number} of {path}"
                    yield where, as_object(line, where)
    except NOT_TEXT as error:
        raise InputError(f"The file {path} cannot be read: {error}.") from None


def as_object(content: str, where: str) -> dict[str, Any]:
    """The JSON object in a string."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise InputError(f"{where} must be a JSON object, in braces. Got {type(found).__name__} instead.")
    return found


def field(found: dict[str, Any], name: str, where: str) -> Any:
    """A field that must be there."""
    if name not in found:
        raise InputError(f"{where} has no field '{name}'. It has: {', '.join(found)}.{nearest(name, found)}")
    return found[name]


def name_of(value: Any, where: str) -> str:
    """An author's name: a word or a number."""
    if not isinstance(value, (str, int)) or isinstance(value, bool) or not str(value).strip():
        raise InputError(f"{where} must name its author. Got {value!r} instead.")
    return str(value).strip()


def strings(value: Any, where: str) -> list[Text]:
    """One text, or a list of them."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise InputError(f"{where} must have a list of texts. Got {str(value)[:40]!r} instead.")
    return found
