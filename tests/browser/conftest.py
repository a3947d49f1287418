"""A real browser, and pages to open in it. `make browser` runs these tests; they are skipped where there is none."""

from __future__ import annotations

import http.server
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.watch.serve import WatchServer
from tests.watch.growing_run import GrowingRun

AXE = Path(sys.prefix) / "npm" / "node_modules" / "axe-core" / "axe.min.js"
BARRIERS = """async () => {
    const fading = document.getAnimations().filter((one) => one instanceof CSSTransition);
    await Promise.all(fading.map((one) => one.finished));
    const wanted = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
    const found = (await axe.run({runOnly: wanted})).violations;
    return found.flatMap((one) => one.nodes.map((node) => `${one.id}: ${node.html.slice(0, 120)}`));
}"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZES = (390, 1280, 2560)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(str(item.fspath)).parent == Path(__file__).parent]
    for item in here:
        item.add_marker(pytest.mark.browser)
        if "browser" not in str(config.getoption("markexpr")):
            item.add_marker(pytest.mark.skip(reason="drives a real browser: `make browser` runs it"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The system's Chromium, with a proxy that fails on any request to another machine."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    path = os.environ.get("FEDLOOM_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(
            f"no browser is installed: none of {', '.join(BROWSERS)} is on the path (FEDLOOM_BROWSER names one)"
        )
    with playwright.sync_playwright() as driver:
        # Chromium itself would ask its maker about the fields of every form on every page. (--disable-features would
        # replace playwright's list of features, and Chromium would ask for more.)
        own = ["--no-sandbox", "--autofill-server-url=http://127.0.0.1:9/"]
        made = driver.chromium.launch(executable_path=path, args=own)
        yield made
        made.close()


class Proxy(http.server.BaseHTTPRequestHandler):
    """Notes every request, and fails on it."""

    asked: list[str] = []  # noqa: RUF012 (a class for each test)

    def handle_one_request(self) -> None:
        line = self.rfile.readline(2000).decode("latin-1").strip()
        if line:
            self.asked.append(line)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[tuple[int, list[str]]]:
    """The port of a proxy that fails on any request, and what it was asked for."""
    kind = type("OneProxy", (Proxy,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port, kind.asked  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


@pytest.fixture
def open_page(browser: Any, proxy: tuple[int, list[str]]) -> Iterator[Callable[..., Any]]:
    """Open a page. At the end nothing may have gone wrong in it, and nothing may have left the machine."""
    contexts, wrong = [], []

    def open(url: str, width: int = 1280, scheme: str = "light", ignores: tuple[str, ...] = ()) -> Any:
        port, _ = proxy
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            proxy={"server": f"http://127.0.0.1:{port}", "bypass": "127.0.0.1"},
            ignore_https_errors=True,
        )
        contexts.append(context)
        page = context.new_page()

        def note(text: str) -> None:
            if not any(part in text for part in ignores):
                wrong.append(text)

        page.on("console", lambda said: note(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: note(str(error)))
        page.on("dialog", lambda dialog: (note(f"a dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda asked: None if asked.url.startswith(url.rstrip("/")) else note(f"asked {asked.url}"))
        page.goto(url)
        return page

    yield open
    for context in contexts:
        context.close()
    assert wrong == []
    assert proxy[1] == []


@pytest.fixture
def barriers() -> Callable[[Any], list[str]]:
    """What keeps people out of a page: pale text, missing names, wrong roles; as axe-core finds it (WCAG 2.2, AA)."""
    if not AXE.is_file():
        pytest.skip("axe-core is not installed: `make browser` does, with npm")
    script = AXE.read_text(encoding="utf-8")

    def find(page: Any) -> list[str]:
        page.evaluate(script)
        return list(page.evaluate(BARRIERS))

    return find


@pytest.fixture
def watched() -> Iterator[Callable[..., WatchServer]]:
    """Serve the page of some runs."""
    ends = []

    def serve(*runs: GrowingRun, **more: Any) -> WatchServer:
        server = WatchServer([run.folder for run in runs], **more)
        context = server.serving()
        context.__enter__()
        ends.append(context)
        return server

    yield serve
    for context in ends:
        context.__exit__(None, None, None)
