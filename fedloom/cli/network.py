"""The commands of a real federation: serve, join, status, agents. They load what they need when you call them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli import shared
from fedloom.cli.auditing import audit_app
from fedloom.cli.shared import AsJson, Changes, File, Fresh, Out, Quiet, command, load, need_network, print_result, say
from fedloom.errors import InputError

if TYPE_CHECKING:
    from fedloom.network.coordinator.ledger import Ledger
    from fedloom.network.protocol.token import Token

app = typer.Typer()
agents_app = typer.Typer(no_args_is_help=True, help="List, invite, replace and revoke the agents of a run.")

Folder = Annotated[Path, typer.Argument(help="The folder of a run of `fedloom serve`.", metavar="DIR")]
Url = Annotated[str, typer.Argument(help="The coordinator's address, such as https://host:8443.", metavar="URL")]
ADDRESS = "127.0.0.1:8443"


@command(app)
def serve(
    file: File,
    changes: Changes = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT")] = ADDRESS,
    local: Annotated[int, typer.Option(min=0)] = 0,
    out: Out = None,
    fresh: Fresh = False,
    agents_of: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    no_tls: bool = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment on other machines: wait for agents, then do what `run` does.

    listen: The address and port to listen on.
    local: Rehearse with this many agents on this machine.
    agents_of: The folder of an earlier served run: a new run keeps its certificate, tokens and enrolled agents.
    certificate: Your own TLS certificate (PEM, with its chain). Agents pin that certificate, not its CA.
    key: The certificate's private key (PEM).
    no_tls: Use plain HTTP, behind a proxy that has TLS.
    """
    need_network()
    from fedloom.network.coordinator.network_folder import prepare_folder
    from fedloom.network.coordinator.rehearsal import Rehearsal
    from fedloom.network.coordinator.serve import HttpsRun

    if (certificate is None) != (key is None):
        raise InputError("--certificate and --key belong together: give both, or neither.")
    experiment = load(file, changes)
    folder = out or Path("runs") / experiment.name
    prepare_folder(folder, fresh, agents_of, keep=not local)
    host, port = _address(listen)
    make: Callable[..., HttpsRun] = partial(Rehearsal, agents=local) if local else HttpsRun
    with shared.showing(quiet) as progress:
        served = make(
            experiment,
            folder,
            host=host,
            port=port if not local or listen != ADDRESS else 0,
            certificate=(certificate, key) if certificate else None,
            tls=not no_tls,
            tell=say if quiet else progress.note,
        )
        with shared.stop_on_interrupt() as should_stop:
            result = served.run(progress, should_stop)
    shared.finish(result, served.experiment, folder, as_json)


