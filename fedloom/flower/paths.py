"""Folders of fedloom on a machine that runs Flower, derived from a SuperNode's --node-config. Does not import torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.errors import InputError
from fedloom.files import read_toml
from fedloom.user_code import code_file, is_code

ADDRESS = "worker.json"  # in the state folder: the worker's socket and its secret


def default_folder() -> Path:
    """Return the folder beside Flower's own files."""
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr").expanduser() / "fedloom"


def partition(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return number and count of the part of the clients that a node hosts, or None if it has a site file."""
    if "partition-id" not in config:
        return None
    number, count = config["partition-id"], config.get("num-partitions")
    if type(number) is not int or type(count) is not int or not 0 <= number < count:
        raise InputError(
            "The node-config needs whole numbers partition-id and num-partitions, such as "
            f'"partition-id=0 num-partitions=2". Got partition-id={number!r} and num-partitions={count!r}.'
        )
    return number, count


def state_folder(config: Mapping[str, Any]) -> Path:
    """Return the folder for a node's key and its clients' states."""
    if config.get("state"):
        return Path(str(config["state"])).expanduser().resolve()
    if config.get("site"):
        site = Path(str(config["site"])).expanduser().resolve()
        return site.with_name(f"{site.stem}-state")
    part = partition(config)
    if part is None:
        raise InputError(
            "The SuperNode's --node-config must say whose data this is: site='/path/of/site.toml', or, for a rehearsal "
            'with the experiment\'s own data, "partition-id=0 num-partitions=2".'
        )
    return default_folder() / "partitions" / f"{part[0]}-of-{part[1]}"


def data_mark(app: Path, config: Mapping[str, Any]) -> str:
    """Return a hash of the settings and code of a rehearsal's data: another app may have other data. "" for a site."""
    if config.get("site"):
        return ""
    data = read_toml(app / "experiment.toml")["data"]
    file = code_file(data["source"], app) if is_code(data["source"]) else None
    code = file.read_bytes() if file is not None else b""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode() + code).hexdigest()


def worker_address(state: Path) -> tuple[str, bytes, str] | None:
    """Return socket, secret and data mark of the worker of a state folder, or None if there is none."""
    try:
        found = json.loads((state / ADDRESS).read_text())
        return str(found["socket"]), bytes.fromhex(found["secret"]), str(found["data"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
