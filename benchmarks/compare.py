"""fedloom and its peers on the same work, alternating block by block in one run on one machine.

    python benchmarks/compare.py --data FOLDER --work 2nn cnn lstm --peers flower pfl fedjax --rounds 30

Every system is one process (and the processes it starts), loaded once. Only one computes; the others sleep. Start-up
(from the start of the process to the end of its first round) is reported apart, warm-up rounds are thrown away.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import environments
import turns
from harness import HERE, describe_machine, machine, short, summary, table, write

sys.path.insert(0, str(HERE / "peers"))

from work import WORKS, mnist_folder

DOES = {"fedloom": WORKS, "flower": ["2nn", "cnn"], "pfl": WORKS, "fedjax": ["2nn", "cnn"]}
BARS = {  # the target: fedloom is at least this many times as fast
    ("2nn", "fedjax"): 2.0,
    ("2nn", "pfl"): 4.5,
    ("2nn", "flower"): 20.0,
    ("cnn", "fedjax"): 2.3,
    ("cnn", "pfl"): 1.5,
    ("cnn", "flower"): 1.5,
    ("lstm", "pfl"): 1.5,
}
NOTES = """\
Medians, quartiles in brackets. A ratio is the system's median over that of the first fedloom; its quartiles are over
turns, each block against fedloom's block of the same turn. CPU is processor time a round over all processes of a
system, which a busy machine disturbs less than the clock. Start-up is from the start of the process to the end of the
first round, with nothing compiled in a cache. Memory adds up the peaks of a system's processes, shared pages counted in
each. Other load is the fraction of the machine that unrelated processes used during a system's blocks."""


def main() -> None:
    """Measure every work, write one table."""
    options = arguments()
    asked = {name: value for name, value in vars(options).items() if name not in ("data", "cache", "out")}
    facts: dict[str, Any] = {"machine": machine(), "options": asked, "works": {}}
    pythons, broken = interpreters(options)
    facts["versions"] = {name: environments.versions(python, name) for name, python in pythons.items()}
    for work in options.work:
        specs = [f"fedloom:{setting}".removesuffix(":auto") for setting in options.fedloom] + options.peers
        able = [spec for spec in specs if split(spec)[0] in pythons and work in DOES[split(spec)[0]]]
        result = turns.take_turns(work, {spec: command(spec, work, options, pythons) for spec in able}, options)
        result["failed"].update({name: why for name, why in broken.items() if work in DOES[name]})
        facts["works"][work] = result
        write("compare", report(facts), facts, options.out)  # after each work: a later one may be interrupted
    print(report(facts))


def arguments() -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with MNIST's idx files (or MNIST_DIR, or FEDLOOM_DATA)")
    parser.add_argument("--work", nargs="+", choices=WORKS, default=["2nn", "cnn"])
    parser.add_argument(
        "--peers",
        nargs="*",
        default=["flower", "pfl", "fedjax"],
        help="with options behind a colon, such as pfl:processes=2 or fedjax:devices=2",
    )
    parser.add_argument(
        "--fedloom",
        nargs="+",
        default=["auto"],
        help="settings to measure: auto, or such as group=5 (ratios are against the first)",
    )
    parser.add_argument("--cache", type=Path, default=environments.default_cache(), help="where peers are installed")
    turns.add_options(parser, rounds=30)
    options = parser.parse_args()
    for spec in options.peers:
        if split(spec)[0] not in environments.RECIPES:
            parser.error(f"unknown peer '{spec}'; choose from {', '.join(environments.RECIPES)}")
    if any(work != "lstm" for work in options.work):
        options.data = str(mnist_folder(options.data))
    return options


def split(spec: str) -> tuple[str, list[str]]:
    """Split `pfl:threads=2` into the peer's name and the options of its script."""
    name, _, rest = spec.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    return name, [part for key, _, value in pairs for part in (f"--{key}", *([value] if value else []))]


def interpreters(options: argparse.Namespace) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the peers that can be measured, and why the others cannot."""
    pythons, broken = {"fedloom": Path(sys.executable)}, {}
    for name in dict.fromkeys(split(spec)[0] for spec in options.peers):
        try:
            pythons[name] = environments.prepare(name, options.cache)
        except environments.SetupFailed as error:
            broken[name] = str(error)
            print(f"{name}: {error}", file=sys.stderr)
    return pythons, broken


def command(spec: str, work: str, options: argparse.Namespace, pythons: dict[str, Path]) -> list[str]:
    """Return the command that starts a system."""
    name, extra = split(spec)
    script = HERE / "fedloom_rounds.py" if name == "fedloom" else HERE / "peers" / f"{name}_rounds.py"
    data = ["--data", options.data] if options.data else []
    return [str(pythons[name]), str(script), "--work", work, *data, *extra]


def report(facts: dict[str, Any]) -> str:
    """Markdown: one row per work and system."""
    options = facts["options"]
    header = ["work", "system", "s a round", "ratio", "at least", "CPU s", "start-up s", "memory GB", "other load"]
    rows = []
    for work, result in facts["works"].items():
        base = next((found for spec, found in result["systems"].items() if split(spec)[0] == "fedloom"), None)
        rows += [[work, *row(work, spec, found, base)] for spec, found in result["systems"].items()]
        rows += [[work, spec, f"failed: {why}", *[""] * 6] for spec, why in result["failed"].items()]
    lines = [
        "# fedloom and peers on the same work\n",
        f"{describe_machine(facts['machine'])}\n",
        f"{options['rounds']} rounds in blocks of {options['block']}, systems alternating.\n{NOTES}\n",
        f"{table(header, rows)}\n",
    ]
    for name, found in facts["versions"].items():
        lines.append(f"- {name}: " + ", ".join(f"{package} {version}" for package, version in found.items()))
    return "\n".join(lines)


def row(work: str, spec: str, found: dict[str, Any], base: dict[str, Any] | None) -> list[str]:
    """One system's numbers."""
    ratio, bar, label = "", "", spec
    if base and found is not base:
        pairs = zip(found["blocks"], base["blocks"], strict=False)
        spread = summary([statistics.median(a["seconds"]) / statistics.median(b["seconds"]) for a, b in pairs])
        times = found["median"] / base["median"]
        ratio = f"{times:.2f} × ({spread['q1']:.2f} – {spread['q3']:.2f})"
        wanted = BARS.get((work, split(spec)[0]))
        bar = f"{wanted:g} ×: {'met' if times >= wanted else 'missed'}" if wanted else ""
    if split(spec)[0] == "fedloom":
        label += f" (group {found['group']})"
    return [
        label,
        f"{short(found['median'])} ({short(found['q1'])} – {short(found['q3'])})",
        ratio,
        bar,
        short(found["cpu"]),
        f"{found['startup']:.1f}",
        f"{found['memory_peak'] / 2**30:.1f}",
        f"{found['others']:.0%}",
    ]


if __name__ == "__main__":
    main()
