"""Numbers of clients in CSV files."""

from pathlib import Path

import pytest

from fedloom.clock.table_file import read_columns
from fedloom.errors import InputError

NAMES = {"north": 0, "south": 1}


def test_rows_are_found_by_the_clients_name(tmp_path: Path) -> None:
    file = tmp_path / "fleet.csv"
    file.write_text("speed;client;upload\n2;south;1.5\n\n1;north;3\n")
    assert read_columns(file, ("upload", "speed"), NAMES) == [(1, [1.5, 2.0]), (0, [3.0, 1.0])]


def test_an_umlaut_in_a_clients_name_may_be_two_characters(tmp_path: Path) -> None:
    file = tmp_path / "fleet.csv"
    file.write_text("client,speed\nko\u0308ln,1\nlo\u0308rrach,2\n", encoding="utf-8")
    assert read_columns(file, ("speed",), {"köln": 0, "lo\u0308rrach": 1}) == [(0, [1.0]), (1, [2.0])]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,sped\nnorth,1\n", "has no column 'speed'. It has: client, sped. Did you mean 'sped'?"),
        ("name,speed\nnorth,1\n", "has no column 'client'"),
        ("client,speed\nnort,1\n", "line 2: there is no client 'nort'. Did you mean 'north'?"),
        ("client,speed\nnorth,fast\n", "line 2, column 'speed': a number is needed. Got 'fast'"),
        ("client,speed\nnorth,nan\n", "a number is needed. Got 'nan'"),
        ("client,speed\nnorth\n", "line 2 has 1 cells of 2"),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "fleet.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        read_columns(file, ("speed",), NAMES)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "fleet.csv"
    file.write_bytes(b"client,speed\n\xff\xfe,1\n")
    with pytest.raises(InputError, match="is not a text file in UTF-8"):
        read_columns(file, ("speed",), NAMES)
