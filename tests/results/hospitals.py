"""Two made-up hospitals, each with its CSV file, as an engineer might find them."""

from __future__ import annotations

import csv
import random
from pathlib import Path

from fedloom.experiment import experiment_file
from fedloom.experiment.plan import Plan
from fedloom.experiment.run import run_plan
from fedloom.results.result import Result

EXPERIMENT = """
name = "hospitals"
rounds = 2
[data]
source = "csv"
path = "sites"
label = "outcome"
drop = ["patient"]
categorical = ["ward"]
fill = "mean"
normalize = "federated"
split = { train = 0.6, validation = 0.2, test = 0.2, shuffle = false }
[task]
model = "logistic"
args = { features = 5 }
metrics = ["accuracy", "auroc"]
[algorithm]
fedavg = {}
local = {}
[run]
backend = "serial"
"""


def write_sites(folder: Path) -> None:
    """Write a file with semicolons and decimal commas, and one with commas; some values are missing."""
    draw = random.Random(3)
    (folder / "sites").mkdir()
    for site, delimiter in {"berlin": ";", "oslo": ","}.items():
        with open(folder / "sites" / f"{site}.csv", "w", newline="") as file:
            rows = csv.writer(file, delimiter=delimiter)
            rows.writerow(["patient", "age", "ward", "crp", "outcome"])
            for number in range(40):
                age, ward = draw.randint(20, 90), draw.choice(["surgery", "icu", "general"])
                crp = "" if number % 10 == 7 else str(round(draw.lognormvariate(2, 1), 1))
                shown = crp.replace(".", ",") if delimiter == ";" else crp
                dead = age / 15 + (ward == "icu") + draw.gauss(0, 1) > 4.5
                rows.writerow([f"{site}-{number}", age, ward, shown, "dead" if dead else "alive"])


def hospitals(folder: Path, experiment: str = EXPERIMENT) -> Result:
    """Train on the two files."""
    write_sites(folder)
    (folder / "hospitals.toml").write_text(experiment)
    plan = Plan.of(experiment_file.load(folder / "hospitals.toml"))
    return run_plan(plan, folder / "run")
