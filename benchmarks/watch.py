"""How quick the page of `fedloom watch` is, and what it costs the run that it shows.

python benchmarks/watch.py page            # 1,000 clients × 500 rounds in a browser
python benchmarks/watch.py cost --runs 5   # runs with and without a page, by turns
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PORT = 8611
URL = f"http://127.0.0.1:{PORT}/"
sys.path.insert(0, str(ROOT))
EXPERIMENT = """
name = "cost"
rounds = 300
[data]
source = "digits"
partition = { name = "iid", clients = 50 }
[task]
model = "digits_mlp"
[train]
lr = 0.1
epochs = 2
[run]
workers = 1
"""


@contextlib.contextmanager
def opened(url: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(url)
        yield page
        browser.close()


DRAWN = """async (view) => {
    const began = performance.now();
    document.getElementById(`tab-${view}`).click();
    while (document.body.dataset.drawn !== view) await new Promise((go) => setTimeout(go, 1));
    return performance.now() - began;
}"""


class Processor:
    """The milliseconds of processor time that a page's main thread takes: other work on the machine does not count."""

    def __init__(self, page: Any) -> None:
        self.session = page.context.new_cdp_session(page)
        self.session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def now(self) -> float:
        found = self.session.send("Performance.getMetrics")["metrics"]
        return 1000 * next(one["value"] for one in found if one["name"] == "TaskDuration")


def drawn(page: Any, view: str, processor: Processor) -> str:
    """Open a view; say how long it took until it was drawn."""
    before = processor.now()
    passed = page.evaluate(DRAWN, view)
    return f"drawn {passed:.0f} ms after the click; {processor.now() - before:.0f} ms of processor time in the page"


def until(page: Any, condition: str) -> None:
    while not page.evaluate(condition):
        page.wait_for_timeout(5)


def measure_page() -> None:
    from fedloom.watch.serve import WatchServer
    from tests.watch.growing_run import write_large

    with tempfile.TemporaryDirectory() as folder:
        run = write_large(Path(folder) / "large")
        server = WatchServer([run.folder])
        with server.serving(), opened(server.url) as page:
            until(page, "document.body.dataset.drawn === 'curves'")
            paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN"
            asked = "performance.getEntriesByType('resource').filter((one) => one.name.includes('curves?'))"
            curves = f"{asked}.at(-1).responseEnd"
            print(f"first paint {page.evaluate(paint):.0f} ms; curves are there after {page.evaluate(curves):.0f} ms")
            began = time.perf_counter()
            until(page, "document.body.dataset.ahead === 'done'")
            print(f"the other views are read {1000 * (time.perf_counter() - began):.0f} ms later")
            processor = Processor(page)
            for view in ("clients", "matrix", "distribution", "models", "settings", "curves"):
                print(f"{view}, first: {drawn(page, view, processor)}")
                drawn(page, "curves", processor)
                print(f"{view}, again: {drawn(page, view, processor)}")
            drawn(page, "clients", processor)
            inside = "Number(document.querySelector('.scroll').dataset.milliseconds)"
            times, used = [], []
            for name in ("client", "accuracy", "rounds taken part", "sent", "test") * 2:
                before = processor.now()
                page.get_by_role("button", name=name, exact=False).first.click()
                times.append(page.evaluate(inside))
                used.append(processor.now() - before)
            page.get_by_label("Filter").fill("hospital-07")
            times.append(page.evaluate(inside))
            page.get_by_label("Filter").fill("")
            print(f"sorting and filtering clients: at most {max(times):.0f} ms; {max(used):.0f} ms of processor time")
            drawn(page, "matrix", processor)
            inside, times, used = "Number(document.querySelector('canvas').dataset.milliseconds)", [], []
            for order in ("value", "name", "took_part", "number"):
                before = processor.now()
                page.get_by_label("Order").select_option(order)
                times.append(page.evaluate(inside))
                used.append(processor.now() - before)
            print(f"painting 1,000 × 500 pairs: at most {max(times):.0f} ms; {max(used):.0f} ms of processor time")
            drawn(page, "curves", processor)
            times = []
            for _ in range(10):
                run.add(1)
                began = time.perf_counter()
                until(page, f"document.querySelector('#overview').textContent.includes('{run.done} of 500')")
                times.append(1000 * (time.perf_counter() - began))
            middle, worst = statistics.median(times), max(times)
            print(f"a finished round is on the page after {middle:.0f} ms (median), {worst:.0f} ms (worst of ten)")


