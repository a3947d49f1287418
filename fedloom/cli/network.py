"""The commands of a real federation: serve, join, status, agents. They load what they need when you call them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from fedloom.cli.shared import AsJson, Changes, File, Fresh, Out, Quiet, finish, load, say, showing, stop_on_interrupt
from fedloom.errors import InputError

if TYPE_CHECKING:
    from fedloom.network.protocol.token import Token

agents_app = typer.Typer(no_args_is_help=True, help="List, invite and revoke the agents of a run.")

Folder = Annotated[Path, typer.Argument(help="The folder of a run of `fedloom serve`.", metavar="DIR")]
Url = Annotated[str, typer.Argument(help="The coordinator's address, such as https://host:8443.", metavar="URL")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(serve)
    app.command()(join)
    app.command()(status)
    app.add_typer(agents_app, name="agents")


def _needs_extra() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "httpx", "cryptography", "zstandard") if find_spec(name) is None]
    if missing:
        raise InputError(f"A real federation needs {', '.join(missing)}: pip install 'fedloom[network]'.")


def serve(
    file: File,
    changes: Changes = None,
    listen: Annotated[
        str, typer.Option(help="The address and port to listen on.", metavar="HOST:PORT")
    ] = "127.0.0.1:8443",
    local: Annotated[int, typer.Option(help="Rehearse with this many agents on this machine.", min=0)] = 0,
    out: Out = None,
    fresh: Fresh = False,
    certificate: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Your own TLS certificate (PEM, with its chain). Agents pin that certificate, not its CA."),
    ] = None,
    key: Annotated[Optional[Path], typer.Option(help="The certificate's private key (PEM).")] = None,  # noqa: UP045
    no_tls: Annotated[bool, typer.Option("--no-tls", help="Use plain HTTP, behind a proxy that has TLS.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment on other machines: wait for agents, then do what `run` does."""
    _needs_extra()
    from fedloom.network.coordinator.rehearsal import Rehearsal
    from fedloom.network.coordinator.serve import HttpsRun, prepare_folder

    if (certificate is None) != (key is None):
        raise InputError("--certificate and --key belong together: give both, or neither.")
    experiment = load(file, changes)
    folder = out or Path("runs") / experiment.name
    prepare_folder(folder, fresh)
    host, port = _address(listen)
    with showing(quiet) as progress:
        settings: dict[str, Any] = {
            "host": host,
            "port": port if not local or listen != "127.0.0.1:8443" else 0,
            "certificate": (certificate, key) if certificate and key else None,
            "tls": not no_tls,
            "tell": say if quiet else progress.note,
        }
        run = (experiment, folder)
        served = Rehearsal(*run, local, **settings) if local else HttpsRun(*run, **settings)
        with stop_on_interrupt() as should_stop:
            result = served.run(progress, should_stop)
    finish(result, served.experiment, folder, f"fedloom serve {file}" + (f" --out {out}" if out else ""), as_json)


def _address(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise InputError(f"--listen must be an address and a port, such as 0.0.0.0:8443. Got {listen!r} instead.")
    return host.strip("[]") or "0.0.0.0", int(port)


def join(
    url: Url,
    site: Annotated[Path, typer.Option(help="This site's file (TOML), with [site], [data] and [policy].")],
    token_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A file with the enrolment token; needed the first time."),
    ] = None,
    state: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="The folder for this agent's key and its clients' states (default: beside the site's file)."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Keep trying until you stop it, through restarts of either side.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would leave this site, without connecting.")
    ] = False,
    experiment: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="With --dry-run: an experiment file, to show what its algorithms would send."),
    ] = None,
    while_stdin: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Take part in a federation with this machine's data."""
    _needs_extra()
    from fedloom.network.agent.policy import load_site

    described = load_site(site)
    if dry_run:
        from fedloom.network.agent.dry_run import dry_run as dry_run_lines

        for line in dry_run_lines(described, experiment):
            print(line)
        return
    from fedloom.network.agent.enrolment import enrol, locked_state

    url = _checked(url)
    if while_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    token = _token(token_file)
    folder = state or site.resolve().with_name(f"{site.stem}-state")
    with locked_state(folder):
        enrol(url, token, described.name, folder, wait=wait, tell=say)
        from fedloom.network.agent.agent import Agent

        said = Agent(described, folder, wait=wait, tell=say).run()
    say(said)


