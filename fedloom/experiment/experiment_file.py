"""The experiment file: from TOML to an experiment, and back to what decides its result."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge
from pydantic import Strict

from fedloom import files, user_code
from fedloom.algorithm import Algorithm
from fedloom.algorithms import ALGORITHMS
from fedloom.clock.system import System
from fedloom.compression.table import CompressTable
from fedloom.data.sources import Source, source
from fedloom.data.sources.base import expanded, locate
from fedloom.data.sources.csv import AGREED_KEYS
from fedloom.data.split import Split
from fedloom.errors import SYNONYMS, UNKNOWN, InputError, ParameterError, nearest, unknown
from fedloom.experiment.description import short
from fedloom.experiment.key_homes import home
from fedloom.experiment.tables import DataTable, EvaluateTable, RunTable, TaskTable
from fedloom.federation.sampling import Sampling
from fedloom.files import read_toml
from fedloom.privacy.table import PrivacyTable
from fedloom.record import Record, Whole
from fedloom.training.local import Training

__all__ = ["Experiment", "check_label", "load", "parse", "read_toml"]

R = TypeVar("R", bound=Record)


class Experiment(Record):
    """A parsed experiment file."""

    format: Literal[1] = 1
    """The version of the file format."""
    name: str = "experiment"
    """The experiment's name. Results go to `runs/NAME`."""
    rounds: Annotated[int, Strict(), Ge(0)] = 10
    """The number of rounds. 0 only evaluates the model in `task.init`, a safetensors file."""
    seeds: tuple[Whole, ...] = (1,)
    """Every algorithm runs with every seed. A number stands for that many: 3 is [1, 2, 3]."""
    data: DataTable = DataTable()
    """The data and how it is divided."""
    source: Source
    """The source that `data.source` names, with its own keys."""
    task: TaskTable = TaskTable()
    """What is learnt."""
    train: Training = Training()
    """How clients train. An algorithm may override any of these keys."""
    cohort: Sampling = Sampling()
    """Which clients take part in a round."""
    evaluate: EvaluateTable = EvaluateTable()
    """What is measured."""
    privacy: PrivacyTable = PrivacyTable()
    """What nobody can learn about a client."""
    system: System | None = None
    """Clients as machines. With this table, a simulation has a virtual clock."""
    compress: CompressTable = CompressTable()
    """How messages are made smaller."""
    algorithm: dict[str, Algorithm]
    """The algorithms to compare, by label."""
    names: dict[str, str]
    """The name of each label's algorithm."""
    run: RunTable = RunTable()
    """How the experiment is computed. These keys never change the results."""
    base: Path = Path()
    """The folder that relative paths start at."""

    @property
    def has_data(self) -> bool:
        """Whether the file has a [data] table. One that is served needs none: the agents bring their data."""
        return bool(self.data.model_fields_set - {"preprocessing"} or self.source.model_fields_set)

    @property
    def server_has_all(self) -> bool:
        """Whether all data of the file is the server's, so that it can only be served."""
        return self.data.server == 1.0 and isinstance(self.data.server, float)

    def choose(self, labels: Collection[str]) -> Experiment:
        """Return the same experiment with some of its algorithms; in a label, * matches anything."""
        for wanted in labels:
            if not any(fnmatchcase(label, wanted) for label in self.algorithm):
                raise unknown("algorithm in the file", wanted, self.algorithm)
        chosen = [label for label in self.algorithm if any(fnmatchcase(label, wanted) for wanted in labels)]
        parts = {key: {label: getattr(self, key)[label] for label in chosen} for key in ("algorithm", "names")}
        return self.replace(**parts)  # type: ignore[no-any-return]

    def resolved(self, defaults: bool = True) -> dict[str, Any]:
        """Return every key with its value as in a file, or only what differs from the defaults."""
        tables = {name: _values(table, defaults) for name in TABLES if (table := getattr(self, name)) is not None}
        data, run = {**tables.pop("data"), "source": self.data.source}, tables.pop("run")
        algorithms, train = {}, _values(self.train)
        for label, algorithm in self.algorithm.items():
            fields = _values(algorithm, defaults)
            fields.pop("train", None)
            changed = {key: value for key, value in _values(algorithm.train).items() if train.get(key) != value}
            algorithms[label] = {"name": self.names[label], **fields, **changed}
        if not defaults:
            tables = {name: table for name, table in tables.items() if table}
        return {
            **self.model_dump(mode="json", include={*_NO_TABLES}),
            "data": {"source": data.pop("source"), **_values(self.source, defaults), **data},
            **tables,
            "algorithm": algorithms,
            **({"run": run} if run else {}),
        }

    def as_written(self) -> dict[str, Any]:
        """Return every key with its value. Of data that agents bring, there is only what they agreed on."""
        values, agreed = self.resolved(), self.data.preprocessing
        if not self.has_data:
            del values["data"]
        if not self.has_data and agreed is not None:
            values["data"] = {"preprocessing": str(agreed)}
        elif agreed is not None:  # that file decides these keys, and their defaults would contradict it
            for key in {*AGREED_KEYS} - self.source.model_fields_set:
                values["data"].pop(key, None)
        return values

    def description(self) -> dict[str, Any]:
        """Return what decides the result: all but `rounds` and `[run]`, with hashes of your code and files."""
        described = {key: value for key, value in self.resolved().items() if key not in ("rounds", "run")}
        described["cohort"] = self.cohort.identity(in_virtual_time=self.system is not None)
        if self.system is not None:
            described["system"] = described_system(self.system, self.base)
        for table in ("privacy", "compress"):
            if not described[table]:  # files of versions without this table have the same identity
                del described[table]
        code = {name: user_code.code_hash(file) for name, file in self.code_files().items()}
        named = {name: files.sha256(file) for name, file in self.named_files().items()}
        # without files there is an empty table: only older descriptions have none, and cannot say what was there
        return described | ({"code": code} if code else {}) | {"files": named}

    def named_files(self) -> dict[str, Path]:
        """Return the files that training reads, besides data and code: initial weights, and arguments of your code.

        Your code opens a name where it likes: beside the experiment, or in the working directory.
        """
        given = _texts(self.task.args) if user_code.is_code(self.task.model) else []
        for label, name in self.names.items():
            if user_code.is_code(name):
                given += _texts(_values(self.algorithm[label]))
        paths = {name: self.base / name for name in (self.task.init, *given)}
        if (agreed := self.data.preprocessing) is not None:
            paths[str(agreed)] = self.base / expanded(agreed)
        found = {name: path for name, path in paths.items() if os.path.isfile(path)}
        here = {name: Path(name) for name in given if os.path.isfile(name)}
        apart = {name: path for name, path in here.items() if name not in found or not path.samefile(found[name])}
        return found | {f"{name} in the working directory": path for name, path in apart.items()}

    def code_files(self) -> dict[str, Path]:
        """Return your own code files: those that the experiment names, and those that they import, by their paths."""
        names = [self.data.source, self.task.model, self.task.loss, *(self.task.metrics or ()), *self.names.values()]
        files = {name: user_code.code_file(name, self.base) for name in names if user_code.is_code(name)}
        own = {name: file for name, file in files.items() if file is not None}
        beside = [one for file in own.values() for one in user_code.imported_beside(file)]
        return own | {Path(os.path.relpath(one, self.base.resolve())).as_posix(): one for one in beside}


