"""The coordinator's files: the folder `network` of a run, which only its owner may read.

It holds the ledger with the accepted updates (`ledger.py`), the certificates (`certificates.py`), a file for every
one-time token, the operator's token, and the initial weights that agents fetch.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from fedloom.errors import StoreError
from fedloom.experiment.run_folder import claimed, locked
from fedloom.files import replacing, write_private
from fedloom.network.coordinator.ledger import Ledger
from fedloom.network.protocol.tensors import Parcel
from fedloom.network.protocol.token import Token


def prepare_folder(folder: Path, fresh: bool) -> None:
    """Move an old run aside for a fresh start, before anything is written to the folder."""
    if fresh:
        if (folder / "network").is_dir():
            with locked(folder / "network"):  # fails while another coordinator waits for its agents
                pass
        with claimed(folder, fresh=True):
            pass


def open_ledger(network: Path, held: ExitStack) -> Ledger:
    """Make the folder or continue in it, for this process alone until `held` is closed."""
    network.mkdir(parents=True, exist_ok=True)
    held.enter_context(locked(network))  # before anything in it is touched
    ledger = Ledger(network)
    os.chmod(network, 0o700)
    ledger.sweep()
    return ledger


def coordinator_ledger(folder: Path) -> Ledger:
    """Open the ledger of a run's coordinator, which may be running."""
    if not (folder / "network" / "ledger.db").is_file():
        raise StoreError(f"{folder} is not the folder of a run of `fedloom serve`: it has no network/ledger.db.")
    return Ledger(folder / "network")


def invite(ledger: Ledger, count: int) -> list[Path]:
    """Make one-time tokens, each in its own file."""
    paths = []
    for _ in range(count):
        token = Token.new(ledger.fact("fingerprint") or "")
        ledger.invite(token.digest)
        paths.append(ledger.folder / "tokens" / f"{token.digest[:8]}.token")
        write_private(paths[-1], f"{token}\n".encode())
    return paths


def operator_token(network: Path, fingerprint: str) -> tuple[Path, Token]:
    """Return the operator's token, which shows the agents' names; make it if it is missing."""
    path = network / "operator.token"
    if path.is_file():
        token = Token.parse(path.read_text(encoding="utf-8"))
        if token.fingerprint == fingerprint:
            return path, token
    token = Token.new(fingerprint)
    write_private(path, f"{token}\n".encode())
    return path, token


def initial_weights(network: Path, parcel: Parcel) -> Path:
    """Return the file with these initial weights; write it if it is missing."""
    path = network / "initial" / f"{parcel.sha256}.safetensors"
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        with replacing(path, "file") as temporary, open(temporary, "wb") as file:
            file.writelines(parcel.pieces())
    return path