def _address(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise InputError(f"--listen must be an address and a port, such as 0.0.0.0:8443. Got {listen!r} instead.")
    return host.strip("[]") or "0.0.0.0", int(port)


@command(app)
def join(
    url: Url,
    site: Annotated[Path, typer.Option()],
    token: str | None = None,
    token_file: Path | None = None,
    state: Path | None = None,
    wait: bool = False,
    new_key: bool = False,
    dry_run: bool = False,
    experiment: Path | None = None,
    while_stdin: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Take part in a federation with this machine's data.

    site: This site's file (TOML), with [site], [data] and [policy].
    token: The enrolment token, as `fedloom serve` prints it; needed the first time.
    token_file: A file with the enrolment token instead; - reads it from stdin.
    state: The folder for this agent's key and its clients' states (default: beside the site's file).
    wait: Keep trying until you stop it, through restarts of either side.
    new_key: First replace this agent's key. The old one signs for the new one, so no token is needed.
    dry_run: Show what would leave this site, without connecting.
    experiment: With --dry-run: an experiment file, to show what its algorithms would send.
    """
    need_network()
    from fedloom.network.agent.policy import load_site

    described = load_site(site)
    folder = state or site.resolve().with_name(f"{site.stem}-state")
    if dry_run:
        from fedloom.network.agent.dry_run import dry_run as dry_run_lines

        for line in dry_run_lines(described, experiment, folder):
            print(line)
        return
    from fedloom.network.agent.enrolment import enrol, locked_state, registered, until_reached
    from fedloom.network.agent.loaded_experiment import check_data
    from fedloom.network.agent.new_key import change_key, next_key

    url = _checked(url)
    if while_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    given = _token(token_file, token)
    with locked_state(folder):
        if given is not None and given.digest != registered(folder).get("token"):
            check_data(described)
        enrol(url, given, described.name, folder, wait=wait, tell=say)
        if new_key or next_key(folder).exists():  # an earlier change was interrupted
            until_reached(lambda: change_key(folder), wait, say)
            say("This agent has a new key.")
        from fedloom.network.agent.agent import Agent

        said = Agent(described, folder, wait=wait, tell=say).run()
    say(said)


def _end_with_stdin() -> None:
    """End when the process that started this one ends."""
    while os.read(0, 1):
        pass
    os._exit(0)


@command(app)
def status(url: Url, token_file: Path | None = None, as_json: AsJson = False) -> None:
    """Show the agents of a run, what they are doing, and which ones the coordinator is waiting for.

    token_file: The operator's token, whose path `serve` prints: shows names, not only numbers.
    """
    need_network()
    from fedloom.network.agent.unsigned_requests import expecting_a_coordinator, fetch_status

    found = fetch_status(_checked(url), _token(token_file))
    with expecting_a_coordinator(url):
        lines = list(_status_lines(found, named=token_file is not None))
    print_result(as_json, found, lines)


def _status_lines(found: dict[str, Any], named: bool) -> Iterator[str]:
    left = f", {found['seconds_left']:.0f} s left" if found["seconds_left"] is not None else ""
    clients, agents = f"{found['awaited_clients']} client(s)", found["agents"]
    if named:
        yield found["stage"]
        awaited = ", ".join(one["name"] for one in agents if one["awaited"])
        if awaited:
            yield f"awaited: {awaited} ({clients}{left})"
    else:
        states = ", ".join(f"{count} {state}" for state, count in agents.items() if count)
        yield f"agents, by their last messages: {states or 'none'}; {clients} awaited{left}"
    yield f"answers since the coordinator started: {found['accepted']} accepted, {found['rejected']} rejected"
    for one in agents if named else ():
        why = f" ({one['why']})" if one["why"] else ""
        seen = f"heard from {one['seconds_since_seen']:.0f} s ago"
        yield f"{one['name']:<24} {one['state']:<8} {one['clients']:>4} client(s)  {one['doing']:<40} {seen}{why}"
    if named and agents:
        yield (
            f"A state is what an agent last said. Not heard from for {found['silent_after']:.0f} s, it is silent; for "
            f"{found['gone_after']:.0f} s, gone, and rounds that have enough answers do not wait for it."
        )
    if not named:
        yield "Add --token-file RUN/network/operator.token (on the coordinator's machine) to see names and stages."


def _checked(url: str) -> str:
    if not url.startswith(("https://", "http://")):
        raise InputError(f"The coordinator's address must begin with https://. Got {url!r} instead.")
    return url.rstrip("/")


def _token(file: Path | None, text: str | None = None) -> Token | None:
    """Read a token from the command line, from a file, or from stdin."""
    from fedloom.network.protocol.token import Token

    if file is not None and text is not None:
        raise InputError("--token and --token-file both give a token: use one of them.")
    try:
        if file == Path("-"):
            text = sys.stdin.readline()
        elif file is not None:
            if not file.is_file():
                raise InputError(f"There is no token file {file}.")
            text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The token file {file} cannot be read: {error}.") from None
    return None if text is None else Token.parse(text)


def _ledger(folder: Path) -> closing[Ledger]:
    from fedloom.network.coordinator.network_folder import coordinator_ledger

    return closing(coordinator_ledger(folder))


@command(agents_app, "list")
def list_agents(folder: Folder, as_json: AsJson = False) -> None:
    """List the enrolled agents."""
    need_network()
    from fedloom.network.coordinator.network_folder import unaware

    with _ledger(folder) as ledger:
        rows = [
            {key: row[key] for key in ("agent", "name", "enrolled", "replaced", "revoked")} for row in ledger.agents()
        ]
        unused = [{"token": row["digest"][:8], "expires": row["expires"]} for row in ledger.unused_tokens()]
        waiting = unaware(ledger)
    lines = []
    for row in rows:
        when = _time(row["enrolled"]) + (f", replaced {_time(row['replaced'])}" if row["replaced"] else "")
        lines.append(f"{row['name']:<24} {row['agent']}  enrolled {when}{'  REVOKED' if row['revoked'] else ''}")
    lines += [f"unused token {one['token']}, expires {_time(one['expires'])}" for one in unused]
    lines.append(f"{len(rows)} agent(s), {len(unused)} unused token(s).")
    if waiting:
        lines.append(f"These agents do not know the next certificate yet: {', '.join(waiting)}.")
    content = {"agents": rows, "unused_tokens": len(unused), "tokens": unused, "unaware_of_certificate": waiting}
    print_result(as_json, content, lines)


def _time(seconds: float | None) -> str:
    return "never" if seconds is None else datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


@command(agents_app)
def revoke(folder: Folder, name: str) -> None:
    """Reject an agent's requests from now on.

    name: The agent's name or number.
    """
    with _ledger(folder) as ledger:
        ledger.revoke(name)
    print(f"Revoked {name}.")


@command(agents_app, "invite")
def invite_agents(
    folder: Folder, count: Annotated[int, typer.Option(min=1, max=1000)] = 1, expires: str = "7d"
) -> None:
    """Make enrolment tokens: one for each agent that will join.

    count: The number of tokens.
    expires: How long they can be used, such as 12h or 7d.
    """
    need_network()
    from fedloom.network.coordinator.network_folder import invite, join_command
    from fedloom.record import seconds

    with _ledger(folder) as ledger:
        for path in invite(ledger, count, seconds(expires)):
            print(path)
            say(join_command(ledger, path))


@command(agents_app, "replace")
def replace_agent(folder: Folder, name: str, expires: str = "7d") -> None:
    """Revoke an agent and make a token for the one that takes its place, such as after its disk was lost.

    name: The agent's name or number. The new agent must use the same name.
    expires: How long the token can be used.
    """
    need_network()
    from fedloom.network.coordinator.network_folder import join_command, replace
    from fedloom.record import seconds

    with _ledger(folder) as ledger:
        path = replace(ledger, name, seconds(expires))
        (known,) = (row["name"] for row in ledger.agents() if name in (row["name"], row["agent"]))
        print(path)
        say(f"{join_command(ledger, path)}\nThe site keeps its name: {known}.")


@command(agents_app, "renew-certificate")
def renew_certificate(folder: Folder, certificate: Path | None = None, at_once: bool = False) -> None:
    """Prepare the next certificate: agents hear of it while the run goes on, and a later `serve` uses it.

    certificate: Your own next certificate (PEM), if you serve with --certificate.
    at_once: Stop using the present one, because it was lost or leaked. Agents then need new tokens.
    """
    need_network()
    from fedloom.network.coordinator.network_folder import prepare_successor, set_certificate_aside

    with _ledger(folder) as ledger:
        if at_once:
            set_certificate_aside(ledger)
            print("The next `serve` makes a new certificate. Then make a token for every agent: fedloom agents invite")
        else:
            prepare_successor(ledger, certificate)
            print("Agents that are connected hear of it now. `fedloom agents list` names those that have not.")


@command(agents_app, "withdraw")
def withdraw_token(folder: Folder, token: str) -> None:
    """Withdraw an unused enrolment token.

    token: The token's file or its name in `agents list`; `all` withdraws all of them.
    """
    need_network()
    from fedloom.network.coordinator.network_folder import withdraw

    with _ledger(folder) as ledger:
        print(f"Withdrew {withdraw(ledger, token)} token(s).")


@command(audit_app, "export")
def export_audit_log(folder: Folder, out: Annotated[Path, typer.Option(metavar="FILE")]) -> None:
    """Write agents, clients, rounds and events of the coordinator's ledger, refusals included.

    out: The file, which ends in .jsonl (JSON lines) or .csv.
    """
    need_network()
    from fedloom.network.coordinator.audit_export import export_audit

    with _ledger(folder) as ledger:
        count = export_audit(ledger, out)
    print(f"{count} record(s): {out}")


@command(audit_app, "verify")
def verify_audit_log(
    state: Annotated[Path, typer.Argument(metavar="STATE_DIR")], public_key: Annotated[str, typer.Option()] = ""
) -> None:
    """Check that nobody changed an agent's audit log: every line is signed, and has the hash of the line before it.

    state: The agent's state folder.
    public_key: The agent's public key, as `audit export` shows it at the coordinator (default: from the folder).
    """
    need_network()
    from fedloom.network.agent.audit_log import verify
    from fedloom.network.protocol.signatures import Signer

    for file in (state / "audit.jsonl", *(() if public_key else (state / "agent.key",))):
        if not file.is_file():
            raise InputError(f"There is no {file}. Name the state folder of an agent, such as kerry-state.")
    for line in verify(state / "audit.jsonl", public_key or Signer(state / "agent.key").public):
        print(line)