def measure_cost(runs: int, rounds: int) -> None:
    """Compare runs with and without a page by turns: by their processor time, which other work hardly changes."""
    own: dict[str, list[float]] = {"alone": [], "page": []}
    pages: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cost.toml"
        file.write_text(EXPERIMENT.replace("rounds = 300", f"rounds = {rounds}"))
        for number in range(runs):
            for kind in ("alone", "page") if number % 2 else ("page", "alone"):
                used, by_page, seconds = _timed(file, Path(folder) / f"{kind}-{number}", with_page=kind == "page")
                own[kind].append(used)
                words = f"{kind}: {used:.2f} s of processor time in {seconds:.1f} s"
                if kind == "page":
                    pages.append(by_page / seconds)
                    words += f"; the page's server: {by_page:.3f} s, {100 * by_page / seconds:.2f} % of the run's time"
                print(words, flush=True)
        print(f"with nobody looking: {1000 * _idle(Path(folder) / 'alone-0'):.1f} ms of processor time in 10 s")
    ratios = [page / alone for page, alone in zip(own["page"], own["alone"], strict=True)]
    print(
        f"the run's own processor time with the page open: {100 * (statistics.median(ratios) - 1):+.2f} % (median of "
        f"{runs} pairs, {100 * (min(ratios) - 1):+.2f} to {100 * (max(ratios) - 1):+.2f}); the page's server: "
        f"{100 * statistics.median(pages):.2f} % of the run's time ({100 * min(pages):.2f} to {100 * max(pages):.2f})"
    )


def _timed(file: Path, out: Path, with_page: bool) -> tuple[float, float, float]:
    """Return the processor time of a run and, while the run lasted, of its page's server; and the run's seconds."""
    began, by_page = time.perf_counter(), 0.0
    run = [sys.executable, "-m", "fedloom", "run", str(file), "--out", str(out), "-q", "--no-report"]
    process = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with contextlib.ExitStack() as stack:
        if with_page:
            while not (out / "run.db").exists() or not _begun(out):
                time.sleep(0.05)
            page = stack.enter_context(_served(out))
            before = _processor(page.pid)
            stack.enter_context(opened(URL))
            _, _, usage = os.wait4(process.pid, 0)
            by_page = _processor(page.pid) - before
        else:
            _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return usage.ru_utime + usage.ru_stime, by_page, time.perf_counter() - began


def _idle(out: Path) -> float:
    """Return the processor time of a page's server in ten seconds in which nobody looks."""
    with _served(out) as page:
        time.sleep(2.0)  # what its start leaves behind
        before = _processor(page.pid)
        time.sleep(10.0)
        return _processor(page.pid) - before


def _processor(pid: int) -> float:
    """Return the seconds that all threads of a process have computed."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@contextlib.contextmanager
def _served(out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Serve the page of a run; wait until it answers."""
    watch = [sys.executable, "-m", "fedloom", "watch", str(out), "--port", str(PORT), "--no-browser"]
    page = subprocess.Popen(watch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(URL).close()
                break
            time.sleep(0.05)
        yield page
    finally:
        page.terminate()
        page.wait()


def _begun(folder: Path) -> bool:
    from fedloom.errors import FedloomError
    from fedloom.results.run_data import RunData

    try:
        return bool(RunData.read(folder).cells)
    except FedloomError:
        return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("page", "cost"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=300, help="of each run: opening the browser counts in short ones")
    given = parser.parse_args()
    measure_page() if given.what == "page" else measure_cost(given.runs, given.rounds)
