"""Real processes over TLS: the bits of the serial backend, whichever process is killed, and clear errors otherwise."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from fedloom.network.coordinator.network_folder import coordinator_ledger, token_file, unaware
from fedloom.results.report_warnings import cautions
from fedloom.results.result import Result
from fedloom.results.run_data import RunData
from tests.forked import run_forked
from tests.network.conftest import (
    EXPERIMENT,
    Federation,
    audit,
    said,
    serial_weights,
    start,
    wait_for,
    weights,
    write_toml,
)

THREE = {
    **EXPERIMENT,
    "algorithm": {"fedavg": {}, "scaffold": {}, "peer": {"name": "peer", "weights": "score", "topology": "ring"}},
}


@pytest.mark.slow
def test_a_rehearsal_gives_the_bits_of_the_serial_backend(tmp_path: Path) -> None:
    values = {**THREE, "algorithm": {**THREE["algorithm"], "pooled": {}}}
    file = write_toml(tmp_path / "experiment.toml", values)
    process = start("serve", file, "--local", "2", "--out", tmp_path / "net", "--json", cwd=tmp_path)
    assert process.wait(timeout=300) == 0, (tmp_path / "log.txt").read_text()
    assert said(tmp_path, "pooled: left out on a network")
    assert weights(tmp_path / "net") == serial_weights(THREE, tmp_path / "serial")
    # the model that came for a measurement is counted where it is trained: once for each of the two agents
    told = [row["bytes_down"] for row in Result.read(tmp_path / "net").rows("rounds") if row["algorithm"] == "fedavg"]
    model = sum(leaf.nbytes for leaf in Result.read(tmp_path / "net").weights("fedavg")["model"].values())
    assert told
    assert all(2 * model <= down < 3 * model + 10_000 for down in told)


@pytest.mark.slow
def test_the_printed_commands_to_join_work_when_pasted_elsewhere(
    federation: Callable[..., Federation], tmp_path: Path
) -> None:
    world = federation({**EXPERIMENT, "rounds": 1})
    world.serve()
    pattern = r"To join \(once\): fedloom (join \S+ --token (\S+) --site) SITE.toml"
    printed = wait_for(lambda: found if len(found := re.findall(pattern, world.log())) == 2 else None)
    first = start(*printed[0][0].split(), world.site(0), cwd=tmp_path, log="site-0.txt")
    piped = ["join", world.url, "--token-file", "-", "--site", str(world.site(1))]
    done = subprocess.run(
        [sys.executable, "-m", "fedloom", *piped],
        input=f"{printed[1][1]}\n",
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "The run is finished." in done.stderr
    assert first.wait(timeout=300) == 0, (tmp_path / "site-0.txt").read_text()
    assert world.finish() == 0, world.log()


def test_a_killed_coordinator_and_a_killed_agent_come_back_and_no_bit_changes(
    federation: Callable[..., Federation], tmp_path: Path
) -> None:
    patient = {"deadline": "5m", "quorum": 1.0}  # everybody is waited for, however long it takes to come back
    world = federation({**THREE, "rounds": 3, "algorithm": {"scaffold": {}}, "cohort": patient})
    world.site(1, compress=True)  # one of the two sites has a slow link
    coordinator = world.serve(FEDLOOM_KILL_AT="checkpoint.rename:3")
    first, _ = world.join(0, FEDLOOM_KILL_AT="own.renamed:3"), world.join(1)
    assert coordinator.wait(timeout=300) == -signal.SIGKILL
    world.serve()  # agents find it again by themselves
    assert first.wait(timeout=300) == -signal.SIGKILL
    world.join(0)  # under the same identity, with what its clients keep
    assert world.finish() == 0, world.log()
    assert weights(world.out) == serial_weights(
        {**THREE, "rounds": 3, "algorithm": {"scaffold": {}}}, tmp_path / "serial"
    )
    lines = audit(tmp_path, 0)
    assert {line["event"] for line in lines} >= {"hello", "answered"}
    answered = [line for line in lines if line["event"] == "answered" and line["asked"] == "reduce client"]
    assert all(line["bytes"] > 0 and "update model" in line["left"]["values"] for line in answered)


@pytest.mark.slow
def test_sigterm_ends_both_sides_in_order_and_the_next_start_continues(
    federation: Callable[..., Federation], tmp_path: Path
) -> None:
    values = {**EXPERIMENT, "rounds": 30, "evaluate": {"splits": []}, "algorithm": {"scaffold": {}}}
    world = federation({**values, "cohort": {"deadline": "5m", "quorum": 1.0}})
    coordinator = world.serve()
    first, _ = world.join(0), world.join(1)
    wait_for(lambda: any((world.out / "cells").glob("*/round-*.json")))
    private = [world.out, *world.out.glob("network"), *world.out.glob("**/*.db*")]
    assert {(path.name, path.stat().st_mode & 0o777) for path in private} == {
        *((name, 0o700) for name in ("run", "network")),
        *((f"{name}.db{more}", 0o600) for name in ("run", "ledger") for more in ("", "-wal", "-shm")),
    }
    for process in (first, coordinator):
        process.terminate()
        assert process.wait(timeout=60) == 143
    for log in ("log.txt", "site-0.txt"):
        assert said(tmp_path, "Stopped by SIGTERM. The same command continues.", log)
        assert not said(tmp_path, "Traceback|ended with an error", log)
    world.serve()
    world.join(0)
    assert world.finish() == 0, world.log()
    assert weights(world.out) == serial_weights(values, tmp_path / "serial")
    assert not list((world.out / "network" / "updates").iterdir())  # the last round is closed for good, too


@pytest.mark.slow
def test_asynchronous_rounds_survive_a_kill_of_either_side(
    federation: Callable[..., Federation], tmp_path: Path
) -> None:
    """Rounds over the answers of all clients have the bits of rounds that wait, whatever happens in between."""
    values = {**EXPERIMENT, "algorithm": {"scaffold": {}}}
    world = federation({**values, "cohort": {"deadline": "10m", "mode": "async", "buffer": 4}})
    coordinator = world.serve(FEDLOOM_KILL_AT="ledger.taken:2")
    first, _ = world.join(0, FEDLOOM_KILL_AT="agent.answered:3"), world.join(1)
    assert first.wait(timeout=300) == -signal.SIGKILL
    world.join(0)
    assert coordinator.wait(timeout=300) == -signal.SIGKILL
    world.serve()
    assert world.finish() == 0, world.log()
    assert weights(world.out) == serial_weights(values, tmp_path / "serial")
    with closing(coordinator_ledger(world.out)) as ledger:
        found = [row for row in ledger.audit_records() if row["record"] == "taken"]
    everybody = {(round, round, client) for round in range(1, 5) for client in range(4)}
    assert {(row["round"], row["version"], row["client"]) for row in found} == everybody
    assert not list((world.out / "network" / "updates").iterdir())


@pytest.mark.slow
def test_a_site_that_lost_its_disk_is_replaced_during_the_run(
    federation: Callable[..., Federation], tmp_path: Path
) -> None:
    values = {**EXPERIMENT, "rounds": 20, "evaluate": {"splits": []}, "algorithm": {"scaffold": {}}}
    world = federation({**values, "cohort": {"deadline": "5m", "quorum": 1.0}})
    world.serve()
    lost, _ = world.join(0), world.join(1)
    wait_for(lambda: any((world.out / "cells").glob("*/round-*.json")))
    lost.kill()
    lost.wait()
    shutil.rmtree(tmp_path / "site-0-state")
    replaced = run_forked("agents", "replace", str(world.out), "site-0", cwd=tmp_path)
    token = replaced.stdout.strip()
    again = ["join", world.url, "--site", tmp_path / "site-0.toml", "--token-file", token]
    world.processes[0] = start(*again, cwd=tmp_path, log="site-0.txt")
    assert world.finish() == 0, world.log()
    assert said(tmp_path, "site-0 was replaced; what its clients kept starts again, if it was lost")
    assert world.processes[0].wait(timeout=60) == 0
    assert {row["participants"] for row in Result.read(world.out).rows("rounds")} == {4}
    (caution,) = (caution for caution in cautions(RunData.read(world.out)) if "agents of some clients" in caution)
    assert re.search(r"may have started again: \S+ \(round (\d+)\), \S+ \(round \1\)\.", caution)


@pytest.mark.slow
def test_the_certificate_changes_without_a_new_token_for_everybody(
    federation: Callable[..., Federation], tmp_path: Path
) -> None:
    values = {**EXPERIMENT, "data": {"source": "digits", "partition": {"name": "iid", "clients": 3}}}
    world = federation(values, agents=3)
    first = world.serve()
    for number in range(2):
        world.join(number)
    wait_for(lambda: said(tmp_path, "site-0 is ready") and said(tmp_path, "site-1 is ready"))
    subprocess.run([sys.executable, "-m", "fedloom", "agents", "renew-certificate", str(world.out)], check=True)
    with closing(coordinator_ledger(world.out)) as ledger:
        before = ledger.fact("fingerprint")
        wait_for(lambda: not unaware(ledger))
        first.terminate()
        assert first.wait(timeout=60) == 143
        world.serve()
        (unused,) = wait_for(lambda: said(tmp_path, "which all agents know") and ledger.unused_tokens())
        assert ledger.fact("fingerprint") != before
        token = ["--token-file", token_file(ledger, unused["digest"])]
    world.processes[2] = start("join", world.url, "--site", world.site(2), *token, cwd=tmp_path, log="site-2.txt")
    assert world.finish() == 0, world.log()
    assert weights(world.out) == serial_weights(values, tmp_path / "serial")


@pytest.mark.slow
def test_an_agent_changes_its_key_during_the_run_and_no_bit_changes(
    federation: Callable[..., Federation], tmp_path: Path
) -> None:
    values = {**EXPERIMENT, "rounds": 12, "evaluate": {"splits": []}, "algorithm": {"scaffold": {}}}
    world = federation({**values, "cohort": {"deadline": "5m", "quorum": 1.0}})
    world.serve()
    agent, _ = world.join(0), world.join(1)
    wait_for(lambda: any((world.out / "cells").glob("*/round-*.json")))
    agent.terminate()
    assert agent.wait(timeout=60) == 143
    again = ["join", world.url, "--site", tmp_path / "site-0.toml", "--new-key"]
    world.processes[0] = start(*again, cwd=tmp_path, log="site-0.txt")
    assert world.finish() == 0, world.log()
    assert said(tmp_path, "site-0 has a new key")
    assert weights(world.out) == serial_weights(values, tmp_path / "serial")
    state = str(tmp_path / "site-0-state")
    subprocess.run([sys.executable, "-m", "fedloom", "audit", "verify", state], check=True)


@pytest.mark.slow
def test_agents_enrol_once_for_several_runs_and_for_a_fresh_start(
    federation: Callable[..., Federation], tmp_path: Path
) -> None:
    world = federation({**EXPERIMENT, "rounds": 1})
    world.serve()
    for number in range(2):
        world.join(number)
    assert world.finish() == 0, world.log()
    serve = ["serve", world.file, "--listen", f"127.0.0.1:{world.port}"]
    second = start(*serve, "--out", tmp_path / "second", "--agents-of", world.out, cwd=tmp_path, log="second.txt")
    assert second.wait(timeout=300) == 0, (tmp_path / "second.txt").read_text()
    third = start(*serve, "--out", world.out, "--fresh", cwd=tmp_path, log="third.txt")
    assert third.wait(timeout=300) == 0, (tmp_path / "third.txt").read_text()
    assert weights(world.out) == weights(tmp_path / "second")
    assert not said(tmp_path, "To join", "second.txt")
    assert not said(tmp_path, "To join", "third.txt")
    assert all(process.poll() is None for process in world.processes.values())  # they wait for more work


@pytest.mark.slow
def test_an_agent_that_is_killed_between_two_clients_goes_on_with_the_second(
    federation: Callable[..., Federation], tmp_path: Path
) -> None:
    """Staged tells each client which group it is in: after the first has answered, the second's message is its own."""
    values = {**EXPERIMENT, "rounds": 2, "evaluate": {"splits": []}, "algorithm": {"staged": {"groups": 3}}}
    world = federation({**values, "cohort": {"deadline": "5m", "quorum": 1.0}})
    world.serve()
    first, _ = world.join(0, FEDLOOM_KILL_AT="agent.answered:1"), world.join(1)
    assert first.wait(timeout=300) == -signal.SIGKILL
    world.join(0)
    assert world.finish() == 0, world.log()
    assert weights(world.out) == serial_weights(values, tmp_path / "serial")
    again = start("serve", world.file, "--listen", "127.0.0.1:0", "--out", world.out, cwd=tmp_path, log="again.txt")
    assert again.wait(timeout=60) == 0  # it is finished: nobody is waited for


