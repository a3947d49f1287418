"""The page "Protect clients" says which protection fits which way to learn, and where. Every cell of it is tried."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import InputError
from fedloom.experiment.experiment_file import load, parse
from fedloom.experiment.plan import Plan
from fedloom.files import tomllib
from fedloom.flower.app import write_app
from fedloom.network.coordinator.network_run import NetworkRun
from fedloom.privacy.protection import check_plan

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "what-leaks").glob("*.toml"))
PAGE = (ROOT / "docs" / "how-to" / "privacy.md").read_text(encoding="utf-8")
DP = {"epsilon": 8.0, "clip": 1.0}
PROTECTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "`secure_aggregation`": {"secure_aggregation": {}},
    "`dp`": {"dp": DP},
    "`dp`, distributed": {"secure_aggregation": {}, "dp": {**DP, "noise": "distributed"}},
    "`dp`, local": {"dp": {**DP, "noise": "local"}},
    "`example_dp`": {"example_dp": {}},
}
UNIFORM = {"weights": "uniform"}  # what the page says to set
WORKS = {  # on one machine and on Ray, which nothing tells apart; on a network; on Flower
    (True, True, True): "everywhere",
    (True, True, False): "not on Flower",
    (True, False, False): "simulation",
    (False, False, False): "–",
}


def table() -> list[tuple[str, str, str]]:
    """Return what the page says: way to learn, protection, where it works."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.partition("| way to learn |")[2].partition("\n\n")[0].splitlines()[2:]
    ]
    return [(row[0], name, said) for row in rows for name, said in zip(PROTECTIONS, row[1:], strict=True)]


def algorithm(way: str) -> dict[str, Any]:
    """Return the table of the algorithm that a row names."""
    name = re.findall("`([a-z_]+)`", way)[0]
    weights = re.findall('`weights = "([a-z_]+)"`', way)
    return {"name": name, **({"weights": weights[0]} if weights else UNIFORM if name == "fedavg" else {})}


def test_the_table_is_complete() -> None:
    demo = tomllib.loads((ROOT / "examples" / "seven-ways.toml").read_text(encoding="utf-8"))["algorithm"]
    seven = [{"name": label, **given} for label, given in demo.items()]
    ways = [algorithm(way) for way in dict.fromkeys(way for way, _, _ in table())]
    assert ways == [*seven, {"name": "peer", **UNIFORM}]
    assert len(table()) == len(ways) * len(PROTECTIONS)


@pytest.mark.parametrize(("way", "protection", "said"), table())
def test_a_cell_of_the_table_is_true(way: str, protection: str, said: str, tmp_path: Path) -> None:
    values = {"task": {"model": "digits_mlp"}, "algorithm": {"mine": algorithm(way)}, "rounds": 2}
    experiment = parse({**values, "privacy": PROTECTIONS[protection], "run": {"backend": "ray"}})

    def in_simulation() -> None:
        plan = Plan.of(experiment)
        check_plan(plan.privacy, plan.cohort, plan.algorithms)

    def on_a_network() -> None:
        run = NetworkRun(experiment, tmp_path / "network", lambda _: None)
        run._held.close()  # as at the end of a run

    def on_flower() -> None:
        write_app(experiment, tmp_path / "app")

    def works(attempt: Any) -> bool:
        try:
            attempt()
        except InputError:
            return False
        return True

    assert WORKS[works(in_simulation), works(on_a_network), works(on_flower)] == said


def test_the_examples_differ_in_nothing_but_their_protection() -> None:
    shown = PAGE.partition("| file | the server sees |")[2].partition("\n\n")[0]
    assert sorted(path.stem for path in EXAMPLES) == sorted(re.findall(r"^\| `([a-z-]+)` \| ", shown, re.MULTILINE))
    values = [tomllib.loads(path.read_text(encoding="utf-8")) for path in EXAMPLES]
    kinds = [one.pop("privacy", {}) for one in values]
    assert len({str(kind) for kind in kinds}) == len(EXAMPLES)
    for one, path in zip(values, EXAMPLES, strict=True):
        assert one.pop("name") == f"leaks-{path.stem}"
        assert one == values[0]
        plan = Plan.of(load(path))
        check_plan(plan.privacy, plan.cohort, plan.algorithms)
