"""UCI's EEG files, made up: the same text, gzip, and archives in archives."""

from __future__ import annotations

import gzip
import io
import logging
import re
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedloom.data.build import federate
from fedloom.data.sources.eeg import CLASSES, Eeg, Trial, parse
from fedloom.errors import InputError


def values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 10, size=(64, 256)).round(3)


def text(subject: str, trial: int, seed: int, stimulus: str = "S1 obj ,", samples: int = 256) -> bytes:
    """A trial as UCI writes it."""
    lines = [
        f"# {subject}.rd",
        "# 120 trials, 64 chans, 416 samples 368 post_stim samples",
        "# 3.906000 msecs uV",
        f"# {stimulus} trial {trial}",
    ]
    for channel, row in enumerate(values(seed)):
        lines.append(f"# E{channel} chan {channel}")
        lines += [f"{trial} E{channel} {sample} {value:.3f}" for sample, value in enumerate(row[:samples])]
    return "\n".join([*lines, ""]).encode()


def tar(members: dict[str, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def test_a_trial_is_read_as_it_was_written() -> None:
    trial = parse(text("co2c0000337", 17, seed=3, stimulus="S2 nomatch err,"))
    assert isinstance(trial, Trial)
    np.testing.assert_array_equal(trial.values, values(3).astype(np.float32))
    assert (trial.subject, CLASSES[trial.label], trial.stimulus, trial.number) == (
        "co2c0000337",
        "control",
        "S2 nomatch",
        17,
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b"# co2a0000364.rd\n", "empty"),
        (text("co2a0000364", 0, 0, samples=200), "short"),
        (text("co2a0000364", 0, 0)[:-400], "short"),
        (text("co2a0000364", 0, 0).replace(b" 255 ", b" 254 "), "short"),
        (text("co2a0000364", 0, 0).replace(b"0 E5 7 ", b"0 E5 7 x"), "damaged"),
        (re.sub(rb"0 E5 7 \S+", b"0 E5 7 inf", text("co2a0000364", 0, 0)), "damaged"),
        (re.sub(rb"0 E5 7 \S+", b"0 E5 7 1e39", text("co2a0000364", 0, 0)), "damaged"),
        (gzip.compress(text("co2a0000364", 0, 0))[:-20], "damaged"),
        (b"\xff\xfe\x00", "damaged"),
    ],
)
def test_bad_trials_are_told_apart(content: bytes, why: str) -> None:
    assert parse(content) == why


def shipped(folder: Path) -> Path:
    """As UCI ships it: a zip with a tar of a gzipped tar a person, and beside it an excerpt with second copies."""
    people = {
        "co2c0000337": [(0, "S1 obj ,"), (4, "S2 match ,")],
        "co2a0000365": [(9, "S2 nomatch,")],
        "co2a0000364": [(10, "S1 obj ,"), (2, "S1 obj ,")],
    }
    inner = {}
    for person, trials in people.items():
        files = {
            f"{person}/{person}.rd.{number:03d}.gz": gzip.compress(text(person, number, seed=number, stimulus=stimulus))
            for number, stimulus in trials
        }
        files[f"{person}/{person}.rd.099.gz"] = gzip.compress(text(person, 99, 0, samples=100))
        inner[f"{person}.tar.gz"] = tar(files, "w:gz")
    path = folder / "eeg+database.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("eeg_full.tar", tar(inner))
        archive.writestr("excerpt.tar.gz", tar({"co2c0000337.rd.000": text("co2c0000337", 0, seed=0)}, "w:gz"))
        archive.writestr("readme.txt", "about the data")
    return path


def test_archives_within_archives_are_read_in_the_order_of_people_and_trials(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fedloom"):
        data = Eeg(path=shipped(tmp_path)).load(tmp_path)
    assert data.x.shape == (5, 64, 256)
    assert data.client is not None
    assert data.client.tolist() == ["co2a0000364"] * 2 + ["co2a0000365"] + ["co2c0000337"] * 2
    assert data.y.tolist() == [1, 1, 1, 0, 0]
    for row, seed in enumerate((2, 10, 9, 0, 4)):
        np.testing.assert_array_equal(data.x[row].numpy(), values(seed).astype(np.float32))
    assert "Left out of 9 EEG trials: 1 second copies, 3 short." in caplog.text
    assert federate(data).clients == 3


def test_stimuli_can_be_chosen(tmp_path: Path) -> None:
    data = Eeg(path=shipped(tmp_path), stimuli=("S1 obj",)).load(tmp_path)
    assert data.y.tolist() == [1, 1, 0]


def test_a_folder_of_files_and_archives_will_do(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "co2a0000364.rd.000").write_bytes(text("co2a0000364", 0, 1))
    (tmp_path / "b.tar").write_bytes(tar({"x/co2c0000337.rd.001.gz": gzip.compress(text("co2c0000337", 1, 2))}))
    assert Eeg(path=tmp_path).load(tmp_path).y.tolist() == [1, 0]


def test_mistakes_are_explained(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no EEG trials in .*empty.*co2a0000364\.rd\.000\.gz"):
        Eeg(path=Path("empty")).load(tmp_path)
    (tmp_path / "bad.tar").write_bytes(b"no archive")
    with pytest.raises(InputError, match=r"The archive bad\.tar .* cannot be read"):
        Eeg(path=Path("bad.tar")).load(tmp_path)
    whole = tar({f"co2a0000364.rd.{n:03d}": text("co2a0000364", n, n) for n in range(2)})
    (tmp_path / "cut.tar").write_bytes(whole[: len(whole) // 4])
    with pytest.raises(InputError, match=r"rd\.000 in .*cut\.tar cannot be read \(unexpected end of data\)"):
        Eeg(path=Path("cut.tar")).load(tmp_path)
    with zipfile.ZipFile(tmp_path / "cut.zip", "w") as archive:
        archive.writestr("a.tar.gz", gzip.compress(whole)[:1000])
    with pytest.raises(InputError, match=r"cut\.zip cannot be read"):
        Eeg(path=Path("cut.zip")).load(tmp_path)
    with pytest.raises(InputError, match="S1 obj"):
        Eeg(path=Path(), stimuli=("S3",))  # type: ignore[arg-type]


@pytest.mark.data
def test_real_trials_can_be_read(real: Path) -> None:
    folder = real / "eeg_alcoholism" / "raw"
    if not folder.is_dir():
        pytest.skip(f"no EEG trials in {folder}")
    data = Eeg(path=folder).load(folder)
    assert data.x.shape == (13, 64, 256)
    assert float(data.x[0, 0, 0]) == pytest.approx(-8.921)
    assert set(data.y.tolist()) == {0, 1}
