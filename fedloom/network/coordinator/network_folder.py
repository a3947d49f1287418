"""The coordinator's files: the folder `network` of a run, which only its owner may read.

It holds the ledger with the accepted updates (`ledger.py`), the certificates (`certificates.py`), a file for every
one-time token, the operator's token, and the initial weights that agents fetch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from fedloom.errors import InputError, StoreError
from fedloom.experiment.run_folder import claimed, locked
from fedloom.files import replacing, write_private
from fedloom.network.coordinator.ledger import RESTORE, Ledger, Row
from fedloom.network.protocol.certificates import fingerprint, first_certificate, local_authority
from fedloom.network.protocol.tensors import Parcel
from fedloom.network.protocol.token import Token

CERTIFICATE = ("ca.pem", "server.pem", "server.key")
SUCCESSOR = "successor"  # the folder of the certificate that will follow
TOKEN_LASTS = 7 * 86400.0  # seconds


@dataclass(frozen=True)
class Identity:
    """What agents know a coordinator by, and it them: certificate, tokens and enrolled agents. It outlives a run."""

    files: dict[str, bytes]
    rows: dict[str, list[Row]]
    fingerprint: str

    @staticmethod
    def of(folder: Path) -> Identity:
        """Return the identity of a run's coordinator."""
        network, names = folder / "network", (*CERTIFICATE, "operator.token")
        with closing(coordinator_ledger(folder)) as ledger:
            paths = [*(network / name for name in names), *(network / "tokens").glob("*.token")]
            files = {str(path.relative_to(network)): path.read_bytes() for path in paths if path.is_file()}
            return Identity(files, ledger.identity(), ledger.fact("fingerprint") or "")

    def give(self, folder: Path) -> None:
        """Give it to a new run."""
        for name, content in self.files.items():
            write_private(folder / "network" / name, content)
        with closing(Ledger(folder / "network")) as ledger:
            ledger.adopt(self.rows)
            ledger.set_fact("fingerprint", self.fingerprint)


def prepare_folder(folder: Path, fresh: bool, like: Path | None = None, keep: bool = True) -> None:
    """Move an old run aside for a fresh start, before anything is written to the folder.

    A new run gets the identity of another one's coordinator (`like`), or of the one that was moved aside (`keep`).
    """
    network, before = folder / "network", None
    if fresh:
        if network.is_dir():
            with locked(network):  # fails while another coordinator waits for its agents
                pass
            if keep:
                with suppress(StoreError):  # a damaged one: then agents need new tokens
                    before = Identity.of(folder)
        with claimed(folder, fresh=True):
            pass
    if like is not None and not network.exists():
        before = Identity.of(like)
    if before is not None:
        before.give(folder)


def open_ledger(network: Path, held: ExitStack) -> Ledger:
    """Make the folder or continue in it, for this process alone until `held` is closed."""
    network.parent.mkdir(parents=True, exist_ok=True)
    network.mkdir(exist_ok=True)
    os.chmod(network, 0o700)
    with suppress(PermissionError):  # a volume that belongs to somebody else
        os.chmod(network.parent, 0o700)
    held.enter_context(locked(network))  # before anything in it is touched
    if not (network / "ledger.db").is_file() and any((network / name).exists() for name in ("server.key", "tokens")):
        raise StoreError(f"{network / 'ledger.db'} is missing, which knows the agents of this run. {RESTORE}")
    ledger = Ledger(network)
    ledger.check()
    ledger.sweep()
    return ledger


def coordinator_ledger(folder: Path) -> Ledger:
    """Open the ledger of a run's coordinator, which may be running."""
    if not (folder / "network" / "ledger.db").is_file():
        raise StoreError(f"{folder} is not the folder of a run of `fedloom serve`: it has no network/ledger.db.")
    return Ledger(folder / "network")


def invite(ledger: Ledger, count: int, lasts: float = TOKEN_LASTS, replaces: str | None = None) -> list[Path]:
    """Make one-time tokens, each in its own file, that expire after some seconds; or one for an agent's successor."""
    paths = []
    for _ in range(count):
        token = Token.new(ledger.fact("fingerprint") or "")
        ledger.invite(token.digest, lasts, replaces, late=bool(ledger.clients()))
        paths.append(token_file(ledger, token.digest))
        write_private(paths[-1], f"{token}\n".encode())
    return paths


def token_file(ledger: Ledger, digest: str) -> Path:
    """Return the file of a token."""
    return ledger.folder / "tokens" / f"{digest[:8]}.token"


def join_command(ledger: Ledger, token: Path) -> str:
    """Return the command with which an agent uses a token, at the address that was last served."""
    url = ledger.fact("url") or "https://HOST:PORT"
    return f"To join (once): fedloom join {url} --token {token.read_text().strip()} --site SITE.toml"