@pytest.mark.slow
def test_a_run_that_stopped_at_its_target_waits_for_nobody(tmp_path: Path) -> None:
    early = {"target": {"accuracy": 0.01}, "stop": "target"}
    file = write_toml(tmp_path / "experiment.toml", {**EXPERIMENT, "rounds": 9, "evaluate": early})
    first = start("serve", file, "--local", "2", "--out", tmp_path / "net", cwd=tmp_path)
    assert first.wait(timeout=300) == 0, (tmp_path / "log.txt").read_text()
    assert all(one.rounds < 9 for one in Result.read(tmp_path / "net").runs)
    before = weights(tmp_path / "net")
    again = start("serve", file, "--listen", "127.0.0.1:0", "--out", tmp_path / "net", cwd=tmp_path, log="again.txt")
    assert again.wait(timeout=60) == 0, (tmp_path / "again.txt").read_text()
    assert weights(tmp_path / "net") == before


@pytest.mark.slow
def test_a_site_that_refuses_and_one_that_fails_are_shown_on_both_sides(
    federation: Callable[..., Federation], tmp_path: Path
) -> None:
    values = {**EXPERIMENT, "rounds": 1, "cohort": {"start_when": 2, "deadline": "20s"}}
    world = federation(values, agents=3)
    world.serve()
    tokens = world.out / "network" / "tokens"
    wait_for(lambda: len(list(tokens.glob("*.token"))) >= 2)
    done = run_forked("agents", "invite", str(world.out), cwd=tmp_path)
    assert done.stdout.strip().endswith(".token")
    data = {"source": "digits", "partition": {"name": "iid", "clients": 1}}
    world.site(0, site={"name": "kerry"}, data=data, policy={"algorithms": ["fedprox"]})
    world.site(1, site={"name": "clare"}, data=data, policy={"metrics": ["loss"]})
    world.site(2, site={"name": "cork"}, data=data)
    refused = world.join(0)
    assert refused.wait(timeout=300) == 2
    assert said(tmp_path, "does not allow the algorithm 'fedavg'", "site-0.txt")
    assert wait_for(lambda: said(tmp_path, "kerry refuses: .*'fedavg'"))
    world.join(1)
    world.join(2)
    assert world.finish() == 0, world.log()
    shown = json.loads(run_forked("agents", "list", str(world.out), "--json", cwd=tmp_path).stdout)
    assert [row["name"] for row in shown["agents"]] == ["clare", "cork", "kerry"]
    from fedloom.results.result import Result

    found = {(row["client"], row["metric"]): row["value"] for row in Result.read(world.out).rows("clients")}
    assert found["clare", "loss"] is not None
    assert found["clare", "accuracy"] is None  # it stays at the site
    assert found["cork", "accuracy"] is not None
    assert "site-0.toml" not in world.log()


