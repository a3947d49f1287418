"""Files that survive a crash: replaced as a whole, read by one process at a time, checked by their SHA-256."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from gzip import GzipFile
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from fedloom import faults
from fedloom.errors import BACKSLASH, InputError, StoreError, lines_around

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def write_atomically(path: Path, content: bytes, what: str = "file") -> None:
    """Replace a file so that after a crash it is either the old one or the new one, whole."""
    with replacing(path, what) as temporary:
        temporary.write_bytes(content)


def write_private(path: Path, content: bytes) -> None:
    """Replace a file that only its owner may read, such as a key, a token or a certificate."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    before = os.umask(0o077)
    try:
        write_atomically(path, content)
    finally:
        os.umask(before)


def make_private_database(path: Path) -> None:
    """Let only its owner read a database, which may be missing. SQLite's other files get the mode of this one."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        # Only a new file is opened: closing a file drops all locks that this process has on it, also those of SQLite's
        # connections, and then another process that reads the database deletes the log they write to.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    for file in (path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))):
        with suppress(FileNotFoundError, PermissionError):  # it may belong to somebody else who shares it with us
            file.chmod(0o600)


@contextmanager
def replacing(path: Path, what: str = "checkpoint") -> Iterator[Path]:
    """Yield a temporary file that replaces `path` at the end of the block; `what` names the fault points of tests."""
    temporary = path.with_name(f"{path.name}.part")
    temporary.unlink(missing_ok=True)  # one that a crash left may be readable by everybody
    try:
        yield temporary
        faults.point(f"{what}.write")
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        faults.point(f"{what}.rename")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    faults.point(f"{what}.renamed")
    if os.name == "posix":  # elsewhere you cannot open a folder, and a rename is durable by itself
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def locked(folder: Path, busy: str, seconds: float = 0.0) -> Iterator[None]:
    """Hold a folder for this process alone; raise StoreError(busy) if another one still holds it after `seconds`."""
    lock = FileLock(folder / ".lock", timeout=seconds)
    try:
        held = lock.acquire()
    except Timeout:
        raise StoreError(busy) from None
    except OSError as error:
        raise StoreError(f"Nothing can be written to {folder}: {error}.") from error
    with held:
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process holds a folder. Where that cannot be found out, because nothing can be written, assume so."""
    if not (folder / ".lock").is_file():
        return False
    try:
        with FileLock(folder / ".lock", timeout=0):
            return False
    except (Timeout, OSError):
        return True


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return dict(tomllib.loads(text))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text in UTF-8. Save it as UTF-8.") from error
    except tomllib.TOMLDecodeError as error:
        lines, place = text.rstrip().split("\n"), re.search(r"at line (\d+)", str(error))
        line = min(int(place[1]), len(lines)) if place else len(lines)
        here, table = lines[line - 1], re.findall(r"^[ \t]*\[([^][]+)\]", "\n".join(lines[:line]), re.MULTILINE)
        hint = (
            _about_line(here) or _about_shape(here, str(error), table[-1] if table else "") or _about_names(str(error))
        )
        shown = lines_around(lines, line)
        raise InputError(f"{path} is not a valid TOML file: {error}.{hint}{shown}") from error


def _about_line(line: str) -> str:
    """Return what is probably wrong with a line of TOML.

    >>> _about_line("lr = 0,1")
    ' Write decimals with a point, as in 0.1.'
    >>> _about_line('name = "garden')
    ' Is a quote (") missing at the end of a text?'
    """
    if (line.count('"') - line.count('\\"')) % 2 and "'" not in line:
        return ' Is a quote (") missing at the end of a text?'
    word = re.search(r"=\s*([A-Za-z_][^\s,}#]*)\s*(?:$|[,}#])", line)
    if re.search("[“”„‟‘’‚«»]", line):
        return ' Write straight quotes (") instead of curly ones.'
    if re.search("[\u00a0\u2007\u200b\u202f]", line):
        return " This line has a non-breaking or invisible space, perhaps copied from a web page: type an ordinary one."
    if re.search(r"=\s*[+-]?\d+,\d", line):
        return " Write decimals with a point, as in 0.1."
    if "\\" in line:
        return BACKSLASH
    if word and word[1].lower() in ("true", "false"):
        return f" Write {word[1].lower()} in lower case."
    return f' Text needs quotes: "{word[1]}".' if word else ""


def _about_shape(line: str, error: str, table: str) -> str:
    """Return what is probably wrong with the shape of a line in a table: braces, a key without a value, a comma.

    >>> _about_shape("fedavg", "Expected '=' after a key in a key/value pair", "algorithm")
    ' Every key needs a value: an algorithm with its defaults is `fedavg = {}`.'
    """
    if "Unclosed inline table" in error or (line.count("{") > line.count("}") and "key part" in error):
        return " What begins with { must end with } on the same line: write the whole table in one line."
    if re.search(r",\s*}", line) and "key part" in error:
        return " Leave out the comma before }."
    if bare := re.match(r"""\s*([\w."'-]+)\s*=?\s*(?:#.*)?$""", line):
        word = bare[1]
        shown = f"an algorithm with its defaults is `{word} = {{}}`" if table == "algorithm" else f"write `{word} = …`"
        return f" Every key needs a value: {shown}."
    if re.search(r"=.*,", line) and error.startswith("Expected newline"):
        return " Write each key on a line of its own, without a comma after it."
    return ""


def _about_names(error: str) -> str:
    """Return what an error of the TOML parser means that is about a name."""
    twice = "Cannot overwrite", "Cannot declare", "Duplicate inline table key"
    return " It is in the file twice: keep one of them, and put the keys of a table together." * error.startswith(twice)


def json_text(content: Any, indent: int | None = None) -> str:
    """Return content as JSON, which has no NaN and no infinity: they are null.

    >>> json_text({"low": math.nan, "values": (1.5, math.inf)})
    '{"low": null, "values": [1.5, null]}'
    """
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def toml_value(text: str) -> Any:
    """Return the value that a text is in TOML; raise ValueError if it is none.

    >>> toml_value("[1, 'two']")
    [1, 'two']
    """
    return tomllib.loads(f"value = {text}")["value"]


def toml_text(value: Any) -> str:
    """Return a value of a TOML file as the text that `toml_value` reads, in one line.

    >>> toml_text({"name": "dirichlet", "alphas": [0.3, 1e9], "my label": True})
    '{ name = "dirichlet", alphas = [0.3, 1000000000.0], "my label" = true }'
    """
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_assignments(value)) + " }" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")  # which JSON allows, and TOML does not
    return str(value).lower() if isinstance(value, bool) else str(value)


def toml_file(tables: Mapping[str, Any]) -> str:
    """Return a TOML file with a line for each key: tables inside of tables are in one line, as people write them.

    >>> print(toml_file({"rounds": 3, "data": {"partition": {"name": "iid"}}}))
    rounds = 3
    <BLANKLINE>
    [data]
    partition = { name = "iid" }
    """
    top = {key: value for key, value in tables.items() if not isinstance(value, Mapping)}
    lines = [*_assignments(top)]
    for name, table in tables.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{_toml_key(name)}]", *_assignments(table)]
    return "\n".join(lines)


def _assignments(table: Mapping[str, Any]) -> Iterator[str]:
    return (f"{_toml_key(key)} = {toml_text(value)}" for key, value in table.items())


def _toml_key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else toml_text(name)


def sha256(file: Path | BinaryIO | GzipFile) -> str:
    """Return the SHA-256 of a file, or of what is left in an open one, which may be larger than memory."""
    digest = hashlib.sha256()
    with file.open("rb") if isinstance(file, Path) else nullcontext(file) as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