def withdraw(ledger: Ledger, name: str) -> int:
    """Delete an unused token, named by its file or the start of its hash, or all of them; return their number."""
    wanted = Path(name).name.removesuffix(".token")
    found = [row["digest"] for row in ledger.unused_tokens() if name == "all" or row["digest"][:8] == wanted]
    if not found and name != "all":
        known = ", ".join(row["digest"][:8] for row in ledger.unused_tokens()) or "none"
        raise InputError(f"There is no unused token '{name}'. Unused: {known}.")
    for digest in found:
        ledger.withdraw(digest)
        token_file(ledger, digest).unlink(missing_ok=True)
    return len(found)


def replace(ledger: Ledger, name: str, lasts: float) -> Path:
    """Revoke an agent; return the file of a token for its successor, which gets its number and its clients."""
    ledger.revoke(name)
    (agent,) = (row["agent"] for row in ledger.agents() if name in (row["name"], row["agent"]))
    return invite(ledger, 1, lasts, agent)[0]


def successor(network: Path) -> bytes:
    """Return the certificate that will follow the present one; empty if none is prepared."""
    path = network / SUCCESSOR / "ca.pem"
    return path.read_bytes() if path.is_file() else b""


def announced(network: Path, certificate: bytes) -> str:
    """Return the certificates that agents should trust: the present one, and the one that will follow it."""
    following = successor(network)
    return (certificate + (following if following != certificate else b"")).decode()


def prepare_successor(ledger: Ledger, certificate: Path | None = None) -> None:
    """Make the certificate that will follow the present one, or take yours. Agents hear of it with a heartbeat."""
    folder = ledger.folder / SUCCESSOR
    if certificate is not None:
        yours = first_certificate(certificate)
        shutil.rmtree(folder, ignore_errors=True)  # it may hold one that the coordinator made
        write_private(folder / "ca.pem", yours)
    elif (ledger.folder / "ca.pem").is_file():
        try:
            local_authority(folder)
        except InputError:  # what is there cannot be used
            shutil.rmtree(folder)
            local_authority(folder)
    else:
        raise InputError(f"{ledger.folder} has no certificate of its own: give your next one with --certificate.")


def unaware(ledger: Ledger) -> list[str]:
    """Return the names of agents that do not trust the successor of the present certificate yet."""
    present = str(ledger.fact("certificate") or "").encode()
    if successor(ledger.folder) in (b"", present):
        return []
    pins = hashlib.sha256(announced(ledger.folder, present).encode()).hexdigest()
    return [row["name"] for row in ledger.agents() if row["revoked"] is None and row["pins"] != pins]


def change_certificate(ledger: Ledger, tell: Callable[[str], None]) -> None:
    """Use the successor of the coordinator's own certificate, once every agent trusts it."""
    folder = ledger.folder / SUCCESSOR
    if not all((folder / name).is_file() for name in CERTIFICATE):
        return
    if names := unaware(ledger):
        tell(f"The next certificate is not used yet, because these agents do not know it: {', '.join(names)}.")
        return
    local_authority(folder)  # raises if its files do not belong together
    withdraw(ledger, "all")  # unused tokens name the present certificate
    for name in reversed(CERTIFICATE):  # a start after a crash repeats this
        write_private(ledger.folder / name, (folder / name).read_bytes())
    ledger.set_fact("fingerprint", fingerprint(successor(ledger.folder)))
    tell("The coordinator has a new certificate, which all agents know. Unused tokens were withdrawn.")


def set_certificate(ledger: Ledger, certificate: bytes) -> None:
    """Record which certificate is in use; forget the successor if that is it."""
    ledger.set_fact("certificate", certificate.decode())
    if successor(ledger.folder) == certificate:
        shutil.rmtree(ledger.folder / SUCCESSOR)


def set_certificate_aside(ledger: Ledger) -> None:
    """Move the certificate away, and withdraw the tokens that name it: the next start makes a new one."""
    with locked(ledger.folder):  # fails while the coordinator uses it
        withdraw(ledger, "all")
        ledger.set_fact("fingerprint", "")
        shutil.rmtree(ledger.folder / SUCCESSOR, ignore_errors=True)
        for name in CERTIFICATE:
            if (ledger.folder / name).is_file():
                (ledger.folder / name).replace(ledger.folder / f"{name}.old")


def operator_token(network: Path, fingerprint: str) -> tuple[Path, Token]:
    """Return the operator's token, which shows the agents' names; make it if it is missing."""
    path = network / "operator.token"
    if path.is_file():
        try:
            token = Token.parse(path.read_text(encoding="utf-8"))
        except (InputError, UnicodeDecodeError):
            raise InputError(f"{path} is damaged. Delete it: `fedloom serve` makes another.") from None
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
