"""`fedloom flower app`: write an experiment as a Flower app for a SuperLink and SuperNodes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from string import Template
from typing import Any

import tomli_w

from fedloom import __version__, user_code
from fedloom.errors import InputError
from fedloom.experiment.experiment_file import Experiment
from fedloom.network.agent.policy import written_data
from fedloom.network.coordinator.network_run import federated
from fedloom.network.protocol.code_fingerprint import code_files
from fedloom.privacy.protection import check_plan

TEMPLATES = Path(__file__).parent / "templates"


def write_app(experiment: Experiment, folder: Path) -> list[str]:
    """Write the app's files, and return notes about what was left out of the experiment."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not an empty folder: choose another one for the app.")
    experiment, notes = federated(experiment)
    check_app(experiment)
    values = experiment.resolved()
    values["data"] = {
        key: _absolute(value, experiment.base) if _may_be_path(experiment, key) else value
        for key, value in written_data(experiment).items()
    }
    if experiment.task.init not in ("torch", "glorot"):
        values["task"]["init"] = _absolute(experiment.task.init, experiment.base)
    for label in set(values["algorithm"]) - set(experiment.algorithm):
        del values["algorithm"][label]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The app cannot be written to {folder}: {error.strerror}.") from None
    task = experiment.task
    for name in (experiment.data.source, task.model, task.loss, *(task.metrics or ()), *experiment.names.values()):
        _copy_code(name, experiment.base, folder)
    (folder / "experiment.toml").write_text(tomli_w.dumps(values), encoding="utf-8")
    name = re.sub("[^a-z0-9]+", "-", experiment.name.lower()).strip("-") or "experiment"
    for template in TEMPLATES.iterdir():
        text = Template(template.read_text(encoding="utf-8")).substitute(name=name, version=__version__)
        (folder / template.name.removesuffix(".in")).write_text(text, encoding="utf-8")
    return notes


def check_app(experiment: Experiment) -> None:
    """Raise `InputError` if an experiment cannot run on Flower."""
    if experiment.privacy.secure_aggregation is not None:
        raise InputError(
            "[privacy] secure_aggregation keeps keys in memory from stage to stage of a round, and on Flower a "
            "client's process may end after every message. Use `fedloom serve`, or leave it out."
        )
    if experiment.cohort.mode == "async":
        raise InputError(
            '[cohort] mode = "async" keeps clients at work across rounds, and a message over Flower belongs to one '
            "round. Use `fedloom serve`, or leave it out."
        )
    check_plan(experiment.privacy, experiment.cohort, experiment.algorithm)


def _may_be_path(experiment: Experiment, key: str) -> bool:
    """Return whether a value may be a path: keys of type Path, and all keys of your own loader.

    Other values, such as a column, may only look like a path because a folder has the same name.
    """
    own = user_code.is_code(experiment.data.source)
    return key != "source" and (own or isinstance(getattr(experiment.source, key, None), Path))


def _absolute(value: Any, base: Path) -> Any:
    """Make a value absolute if it is a path that exists here: the app will be unpacked elsewhere."""
    path = base / value if isinstance(value, str) and value else None
    return str(path.resolve()) if path is not None and path.exists() else value


def _copy_code(name: str, base: Path, folder: Path) -> None:
    """Copy your own code, and what it imports beside it, into the app. Sites refuse it unless policies name it."""
    for path in code_files(name, base) if user_code.is_code(name) else ():
        if path.startswith(".."):
            raise InputError(f"'{name}': {path} is outside the experiment's folder {base}, so the app cannot have it.")
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(base / path, target)
