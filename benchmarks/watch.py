"""How quick the page of `fedloom watch` is, and what it costs the run that it shows.

python benchmarks/watch.py page            # 1,000 clients × 500 rounds in a browser
python benchmarks/watch.py cost --runs 5   # runs with and without a page, by turns
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
EXPERIMENT = """
name = "cost"
rounds = 120
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
            times = []
            for name in ("client", "accuracy", "rounds taken part", "sent", "test") * 2:
                page.get_by_role("button", name=name, exact=False).first.click()
                times.append(page.evaluate(inside))
            page.get_by_label("Filter").fill("hospital-07")
            times.append(page.evaluate(inside))
            page.get_by_label("Filter").fill("")
            print(f"sorting and filtering 1,000 clients: at most {max(times):.0f} ms")
            drawn(page, "matrix", processor)
            inside, times = "Number(document.querySelector('canvas').dataset.milliseconds)", []
            for order in ("value", "name", "took_part", "number"):
                page.get_by_label("Order").select_option(order)
                times.append(page.evaluate(inside))
            print(f"painting 1,000 × 500 pairs: at most {max(times):.0f} ms")
            drawn(page, "curves", processor)
            times = []
            for _ in range(10):
                run.add(1)
                began = time.perf_counter()
                until(page, f"document.querySelector('#overview').textContent.includes('{run.done} of 500')")
                times.append(1000 * (time.perf_counter() - began))
            middle, worst = statistics.median(times), max(times)
            print(f"a finished round is on the page after {middle:.0f} ms (median), {worst:.0f} ms (worst of ten)")


def measure_cost(runs: int) -> None:
    seconds: dict[str, list[float]] = {"alone": [], "page": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cost.toml"
        file.write_text(EXPERIMENT)
        for number in range(runs):
            for kind in ("alone", "page") if number % 2 else ("page", "alone"):
                seconds[kind].append(_timed(file, Path(folder) / f"{kind}-{number}", with_page=kind == "page"))
                print(f"{kind}: {seconds[kind][-1]:.2f} s of rounds", flush=True)
    alone, page = (statistics.median(seconds[kind]) for kind in ("alone", "page"))
    print(f"median alone {alone:.2f} s, with the page open {page:.2f} s: {100 * (page / alone - 1):+.1f} %")


def _timed(file: Path, out: Path, with_page: bool) -> float:
    """Return the seconds that all rounds of a run took."""
    from fedloom.results.run_data import RunData

    run = [sys.executable, "-m", "fedloom", "run", str(file), "--out", str(out), "-q", "--no-report"]
    process = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with contextlib.ExitStack() as stack:
        if with_page:
            while not (out / "run.db").exists() or not _begun(out):
                time.sleep(0.05)
            watch = [sys.executable, "-m", "fedloom", "watch", str(out), "--port", "8611", "--no-browser"]
            page = subprocess.Popen(watch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(page.wait)
            stack.callback(page.terminate)
            stack.enter_context(_looked_at("http://127.0.0.1:8611/"))
        process.wait()
    return float(RunData.read(out).costs("fedavg", 1).seconds.sum())


def _begun(folder: Path) -> bool:
    from fedloom.errors import FedloomError
    from fedloom.results.run_data import RunData

    try:
        return bool(RunData.read(folder).cells)
    except FedloomError:
        return False


@contextlib.contextmanager
def _looked_at(url: str) -> Iterator[None]:
    import urllib.request

    for _ in range(600):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url).close()
            break
        time.sleep(0.05)
    with opened(url):
        yield


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("page", "cost"))
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    measure_page() if given.what == "page" else measure_cost(given.runs)
