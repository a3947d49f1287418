"""Files that survive a crash, and folders for one process at a time."""

import hashlib
import math
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom import files
from fedloom.errors import InputError, StoreError


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    files.write_atomically(tmp_path / "a.txt", b"one")
    files.write_atomically(tmp_path / "a.txt", b"two")
    assert (tmp_path / "a.txt").read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_only_its_owner_may_read_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "a.key"
    files.write_private(path, b"secret")
    assert path.read_bytes() == b"secret"
    if os.name == "posix":
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_only_its_owner_may_read_a_private_database_and_what_sqlite_writes_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run" / "a.db"
    path.parent.mkdir(mode=0o755)
    path.touch(mode=0o644)  # of an earlier version
    files.make_private_database(path)
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE t (x)")
        modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    assert modes == {"a.db": 0o600, "a.db-wal": 0o600, "a.db-shm": 0o600}


def test_a_second_connection_keeps_the_locks_of_the_first_on_a_private_database(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    files.make_private_database(path)
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE t (x)")
        files.make_private_database(path)
        read = (
            "import sqlite3, sys; d = sqlite3.connect(sys.argv[1]); d.execute('SELECT * FROM t').fetchall(); d.close()"
        )
        subprocess.run([sys.executable, "-c", read, path], check=True)  # it deletes the log if nobody seems to use it
        assert path.with_name("a.db-wal").exists()


def test_a_failed_replacement_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    files.write_atomically(tmp_path / "a.txt", b"one")
    with pytest.raises(FileNotFoundError), files.replacing(tmp_path / "a.txt") as temporary:
        temporary.with_name("not there").rename(temporary)
    assert (tmp_path / "a.txt").read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_folder_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    held = f"files.locked(Path({str(tmp_path)!r}), 'taken')"
    code = f"from pathlib import Path; from fedloom import files\nwith {held}: pass"
    with files.locked(tmp_path, "taken"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "StoreError: taken" in done.stderr
        with pytest.raises(StoreError, match="taken"), files.locked(tmp_path, "taken", seconds=0.1):
            pass
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"Nothing can be written to .*file"), files.locked(tmp_path / "file", ""):
        pass


def test_the_sha256_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 2_500_000)
    assert files.sha256(tmp_path / "a") == hashlib.sha256(b"x" * 2_500_000).hexdigest()


def test_a_private_file_is_private_even_if_a_crash_left_a_readable_one_behind(tmp_path: Path) -> None:
    left_behind = tmp_path / "key.part"
    left_behind.write_bytes(b"old")
    left_behind.chmod(0o644)
    files.write_private(tmp_path / "key", b"secret")
    assert (tmp_path / "key").read_bytes() == b"secret"
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0


def test_a_look_says_whether_a_process_holds_a_folder_and_creates_nothing(tmp_path: Path) -> None:
    assert not files.is_locked(tmp_path)
    assert os.listdir(tmp_path) == []
    with files.locked(tmp_path, "busy"):
        assert files.is_locked(tmp_path)
    assert not files.is_locked(tmp_path)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("source = digits", 'Text needs quotes: "digits".'),
        ("fedavg = { name = mine.py:Mine }", 'Text needs quotes: "mine.py:Mine".'),
        ("source = “digits”", 'Write straight quotes (") instead of curly ones.'),
        ("lr = 0,1", "Write decimals with a point, as in 0.1."),
        (r'path = "C:\Users\x"', "write paths with /, or in single quotes."),
        ("replay = True", "Write true in lower case."),
        ("\u00a0 source = 'digits'", "non-breaking or invisible space"),
        ("rounds = 4", "It is in the file twice: keep one of them"),
        ("fedavg = { lr = 1, lr = 2 }", "It is in the file twice: keep one of them"),
        ('partition = { name = "iid",\n  clients = 5 }', "must end with } on the same line"),
        ('partition = { name = "iid"\n  clients = 5 }', "must end with } on the same line"),
        ("fedavg = { lr = 1, }", "Leave out the comma before }."),
        ("fedavg", "Every key needs a value: write `fedavg = …`."),
        ("fedavg =  # the usual one", "Every key needs a value: write `fedavg = …`."),
        ("lr = 1, epochs = 2", "Write each key on a line of its own"),
        ("lr = 0.1.2", ""),
        ("args = [1, 2", ""),
    ],
)
@pytest.mark.parametrize("after", ["", "\n", "\n\n# the end\n"])
def test_a_mistake_in_toml_shows_its_line_and_what_is_probably_wrong(
    tmp_path: Path, line: str, hint: str, after: str
) -> None:
    (tmp_path / "a.toml").write_text(f"rounds = 3\n{line}{after}", encoding="utf-8")
    with pytest.raises(InputError, match=r"a\.toml is not a valid TOML file: .*\(at .*\)\.") as caught:
        files.read_toml(tmp_path / "a.toml")
    assert hint in str(caught.value).splitlines()[0]
    if "[" not in line or not after.strip():  # an array that does not end is noticed in a later line
        assert f"\n       1 | rounds = 3\n  >    2 | {line.splitlines()[0]}" in str(caught.value)


def test_an_algorithm_without_a_value_gets_an_example_and_tabs_are_shown_as_spaces(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[train]\nlr = 1\n[algorithm]\n\tlocal = {}\n\tfedavg\n")
    with pytest.raises(InputError, match=r"an algorithm with its defaults is `fedavg = \{\}`\.") as caught:
        files.read_toml(tmp_path / "a.toml")
    assert str(caught.value).endswith("  >    5 |     fedavg")
    assert "\t" not in str(caught.value)


def test_a_table_that_is_in_the_file_twice_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[data]\n[train]\n[data]\n")
    with pytest.raises(InputError, match=r"It is in the file twice(.|\n)*>    3 \| \[data\]"):
        files.read_toml(tmp_path / "a.toml")


@pytest.mark.parametrize(
    "value", [True, 3, 1e-05, math.inf, 'it\'s\n"so" 🌱', [1, [2.5]], {"name": "a b", "keys": [{"c.d": False}]}]
)
def test_a_value_is_read_as_it_was_written(value: object) -> None:
    assert files.toml_value(files.toml_text(value)) == value


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=5))
def test_a_toml_file_with_inline_tables_is_read_as_it_was(tables: dict[str, Any]) -> None:
    assert files.tomllib.loads(files.toml_file(tables)) == tables