def described_system(system: System, base: Path) -> dict[str, Any]:
    """Return what [system] decides: its values, and fingerprints of the files that it names."""
    try:
        named = {str(file): files.sha256(locate(base, file)) for file in system.files()}
    except OSError as error:
        raise InputError(f"[system] {error.filename} cannot be read: {error.strerror}.") from error
    return {**_values(system), **({"files": named} if named else {})}


def _texts(value: Any) -> list[str]:
    """Return all texts in lists and tables."""
    if isinstance(value, (Mapping, list, tuple)):
        parts = value.values() if isinstance(value, Mapping) else value
        return [text for part in parts for text in _texts(part)]
    return [value] if isinstance(value, str) else []


def _values(record: Record, defaults: bool = True) -> dict[str, Any]:
    values = record.model_dump(mode="json", exclude_none=True)
    if defaults:
        return values
    # pydantic's own exclude_defaults would also leave out keys of tables inside, such as the name of a method
    usual = {key: field.get_default(call_default_factory=True) for key, field in type(record).model_fields.items()}
    return {key: value for key, value in values.items() if key not in usual or getattr(record, key) != usual[key]}


TABLES: dict[str, type[Record]] = {
    "data": DataTable,
    "task": TaskTable,
    "train": Training,
    "cohort": Sampling,
    "evaluate": EvaluateTable,
    "privacy": PrivacyTable,
    "system": System,
    "compress": CompressTable,
    "run": RunTable,
}
MOST_SEEDS = 1000  # as a number: more is somebody's single seed, such as 20261117
NO_DATA = "Without [data], only `fedloom serve` can run this: agents bring their data."
_NO_TABLES = ("format", "name", "rounds", "seeds")
_TOP = (*_NO_TABLES, *TABLES, "algorithm")