def _end_with_stdin() -> None:
    """End when the process that started this one ends."""
    import os

    while os.read(0, 1):
        pass
    os._exit(0)


def status(
    url: Url,
    token_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="The operator's token, whose path `serve` prints: shows names, not only numbers."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the agents of a run, what they are doing, and which ones the coordinator is waiting for."""
    _needs_extra()
    from fedloom.network.agent.enrolment import fetch_status

    found = fetch_status(_checked(url), _token(token_file))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    left = f", {found['seconds_left']:.0f} s left" if found["seconds_left"] is not None else ""
    if token_file is None:
        states = ", ".join(f"{count} {state}" for state, count in found["agents"].items() if count)
        print(f"agents: {states or 'none'}; {found['awaited_clients']} client(s) awaited{left}")
    else:
        print(found["stage"])
        awaited = [one["name"] for one in found["agents"] if one["awaited"]]
        if awaited:
            print(f"awaited: {', '.join(awaited)} ({found['awaited_clients']} client(s){left})")
    print(f"answers accepted: {found['accepted']}, rejected: {found['rejected']}")
    for one in found["agents"] if token_file is not None else ():
        why = f" ({one['why']})" if one["why"] else ""
        seen = f"seen {one['seconds_since_seen']:.0f} s ago"
        print(f"{one['name']:<24} {one['state']:<8} {one['clients']:>4} client(s)  {one['doing']:<40} {seen}{why}")
    if token_file is None:
        print("Add --token-file RUN/network/operator.token (on the coordinator's machine) to see names and stages.")


def _checked(url: str) -> str:
    if not url.startswith(("https://", "http://")):
        raise InputError(f"The coordinator's address must begin with https://. Got {url!r} instead.")
    return url.rstrip("/")


def _token(file: Path | None) -> Token | None:
    from fedloom.network.protocol.token import Token

    if file is None:
        return None
    if not file.is_file():
        raise InputError(f"There is no token file {file}.")
    return Token.parse(file.read_text(encoding="utf-8"))


@agents_app.command("list")
def list_agents(folder: Folder, as_json: AsJson = False) -> None:
    """List the enrolled agents."""
    from datetime import datetime, timezone

    from fedloom.network.coordinator.serve import coordinator_ledger

    ledger = coordinator_ledger(folder)
    rows = [{key: row[key] for key in ("agent", "name", "enrolled", "revoked")} for row in ledger.agents()]
    unused = ledger.unused_tokens()
    ledger.close()
    if as_json:
        print(json.dumps({"agents": rows, "unused_tokens": unused}, indent=2))
        return
    for row in rows:
        when = datetime.fromtimestamp(row["enrolled"], timezone.utc).isoformat(timespec="seconds")
        print(f"{row['name']:<24} {row['agent']}  enrolled {when}{'  REVOKED' if row['revoked'] else ''}")
    print(f"{len(rows)} agent(s), {unused} unused token(s).")


@agents_app.command()
def revoke(folder: Folder, name: Annotated[str, typer.Argument(help="The agent's name or number.")]) -> None:
    """Reject an agent's requests from now on."""
    from fedloom.network.coordinator.serve import coordinator_ledger

    ledger = coordinator_ledger(folder)
    try:
        ledger.revoke(name)
    finally:
        ledger.close()
    print(f"Revoked {name}.")


@agents_app.command("invite")
def invite_agents(
    folder: Folder, count: Annotated[int, typer.Option(help="The number of tokens.", min=1, max=1000)] = 1
) -> None:
    """Make enrolment tokens: one for each agent that will join."""
    _needs_extra()
    from fedloom.network.coordinator.serve import coordinator_ledger, invite

    ledger = coordinator_ledger(folder)
    for path in invite(ledger, folder / "network", ledger.fact("fingerprint") or "", count):
        print(path)
    ledger.close()
