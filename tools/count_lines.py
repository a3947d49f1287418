"""Count the package's lines of code by room, without blanks, comments and docstrings, and compare them with the budget.

`python tools/count_lines.py` prints the table, and ends with 1 if a room is over its budget.
`python tools/count_lines.py --files` also prints every file.
`python tools/count_lines.py --since REVISION` also prints how many lines of each room are newer than a revision of git.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "fedloom"
BUDGET = {  # room → its folders (or modules) and the most lines of code it may have; the last takes all others
    "simulation core": ("training federation backends aggregation", 4500),
    "algorithms": ("algorithms", 1400),
    "data": ("data", 2400),
    "experiment, results, tuning": ("experiment results tuning", 4000),
    "network": ("network", 4200),  # 3,400, and 800 for keeping it safe on the internet
    "privacy": ("privacy audits", 1500),
    "clock and compression": ("clock compression", 1000),
    "live page": ("watch", 1000),
    "the rest": ("", 1700),
}
CORE_MODULES = (
    "algorithm",
    "errors",
    "faults",
    "files",
    "keys",
    "machine",
    "metrics",
    "record",
    "task",
    "tree",
    "user_code",
)
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

# what you read to follow one round of FedAvg from the engine to the gradient and back, in this order
ONE_ROUND = (
    "federation/engine.py",
    "federation/cohort.py",
    "algorithms/fedavg.py",
    "algorithm.py",
    "federation/work.py",
    "backends/serial.py",
    "training/local.py",
    "training/schedule.py",
    "aggregation/means.py",
)
ONE_ROUND_LINES, ONE_ROUND_FILES = 1100, 9


def code_lines(text: str) -> set[int]:
    """The numbers of the lines of a Python file that hold code.

    >>> code_lines('"A docstring."' + chr(10) + "x = 1  # a comment" + chr(10))
    {2}
    """
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(text)):  # docstrings, and the strings that say what a field means
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and type(node.value.value) is str:
            documentation.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return code - documentation


def room_of(file: Path) -> str:
    """The room of the budget that a file of the package belongs to."""
    part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part in CORE_MODULES:
        return "simulation core"
    return next((room for room, (parts, _) in BUDGET.items() if part in parts.split()), "the rest")


def git(*arguments: str) -> list[str]:
    """The lines that a command of git prints."""
    done = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")


def newer_lines(lines: dict[Path, set[int]], revision: str) -> Counter[str]:
    """How many of each room's lines of code were written after a revision, wherever they moved since."""
    known, newer = {*git("rev-list", revision)}, Counter[str]()
    for file, numbers in lines.items():
        blamed = git("blame", "-w", "-M", "-C", "--line-porcelain", "--", str(file))
        heads = [line.split(" ") for line in blamed if len(line.split(" ")[0]) == 40]  # commit, line before, line now
        newer[room_of(file)] += sum(commit not in known and int(now) in numbers for commit, _, now, *_ in heads)
    return newer


def main() -> int:
    """Print the table; 1 if a room is over its budget."""
    lines_of = {file: code_lines(file.read_text(encoding="utf-8")) for file in sorted(PACKAGE.rglob("*.py"))}
    counts = {file: len(lines) for file, lines in lines_of.items()}
    since = sys.argv[sys.argv.index("--since") + 1] if "--since" in sys.argv else ""
    newer = newer_lines(lines_of, since) if since else Counter()
    if "--files" in sys.argv:
        for file, count in counts.items():
            print(f"{count:6,}  {file.relative_to(PACKAGE)}")
    over = 0
    print(f"{'lines of code':30}{'now':>8}{'budget':>8}" + (f"  since {since}" if since else ""))
    for room, (_, budget) in BUDGET.items():
        count = sum(lines for file, lines in counts.items() if room_of(file) == room)
        over += count > budget
        mark = f"{'  over' if count > budget else '':6}" + (f"{newer[room]:8,}" if since else "")
        print(f"{room:30}{count:8,}{budget:8,}{mark}".rstrip())
    print(f"{'all':30}{sum(counts.values()):8,}{sum(budget for _, budget in BUDGET.values()):8,}")
    lines = sum(counts[PACKAGE / name] for name in ONE_ROUND)
    far = lines > ONE_ROUND_LINES or len(ONE_ROUND) > ONE_ROUND_FILES
    said = f"{len(ONE_ROUND)} files of {ONE_ROUND_FILES}"
    print(f"{'one round of FedAvg':30}{lines:8,}{ONE_ROUND_LINES:8,}  in {said}{', over' if far else ''}")
    return int(over > 0 or far)


if __name__ == "__main__":
    raise SystemExit(main())