def load(path: Path, changes: Mapping[str, Any] | None = None) -> Experiment:
    """Read an experiment file; `changes` are `{"table.key": value}` from the command line."""
    if path.is_dir():
        raise InputError(f"{path} is a folder, not an experiment file. `fedloom init` writes one.")
    if not path.is_file():
        raise InputError(f"There is no experiment file {path}. `fedloom init` writes one.")
    values = read_toml(path)
    for dotted, value in (changes or {}).items():
        change(values, dotted, value)
    if (path.parent / "run.db").is_file() and (code := sorted(code_names(values))):
        raise InputError(
            f"{path} belongs to a run's folder, whose files somebody else may have written, and names code "
            f"({code[0]}). Nothing was loaded. Use the experiment file that was run, which has its code beside it."
        )
    return parse(values, path.resolve().parent, default_name=path.stem)


def code_names(values: Mapping[str, Any]) -> set[str]:
    """Return the names of code that a file's tables use, before anything is checked or loaded."""
    tables = [values.get("data"), values.get("task")]
    labels = values.get("algorithm")
    tables += [*labels.values()] if isinstance(labels, Mapping) else []
    found = {one.get(key) for one in tables if isinstance(one, Mapping) for key in ("source", "model", "loss", "name")}
    measured = tables[1].get("metrics") if isinstance(tables[1], Mapping) else ()
    found |= {*measured} if isinstance(measured, list) else set()
    return {name for name in found if isinstance(name, str) and user_code.is_code(name)}


