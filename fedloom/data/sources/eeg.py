"""UCI's EEG database: one text file a trial, gzipped, in archives within archives, as it is shipped."""

from __future__ import annotations

import gzip
import logging
import re
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.federation import Dataset
from fedloom.data.sources.archive import contents
from fedloom.data.sources.base import Progress, Source, locate_or_cached
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

    path: Path | None = None
    """A folder, an archive or a single trial. By default, what `fedloom data get eeg` downloaded."""
    stimuli: tuple[Stimulus, ...] = STIMULI
    """The kinds of trials to keep."""

    def load(self, base: Path, progress: Progress | None = None) -> Dataset:
        """All trials of the wanted stimuli; `progress` is called after every file."""
        path = locate_or_cached(base, self.path, "eeg")
        found: dict[tuple[str, int], Trial] = {}
        left: Counter[str] = Counter()
        for done, (name, content) in enumerate(contents(path, _TRIAL.search), 1):
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
        kept = [found[key] for key in sorted(found)]
        return Dataset(
            torch.from_numpy(np.stack([trial.values for trial in kept])),
            torch.tensor([trial.group for trial in kept]),
            client=np.array([trial.subject for trial in kept]),
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
        with np.errstate(over="ignore"):  # too large for float32: not finite, and so damaged
            values = np.array(words[3::4], dtype=np.float32).reshape(ELECTRODES, SAMPLES)
    except ValueError:
        return "damaged"
    if not np.isfinite(values).all():
        return "damaged"
    return Trial(values, subject[1], "ca".index(subject[2]), stimulus[1], int(stimulus[2]))
