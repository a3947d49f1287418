"""UCI's EEG database: one text file a trial, gzipped, in archives within archives, as it is shipped."""

from __future__ import annotations

import gzip
import logging
import re
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.federation import Dataset
from fedloom.data.sources.base import Progress, Source, locate
from fedloom.errors import InputError

ELECTRODES, SAMPLES = 64, 256
CLASSES = ("control", "alcoholic")
Stimulus = Literal["S1 obj", "S2 match", "S2 nomatch"]
STIMULI: tuple[Stimulus, ...] = ("S1 obj", "S2 match", "S2 nomatch")
_TRIAL = re.compile(r"\.rd\.\d+(\.gz)?$")
_SUBJECT = re.compile(r"^#\s*(co\d([ac])\d+)\.rd", re.MULTILINE)
_STIMULUS = re.compile(r"^#\s*(S1 obj|S2 match|S2 nomatch)\b[^\n]*trial\s+(\d+)", re.MULTILINE)
_TIMES = [str(sample) for sample in range(SAMPLES)] * ELECTRODES


@dataclass(frozen=True)
class Trial:
    """One second of one person's EEG: 64 electrodes, 256 samples in µV."""

    values: NDArray[np.float32]
    subject: str
    group: int  # the place in CLASSES
    stimulus: str
    number: int


class Eeg(Source):
    """EEG trials of 64 × 256 by alcoholics and controls (Begleiter, UCI); a client is a person.

    `path` is a folder, an archive or a single trial, and whatever archives are inside are read too. Trials come in the
    order of persons and trial numbers. Those that are empty, short or damaged, and second copies, are left out and
    counted.
    """

    path: Path
    stimuli: tuple[Stimulus, ...] = STIMULI

    def load(self, base: Path, progress: Progress | None = None) -> Dataset:
        """All trials of the wanted stimuli; `progress` is called after every file."""
        path = locate(base, self.path)
        found: dict[tuple[str, int], Trial] = {}
        left: Counter[str] = Counter()
        for done, (name, content) in enumerate(_files(path), 1):
            trial = parse(name, content)
            if isinstance(trial, str):
                left[trial] += 1
            elif (trial.subject, trial.number) in found:
                left["second copies"] += 1
            elif trial.stimulus in self.stimuli:
                found[trial.subject, trial.number] = trial
            if progress is not None:
                progress(path.name, done, None)
        if left:
            counts = ", ".join(f"{count} {why}" for why, count in sorted(left.items()))
            logging.getLogger("fedloom").warning(f"Left out of {sum(left.values()) + len(found)} EEG trials: {counts}.")
        if not found:
            raise InputError(
                f"There are no EEG trials in {path}: it must be, or hold, files such as co2a0000364.rd.000.gz, with "
                f"{ELECTRODES} electrodes and {SAMPLES} samples, of {', '.join(self.stimuli)}."
            )
        trials = [found[key] for key in sorted(found)]
        return Dataset(
            torch.from_numpy(np.stack([trial.values for trial in trials])),
            torch.tensor([trial.group for trial in trials]),
            client=np.array([trial.subject for trial in trials]),
            classes=CLASSES,
        )


def parse(name: str, content: bytes) -> Trial | str:
    """A trial, or in a word or two why it is none."""
    try:
        text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode("ascii")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        return "damaged"
    subject, stimulus = _SUBJECT.search(text), _STIMULUS.search(text)
    if not text.strip() or subject is None or stimulus is None:
        return "empty"
    words = re.sub(r"#[^\n]*", "", text).split()  # trial, electrode, sample, µV, again and again
    if len(words) != 4 * ELECTRODES * SAMPLES or words[2::4] != _TIMES:
        return "short"
    try:
        values = np.array(words[3::4], dtype=np.float32).reshape(ELECTRODES, SAMPLES)
    except ValueError:
        return "damaged"
    if not np.isfinite(values).all():
        return "damaged"
    return Trial(values, subject[1], "ca".index(subject[2]), stimulus[1], int(stimulus[2]))


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    """The name and content of every trial in a folder, an archive, or archives inside of either, in order of names."""
    if path.is_dir():
        for inner in sorted(path.iterdir()):
            yield from _files(inner)
        return
    with path.open("rb") as stream:
        yield from _members(path.name, stream, path)


def _members(name: str, stream: IO[bytes], path: Path) -> Iterator[tuple[str, bytes]]:
    if _TRIAL.search(name):
        yield name, stream.read()
    elif name.endswith((".tar", ".tar.gz", ".tgz", ".zip")):
        try:
            if name.endswith(".zip"):
                with zipfile.ZipFile(stream) as archive:
                    for inner in sorted(archive.namelist()):
                        with archive.open(inner) as member:
                            yield from _members(Path(inner).name, member, path)
            else:
                with tarfile.open(fileobj=stream) as archive:
                    for entry in archive:
                        content = archive.extractfile(entry)
                        if content is not None:
                            yield from _members(Path(entry.name).name, content, path)
        except (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
            raise InputError(f"The archive {name} in {path} cannot be read ({error}): fetch it again.") from None