def change(values: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a key of a file's tables in place. A label of the file may have dots."""
    keys = dotted.split(".")
    while len(keys) > 1:
        count = next((n for n in range(len(keys) - 1, 1, -1) if ".".join(keys[:n]) in values), 1)
        table, keys = ".".join(keys[:count]), keys[count:]
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise InputError(f"--set {dotted}: '{table}' is a value, not a table.")
    values[keys[0]] = value


def parse(values: Mapping[str, Any], base: Path = Path(), default_name: str = "experiment") -> Experiment:
    """Make an experiment from the tables of a file."""
    check_tables(values)
    data, source = _data(values.get("data", {}))
    train = read(Training, "train", values.get("train", {}))
    algorithms, names = {}, {}
    wrong: list[InputError] = []  # of all algorithms, so that you need not find them one by one
    for label, fields in (values.get("algorithm") or {"fedavg": {}}).items():
        try:
            names[label], algorithms[label] = _algorithm(label, fields, values.get("train", {}), base)
        except InputError as error:
            wrong.append(error)
    if wrong:
        raise InputError("\n".join(dict.fromkeys(map(str, wrong)))) if len(wrong) > 1 else wrong[0]
    given = {"task": {"model": usual_model(values.get("data", {})), **values.get("task", {})}}
    tables = {
        name: read(TABLES[name], name, {**values, **given}.get(name, {}))
        for name in ("task", "cohort", "evaluate", "privacy", "system", "compress", "run")
        if name != "system" or name in values
    }
    top = {key: values[key] for key in _NO_TABLES if key in values}
    if "seeds" in top:
        top["seeds"] = seed_list(top["seeds"])
    check_top(top)
    rest = {"data": data, "source": source, "train": train, "algorithm": algorithms, "names": names, "base": base}
    try:
        return Experiment(**{"name": default_name, **top}, **rest, **tables)
    except ParameterError as error:
        raise InputError(f"{error.parameter} {error.problem}.{error.advice}") from None


def usual_model(data: Mapping[str, Any]) -> str:
    """Return the model of a file that names none: for a table, one that takes any number of features."""
    is_table = data.get("source") == "csv" or {*data} == {"preprocessing"}
    usual: str = TaskTable.model_fields["model"].default
    return "mlp" if is_table else usual


def check_tables(values: Mapping[str, Any]) -> None:
    """Check that a file has only known tables and keys at its top."""
    for key, value in values.items():
        if key not in _TOP:
            field = SYNONYMS.get(key, key)
            inside = [f"{name}.{field}" for name, table in TABLES.items() if field in table.model_fields]
            meant = ", ".join([*(one for one in _TOP if one.startswith(key)), *inside])
            said = (
                f" Did you mean {meant}?"
                if inside
                else home(key, "", (), {})
                if key in ALGORITHMS
                else nearest(key, _TOP)
            )
            raise InputError(
                f"An experiment file has no table or key '{key}' (= {short(value)}). Known: {', '.join(_TOP)}.{said}"
            )
        if key not in _NO_TABLES:
            _check(value, Mapping, f"'{key}'", f"a table: [{key}]")


def seed_list(seeds: Any) -> Any:
    """Return the seeds that a number stands for; anything else as it is.

    >>> seed_list(3), seed_list([7])
    ([1, 2, 3], [7])
    """
    if type(seeds) is not int:
        return list(seeds) if isinstance(seeds, (tuple, range)) else seeds
    if not 1 <= seeds <= MOST_SEEDS:
        raise InputError(
            f"seeds = {seeds} is a number of seeds, from 1 to {MOST_SEEDS:,}: 3 is [1, 2, 3]. For this one seed, write "
            f"seeds = [{seeds}]."
        )
    return list(range(1, seeds + 1))


def check_top(top: Mapping[str, Any]) -> None:
    """Check the keys above all tables."""
    if top.get("format", 1) != 1:
        raise InputError(f"format = {top['format']} is not known: this fedloom reads format = 1.")
    seeds = top.get("seeds", [1])
    if not isinstance(seeds, (list, tuple)) or not seeds or any(type(seed) is not int for seed in seeds):
        raise InputError(
            "seeds must be a list of whole numbers, such as [1, 2, 3], or how many there are. "
            f"Got {short(seeds)} instead."
        )
    if any(abs(seed) >= 2**62 for seed in seeds):
        raise InputError(f"seeds must be smaller than 2^62. Got {short(seeds)} instead.")
    if len(set(seeds)) != len(seeds):
        raise InputError(f"seeds has a number twice: {list(seeds)}. Every seed is a separate run.")
    name = top.get("name", "")
    if not isinstance(name, str) or "/" in name or "\0" in name or name.startswith("."):
        raise InputError(f"name must be a word that can be a folder's name. Got {short(name)} instead.")


def _check(value: Any, kind: type, key: str, what: str) -> None:
    if not isinstance(value, kind):
        raise InputError(f"{key} must be {what}. Got {short(value)} instead.")


def read(record: type[R], table: str, values: Mapping[str, Any]) -> R:
    """Read a table as a record; errors name the table."""
    try:
        return record(**values)
    except ParameterError as error:
        raise InputError(f"{error.at(table)}{_home(error, table)}") from None


def _home(error: ParameterError, table: str) -> str:
    return home(error.parameter, table, _NO_TABLES, TABLES) if error.problem == UNKNOWN else ""


def _data(values: Mapping[str, Any]) -> tuple[DataTable, Source]:
    name = values.get("source", DataTable.model_fields["source"].default)
    _check(name, str, "[data] source", "a string")
    kind = source(name)
    common = {key: value for key, value in values.items() if key in DataTable.model_fields}
    own = {key: value for key, value in values.items() if key not in DataTable.model_fields}
    try:
        loader = kind(**own)
    except ParameterError as error:
        if error.problem != UNKNOWN:
            raise InputError(error.at("data")) from None
        known = sorted({*DataTable.model_fields, *kind.model_fields})
        raise InputError(
            f"[data] has no key '{error.parameter}' (= {short(own[error.parameter])}). "
            f'Known for source = "{name}": {", ".join(known)}.'
            f"{nearest(error.parameter, known)}{_home(error, 'data')}"
        ) from None
    if isinstance(split := common.get("split"), Mapping):
        common["split"] = read(Split, "data.split", split)
    return read(DataTable, "data", common), loader


def algorithm_class(name: str, base: Path) -> type[Algorithm]:
    """Find an algorithm by its name, by an installed package's entry point, or in your own code."""
    if user_code.is_code(name):
        found = user_code.code(name, base, Algorithm)
        if not (isinstance(found, type) and issubclass(found, Algorithm)):
            raise InputError(f"'{name}' is not an Algorithm: it must be a class that inherits from fedloom.Algorithm.")
        return found
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    from importlib.metadata import entry_points

    for entry in entry_points(group="fedloom.algorithms"):
        if entry.name == name:
            return entry.load()  # type: ignore[no-any-return]
    raise unknown("algorithm", name, ALGORITHMS, "or your own as 'file.py:Class'")


def check_label(label: object) -> None:
    """Check a label, which names folders and columns."""
    if not isinstance(label, str) or not re.fullmatch(r"[^\W_][\w.+-]*( [\w.+-]+)*", label):
        raise InputError(
            f"An algorithm's label must be made of letters, digits, and . _ + - between them. Got {label!r} instead."
        )


def _algorithm(label: str, fields: Any, train: Mapping[str, Any], base: Path) -> tuple[str, Algorithm]:
    check_label(label)
    table = f"algorithm.{label}"
    _check(fields, Mapping, f"[{table}]", f'a table, such as {label} = {{ name = "fedavg" }}')
    own = dict(fields)
    name = own.pop("name", label)
    _check(name, str, f"[{table}] name", "a string")
    try:
        kind = algorithm_class(name, base)
    except InputError as error:
        raise InputError(f"{error}{_dotted(label, own)}") from None
    of_training = [key for key in own if key in Training.model_fields and key not in kind.model_fields]
    overrides = {key: own.pop(key) for key in of_training}
    inner = own.pop("train", {})
    _check(inner, Mapping, f"[{table}] train", "a table")
    try:
        return name, kind(**own, train={**train, **inner, **overrides})
    except ParameterError as error:
        where = "train" if error.parameter in train and error.parameter not in fields else table
        hint = _dotted(label, {error.parameter: own.get(error.parameter)}) if error.problem == UNKNOWN else ""
        raise InputError(f"{error.at(where)}{hint or _home(error, table)}") from None
    except InputError as error:
        raise InputError(f"[{table}] {error}") from None


def _dotted(label: str, fields: Mapping[str, Any]) -> str:
    """Say so if TOML has divided a label at its dots, into a label and tables inside."""
    usual = {*Training.model_fields, *(key for kind in ALGORITHMS.values() for key in kind.model_fields)}
    for key, value in fields.items():
        if isinstance(value, Mapping) and key not in usual:
            whole = f"{label}.{key}"
            hint = f' In TOML, a dot divides a key: is the label meant to be "{whole}"? Write it in quotes.'
            return _dotted(whole, value) or hint
    return ""
