"""UCI's EEG database: one gzipped text file per trial, in archives within archives, as UCI ships it."""

from __future__ import annotations

import gzip
import logging
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.federation import Dataset
from fedloom.data.sources.archive import contents
from fedloom.data.sources.base import Source, locate_or_cached
from fedloom.errors import InputError

ELECTRODES, SAMPLES = 64, 256
CLASSES = ("control", "alcoholic")
Stimulus = Literal["S1 obj", "S2 match", "S2 nomatch"]
STIMULI: tuple[Stimulus, ...] = get_args(Stimulus)
_TRIAL = re.compile(r"\.rd\.\d+(\.gz)?$")
_SUBJECT = re.compile(r"^#\s*(co\d([ac])\d+)\.rd", re.MULTILINE)
_STIMULUS = re.compile(r"^#\s*(S1 obj|S2 match|S2 nomatch)\b[^\n]*trial\s+(\d+)", re.MULTILINE)
_SAMPLE_NUMBERS = [str(sample) for sample in range(SAMPLES)] * ELECTRODES


class Trial(NamedTuple):
    """One second of one person's EEG: 64 electrodes, 256 samples in µV."""

    values: NDArray[np.float32]
    subject: str
    label: int  # the place in CLASSES
    stimulus: str
    number: int


class Eeg(Source):
    """EEG trials of 64 × 256 by alcoholics and controls (Begleiter, UCI); a client is a person.

    `path` is a folder, an archive or a single trial; archives inside are read too. Trials are in the order of persons
    and trial numbers. Empty, short and damaged trials and second copies are left out and counted in a warning.
    """

    path: Path | None = None
    """A folder, an archive or a single trial. By default, what `fedloom data get eeg` downloaded."""
    stimuli: tuple[Stimulus, ...] = STIMULI
    """The kinds of trials to keep."""

    def load(self, base: Path) -> Dataset:
        """Read all trials of the chosen stimuli."""
        path = locate_or_cached(base, self.path, "eeg")
        found: dict[tuple[str, int], Trial] = {}
        left_out: Counter[str] = Counter()
        for _, content in contents(path, _TRIAL.search):
            trial = parse(content)
            if isinstance(trial, str):
                left_out[trial] += 1
            elif (trial.subject, trial.number) in found:
                left_out["second copies"] += 1
            elif trial.stimulus in self.stimuli:
                found[trial.subject, trial.number] = trial
        if left_out:
            counts = ", ".join(f"{count} {why}" for why, count in sorted(left_out.items()))
            total = left_out.total() + len(found)
            logging.getLogger("fedloom").warning(f"Left out of {total} EEG trials: {counts}.")
        if not found:
            raise InputError(
                f"There are no EEG trials in {path}: it must be, or hold, files such as co2a0000364.rd.000.gz, with "
                f"{ELECTRODES} electrodes and {SAMPLES} samples, of {', '.join(self.stimuli)}."
            )
        values, subjects, labels, _, _ = zip(*(found[key] for key in sorted(found)), strict=True)
        return Dataset(
            torch.from_numpy(np.stack(values)), torch.tensor(labels), client=np.array(subjects), classes=CLASSES
        )


def parse(content: bytes) -> Trial | str:
    """Return a trial, or in a word why it is left out: "empty", "short" or "damaged"."""
    try:
        text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode("ascii")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        return "damaged"
    subject, stimulus = _SUBJECT.search(text), _STIMULUS.search(text)
    if subject is None or stimulus is None:
        return "empty"
    words = re.sub(r"#[^\n]*", "", text).split()  # trial, electrode, sample, µV, again and again
    if len(words) != 4 * ELECTRODES * SAMPLES or words[2::4] != _SAMPLE_NUMBERS:
        return "short"
    try:
        with np.errstate(over="ignore"):  # too large for float32: not finite, and so damaged
            values = np.array(words[3::4], dtype=np.float32).reshape(ELECTRODES, SAMPLES)
    except ValueError:
        return "damaged"
    if not np.isfinite(values).all():
        return "damaged"
    return Trial(values, subject[1], "ca".index(subject[2]), stimulus[1], int(stimulus[2]))
