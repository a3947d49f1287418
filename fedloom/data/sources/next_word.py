"""What the sources of text share: choose authors, build a vocabulary, and make next-word examples."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedloom.data.federation import Dataset
from fedloom.data.preprocessing import Preprocessing
from fedloom.data.sources.archive import NOT_TEXT, open_text
from fedloom.data.sources.base import Source, locate, require
from fedloom.data.words import Vocabulary, clean, lines, windows, words
from fedloom.errors import InputError, nearest
from fedloom.record import AtLeastTwo, Count

Text = str | list[str]  # as it was written, or as its words


class NextWord(Source):
    """Texts by author: an author is a client, an example is some words, its label is the next word.

    `authors` is the number of the most active authors to take, or their names. `vocabulary` is a file, or the size of a
    vocabulary that is built from the texts of all authors, of the chosen ones, or of those named in `vocabulary_from`.
    """

    path: Path
    """The file or folder with the texts."""
    authors: Count | tuple[str, ...] | None = None
    """How many of the most active authors to use, or their names. By default, all."""
    min_texts: Count = 1
    """Leave out authors with fewer texts."""
    max_texts: Count | None = None
    """Leave out authors with more texts, such as bots."""
    vocabulary: AtLeastTwo | Path = 10_000
    """A file with one word per line, or the size of a vocabulary to build."""
    vocabulary_from: Literal["all", "chosen"] | tuple[str, ...] = "all"
    """Whose texts the vocabulary is built from: all authors', the chosen ones', or those of the authors named here."""
    line: AtLeastTwo = 10
    """The number of words in an example."""
    symbols: bool = True
    """Keep punctuation as words."""
    pad_lines: bool = False
    """Fill up short lines, so that padding becomes a label."""

    @abstractmethod
    def read(self, path: Path) -> Iterator[tuple[str, list[Text]]]:
        """Yield authors and some of their texts, in the order of the file."""

    def load(self, base: Path) -> Dataset:
        """Read the examples in the order of the authors' texts."""
        path = locate(base, self.path)
        texts: dict[str, list[Text]] = {}
        for author, some in self.read(path):
            texts.setdefault(author, []).extend(some)
        chosen = self._chosen(texts)
        vocabulary = self._vocabulary(base, texts, chosen)
        examples = [self._examples(texts[author], vocabulary) for author in chosen]
        sizes = [len(y) for _, y in examples]
        silent = [author for author, size in zip(chosen, sizes, strict=True) if size == 0]
        if silent and isinstance(self.authors, tuple):
            raise InputError(f"The author '{silent[0]}' in {path} never wrote two words in one text: leave them out.")
        if len(silent) == len(chosen):
            raise InputError(f"No author in {path} wrote two words in one text: there are no next words to learn.")
        if silent:
            logging.getLogger("fedloom").warning(
                f"Left out {len(silent):,} of {len(chosen):,} authors who never wrote two words in one text."
            )
        return Dataset(
            torch.from_numpy(np.concatenate([x for x, _ in examples])),
            torch.from_numpy(np.concatenate([y for _, y in examples])),
            client=np.repeat(chosen, sizes),
            classes=vocabulary.words,
            preprocessing=Preprocessing(words=self.line, symbols=self.symbols),
        )

    def _chosen(self, texts: dict[str, list[Text]]) -> list[str]:
        """Return the authors who become clients, the most active first."""
        if isinstance(self.authors, tuple):
            self._check_authors(self.authors, texts, "authors")
            return list(self.authors)
        most = self.max_texts or max(map(len, texts.values()), default=0)
        suitable = [author for author, written in texts.items() if self.min_texts <= len(written) <= most]
        wanted = self.authors or max(len(suitable), 1)
        if len(suitable) < wanted:
            limit = f"{self.min_texts} to {most:,}" if self.max_texts else f"at least {self.min_texts}"
            found = f"{len(suitable):,} of {len(texts):,} authors"
            raise InputError(f"In {self.path}, {found} have {limit} texts, but {wanted:,} are needed.")
        return sorted(suitable, key=lambda author: (-len(texts[author]), author))[:wanted]

    def _check_authors(self, wanted: Iterable[str], texts: dict[str, list[Text]], key: str) -> None:
        for author in wanted:
            if author not in texts:
                raise InputError(
                    f"The file {self.path} has no author '{author}', named in {key}.{nearest(author, texts)}"
                )

    def _vocabulary(self, base: Path, texts: dict[str, list[Text]], chosen: list[str]) -> Vocabulary:
        if isinstance(self.vocabulary, Path):
            return Vocabulary.load(locate(base, self.vocabulary))
        if isinstance(self.vocabulary_from, tuple):
            self._check_authors(self.vocabulary_from, texts, "vocabulary_from")
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


def json_objects(path: Path, by_line: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON objects of a file, compressed or not, each with a description of where it stands.

    There is one object on each line, or without `by_line` one in the whole file.
    """
    try:
        with open_text(path, path.name) as file:
            for number, text in enumerate(file if by_line else [file.read()], 1):
                if text.strip() or not by_line:
                    where = f"Line {number} of {path}" if by_line else f"The file {path}"
                    yield where, _json_object(text, where)
    except NOT_TEXT as error:
        raise InputError(f"The file {path} cannot be read: {error}.") from None


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise InputError(f"{where} must be a JSON object, in braces. Got {type(found).__name__} instead.")
    return found


def field(found: dict[str, Any], name: str, where: str) -> Any:
    """Return a field of a JSON object; it is an error if it is missing."""
    require(name, list(found), where, "field")
    return found[name]


def author_name(value: Any, where: str) -> str:
    """Return an author's name, which may be a text or a whole number."""
    if not isinstance(value, (str, int)) or isinstance(value, bool) or not str(value).strip():
        raise InputError(f"{where} must name its author. Got {value!r} instead.")
    return str(value).strip()


def strings(value: Any, where: str) -> list[Text]:
    """Return one text or a list of texts as a list."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise InputError(f"{where} must have a list of texts. Got {str(value)[:40]!r} instead.")
    return found