@pytest.mark.slow
def test_when_all_agents_are_gone_the_coordinator_says_so_and_ends(federation: Callable[..., Federation]) -> None:
    values = {**EXPERIMENT, "rounds": 1000, "evaluate": {"splits": []}, "cohort": {"deadline": "3s"}}
    world = federation(values)
    world.serve()
    for number in range(2):
        world.join(number)
    wait_for(lambda: all(said(world.folder, f"site-{number} is ready") for number in range(2)))
    time.sleep(0.5)
    for process in world.processes.values():
        process.kill()
    assert world.finish(300) == 3
    assert "all agents are gone" in world.log()
    assert "Traceback" not in world.log()


@pytest.mark.slow
def test_agents_that_were_killed_or_lost_power_are_shown_silent_and_gone_until_they_are_back(
    federation: Callable[..., Federation], tmp_path: Path
) -> None:
    world = federation({**EXPERIMENT, "cohort": {"start_when": 3, "deadline": "4s"}}, agents=3)  # one never comes
    world.serve()
    killed, frozen = world.join(0), world.join(1)
    wait_for(lambda: said(tmp_path, "site-0 is ready") and said(tmp_path, "site-1 is ready"))

    def states() -> dict[str, str]:
        token = str(world.out / "network" / "operator.token")
        found = run_forked("status", world.url, "--token-file", token, "--json", cwd=tmp_path).stdout
        return {one["name"]: one["state"] for one in json.loads(found)["agents"]}

    wait_for(lambda: set(states().values()) == {"ready"}, 30.0)
    killed.kill()
    os.kill(frozen.pid, signal.SIGSTOP)  # its poll stays open, as that of a machine without power does
    wait_for(lambda: "ready" not in states().values(), 10.0)  # an open poll would say so for 25 s
    wait_for(lambda: set(states().values()) == {"gone"}, 10.0)
    for name in ("site-0", "site-1"):
        assert len(re.findall(rf"{name} is gone: nothing was heard from it for \d+ s", world.log())) == 1
    os.kill(frozen.pid, signal.SIGCONT)
    world.join(0)
    wait_for(lambda: all(said(tmp_path, rf"{name} is back, after \d+ s") for name in ("site-0", "site-1")), 30.0)
    wait_for(lambda: set(states().values()) == {"ready"}, 30.0)


def test_a_dry_run_shows_what_would_leave_and_connects_nowhere(tmp_path: Path) -> None:
    site = write_toml(
        tmp_path / "kerry.toml",
        {
            "data": {"source": "digits", "partition": {"name": "iid", "clients": 2}},
            "policy": {"verbs": ["reduce", "evaluate"]},
        },
    )
    experiment = write_toml(tmp_path / "experiment.toml", THREE)
    command = ["join", "https://nowhere.invalid:1", "--site", site, "--dry-run", "--experiment", experiment]
    done = run_forked(*map(str, command), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fedavg: reduce client\n  model: 2,410 numbers in 4 tensors" in done.stdout
    assert "peer: map client  (REFUSED by the policy)" in done.stdout
    assert (
        "scaffold: reduce client\n  model: 2,410 numbers in 4 tensors, and its weight\n  control: 2,410" in done.stdout
    )
    assert not (tmp_path / "kerry-state").exists()
