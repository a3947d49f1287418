"""The page in a real browser: every view, live, safe, by keyboard, small and wide, light and dark."""

from __future__ import annotations

import http.server
import json
import re
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.federation.work import Report
from fedloom.files import locked
from fedloom.watch.serve import WatchServer
from tests.browser.conftest import SIZES
from tests.watch.growing_run import HOSTILE, UNIVERSAL, GrowingRun, write_large

VIEWS = ("curves", "clients", "matrix", "distribution", "models", "settings")
Watched = Callable[..., WatchServer]
Open = Callable[..., Any]

SEND = """([url, mode, kind]) => fetch(url, {method: "POST", mode, credentials: "include",
    headers: {"content-type": kind}, body: '{"wish": "stop"}'}).then((reply) => reply.type, () => "failed")"""


def until(page: Any, condition: str, seconds: float = 20.0) -> None:
    """Wait for a condition; the page's policy does not let the driver wait inside the page."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(20)


def show(page: Any, view: str) -> None:
    """Open a view and wait until it is drawn."""
    page.click(f"#tab-{view}")
    until(page, f"document.body.dataset.drawn === '{view}'")


def rounds_said(page: Any, words: str) -> None:
    """Wait until the page says how many rounds are done."""
    page.locator("#overview .card b", has_text=words).first.wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", SIZES)
def test_every_view_is_drawn_and_fits_the_width(
    tmp_path: Path, watched: Watched, open_page: Open, width: int, scheme: str
) -> None:
    run = GrowingRun(tmp_path / "hospitals", clients=[f"hospital-{number}" for number in range(120)])
    run.add(3).add(1, left_out=(3,), outliers=(5,))
    page = open_page(watched(run).url, width, scheme)
    for view in VIEWS:
        show(page, view)
        assert page.locator("#view").inner_text().strip()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
    show(page, "curves")
    assert page.locator(".chart polyline").count() == 2
    show(page, "matrix")
    assert "120 clients from top to bottom, rounds 1 to 4" in page.locator("#view").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_keeps_people_out(
    tmp_path: Path, watched: Watched, open_page: Open, barriers: Callable[[Any], list[str]], scheme: str
) -> None:
    run = GrowingRun(tmp_path / "hospitals", clients=[f"hospital-{number}" for number in range(120)])
    run.add(3).add(1, left_out=(3,), outliers=(5,))
    page = open_page(watched(run).url, 1280, scheme)
    for view in VIEWS:
        show(page, view)
        assert barriers(page) == [], view
    page.evaluate("document.querySelector('main').insertAdjacentHTML('beforeend', '<img src=\"static/icon.svg\">')")
    assert len(barriers(page)) > 0  # it does find some


def test_a_finished_round_appears_by_itself(tmp_path: Path, watched: Watched, open_page: Open) -> None:
    run = GrowingRun(tmp_path / "run").add(2)
    page = open_page(watched(run).url)
    rounds_said(page, "8 of 40")
    points = page.locator(".chart polyline").first.get_attribute("points")
    run.add(1)
    rounds_said(page, "12 of 40")
    until(page, f"document.querySelector('.chart polyline').getAttribute('points') !== '{points}'")
    assert page.locator("#live").inner_text() == "Live"
    show(page, "matrix")
    run.add(2)
    page.get_by_text("rounds 1 to 5 from left to right").wait_for()
    show(page, "clients")
    run.add(1)
    page.locator("tbody tr").first.get_by_text("6").first.wait_for()


def test_new_points_join_those_that_the_page_has(tmp_path: Path, watched: Watched, open_page: Open) -> None:
    run = GrowingRun(tmp_path / "run").add(3)
    page = open_page(watched(run).url)
    drawn = "(document.querySelector('.chart polyline')?.getAttribute('points') ?? '')"
    until(page, f"{drawn}.split(' ').length === 3")
    answers: list[dict[str, Any]] = []
    page.on("response", lambda reply: answers.append(reply.json()) if "/curves?" in reply.url else None)
    for rounds in (2, 1):
        run.add(rounds)
        until(page, f"{drawn}.split(' ').length === {run.done}")
    assert answers
    assert all(line["kept"] >= 3 for answer in answers for line in answer["lines"])  # nothing was sent again
    points = page.evaluate(drawn)
    page.reload()  # now it gets all of them at once
    until(page, f"{drawn}.split(' ').length === 6")
    assert page.evaluate(drawn) == points


def test_the_test_on_all_clients_tests_appears_when_a_cell_is_done(
    tmp_path: Path, watched: Watched, open_page: Open
) -> None:
    growing = GrowingRun(tmp_path / "run", facts=UNIVERSAL).add(2)
    page = open_page(watched(growing).url)
    heads = page.locator("table[aria-label='The last round'] thead")
    heads.wait_for()
    assert "universal test" not in heads.inner_text()
    growing.add_universal(0, 1, accuracy=0.75)
    heads.get_by_text("universal test", exact=True).wait_for(timeout=5000)
    rows = page.locator("table[aria-label='The last round'] tbody tr")
    assert [[cell.strip() for cell in row.split("\t")][4] for row in rows.all_inner_texts()] == ["75.0 %", "–"]
    assert "each client’s model after local training on the tests of all clients" in page.locator("#view").inner_text()


def test_a_finished_run_says_so_until_it_is_continued(tmp_path: Path, watched: Watched, open_page: Open) -> None:
    run = GrowingRun(tmp_path / "run").add(2)
    page = open_page(watched(run).url)
    page.locator("#live", has_text="Live").wait_for()
    run.end()
    page.locator("#live", has_text="Finished").wait_for()
    run.add(1)
    rounds_said(page, "12 of 40")


def test_the_curves_of_a_finished_run_lead_to_its_cautions(tmp_path: Path, watched: Watched, open_page: Open) -> None:
    run = GrowingRun(tmp_path / "run").add(2)
    page = open_page(watched(run).url)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/settings" in request.url else None)
    link = page.get_by_role("button", name=re.compile(r"^\d+ cautions: read before you trust these numbers$"))
    for _ in range(2):
        run.add(1)
        until(
            page, f"document.querySelector('.chart polyline')?.getAttribute('points').split(' ').length === {run.done}"
        )
    assert link.count() == len(asked) == 0  # a running one is not asked in every round
    run.end()
    link.wait_for()
    count = int(link.inner_text().split()[0])
    assert len(asked) == 1
    link.click()
    until(page, "document.body.dataset.drawn === 'settings'")
    assert page.locator(".warnings li").count() == count
    assert page.evaluate("document.activeElement.id") == "tab-settings"
    show(page, "curves")
    link.wait_for()
    run.store.set_status(1, "running")  # it goes on
    link.wait_for(state="hidden")


@pytest.mark.parametrize("width", SIZES)
def test_the_curves_name_a_client_that_is_served_badly(
    tmp_path: Path, watched: Watched, open_page: Open, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    said = f"Means hide clients that are served badly: fedavg at {HOSTILE}. See the cautions for numbers."
    monkeypatch.setattr("fedloom.watch.views.in_short", lambda run: iter([said]))
    page = open_page(watched(GrowingRun(tmp_path / "run").add(2).end()).url, width)
    page.get_by_role("button", name=said).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_legend_is_on_the_first_screen(tmp_path: Path, watched: Watched, open_page: Open) -> None:
    page = open_page(watched(GrowingRun(tmp_path / "run").add(2)).url)
    page.set_viewport_size({"width": 1280, "height": 900})
    page.locator(".legend").first.wait_for()
    assert page.evaluate("document.querySelector('.legend').getBoundingClientRect().bottom < innerHeight")


def test_a_run_whose_first_round_is_not_finished_shows_it_when_it_is(
    tmp_path: Path, watched: Watched, open_page: Open
) -> None:
    run = GrowingRun(tmp_path / "run")
    page = open_page(watched(run).url)
    page.get_by_text("No round has been measured.").wait_for()
    run.add(1)
    page.locator(".chart circle").first.wait_for()


def test_it_reconnects_after_the_server_was_away(tmp_path: Path, open_page: Open) -> None:
    run = GrowingRun(tmp_path / "run").add(1)
    server = WatchServer([run.folder])
    refused = (
        "ERR_CONNECTION_REFUSED",
        "ERR_INCOMPLETE_CHUNKED_ENCODING",
        "ERR_EMPTY_RESPONSE",
        "ERR_CONNECTION_RESET",
    )
    with server.serving():
        page = open_page(server.url, ignores=refused)
        rounds_said(page, "4 of 40")
    page.get_by_text("Reconnecting …").wait_for()
    run.add(3)
    with WatchServer([run.folder], port=server.port).serving():
        rounds_said(page, "16 of 40")
        assert page.locator("#live").inner_text() == "Live"


def test_names_are_text_wherever_they_stand(tmp_path: Path, watched: Watched, open_page: Open) -> None:
    facts = {"description": {"name": HOSTILE, "metrics": ["accuracy"], "cohort": {}, "evaluate": {"splits": ["test"]}}}
    names = [HOSTILE, f"{HOSTILE} 2", "' onmouseover='alert(1)"]
    labels = [HOSTILE, '"><svg onload=alert(1)>']
    facts["machine"] = {HOSTILE: HOSTILE}
    run = GrowingRun(tmp_path / "run", labels, (1,), names, facts=facts).add(3)
    run.store.set_status(1, "failed", error=HOSTILE)
    for table in ("metrics", "client_metrics"):
        run.store._database.execute(f"UPDATE {table} SET metric = ? WHERE metric = 'accuracy'", (HOSTILE,))
    page = open_page(watched(run).url)
    for view in VIEWS:
        show(page, view)
        assert HOSTILE in page.locator("body").inner_text()
        assert page.locator("main script, main img, main [onmouseover], main [onload]").count() == 0
    page.locator("#tab-matrix").click()
    page.locator("canvas").hover()
    page.get_by_text("Round").first.wait_for()
    show(page, "curves")
    page.locator(".chart svg").hover()
    assert "stolen" not in page.title().replace(HOSTILE, "")


def test_it_can_be_used_by_keyboard_alone(tmp_path: Path, watched: Watched, open_page: Open) -> None:
    run = GrowingRun(tmp_path / "run").add(4)
    page = open_page(watched(run).url)
    page.locator(".chart svg").wait_for()
    page.locator("#tab-curves").focus()
    page.keyboard.press("ArrowRight")
    page.locator("#tab-clients[aria-selected=true]").wait_for()
    assert page.evaluate("document.activeElement.id") == "tab-clients"
    page.get_by_role("button", name="accuracy").focus()
    page.keyboard.press("Enter")
    page.locator("th[aria-sort=descending]").wait_for()
    assert page.locator("tbody th").all_inner_texts() == ["cork", "kerry", "clare"]
    page.keyboard.press("Enter")  # the focus is still on the same head
    page.locator("th[aria-sort=ascending]").wait_for()
    assert page.locator("tbody th").all_inner_texts() == ["clare", "kerry", "cork"]
    show(page, "curves")
    page.locator(".chart svg").focus()
    page.keyboard.press("End")
    assert "Round 4" in page.locator(".chart .tip").inner_text()
    page.keyboard.press("ArrowLeft")
    assert "Round 3" in page.locator(".chart .tip").inner_text()
    run.add(1)
    rounds_said(page, "20 of 40")
    until(page, "document.activeElement.tagName === 'svg'")  # a new round takes neither focus nor read-out
    assert "Round 3" in page.locator(".chart .tip").inner_text()
    show(page, "matrix")
    page.locator("canvas").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator(".tip").inner_text().startswith("kerry\nRound 1: took part, accuracy ")


def test_the_matrix_says_who_was_late_and_who_refused(tmp_path: Path, watched: Watched, open_page: Open) -> None:
    some = (Report(0, 100, 200),)
    run = GrowingRun(tmp_path / "run").add(1).add(1, reports=some, absences={1: "late", 2: "refused"})
    page = open_page(watched(run).url)
    page.locator(".chart svg").wait_for()
    show(page, "matrix")
    page.get_by_label("Colour").select_option("state")
    assert page.locator(".swatches span").all_inner_texts() == ["took part", "too late", "refused", "did not take part"]
    page.locator("canvas").focus()
    page.keyboard.press("End")
    for words in ("too late", "refused"):
        page.keyboard.press("ArrowDown")
        assert f"Round 2: {words}, accuracy" in page.locator(".tip").inner_text()


def test_views_of_a_large_run_are_read_ahead(tmp_path: Path, watched: Watched, open_page: Open) -> None:
    page = open_page(watched(write_large(tmp_path / "run", clients=1000, rounds=220)).url)
    until(page, "document.body.dataset.ahead === 'done'")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/api/" in request.url else None)
    for view in ("clients", "distribution", "models", "settings", "curves"):
        show(page, view)
    assert asked == []
    show(page, "matrix")
    assert len(asked) == 1  # for rounds after the last known one
    assert asked[0].endswith("after=220")


def test_a_hidden_page_asks_for_nothing_and_catches_up(tmp_path: Path, watched: Watched, open_page: Open) -> None:
    run = GrowingRun(tmp_path / "run").add(1)
    page = open_page(watched(run).url)
    rounds_said(page, "4 of 40")
    until(page, "document.body.dataset.drawn === 'curves'")
    hide = "(on) => { Object.defineProperty(document, 'hidden', {value: on, configurable: true}); "
    hide += "document.dispatchEvent(new Event('visibilitychange')); }"
    asked: list[str] = []
    page.evaluate(hide, True)
    page.on("request", lambda request: asked.append(request.url))
    run.add(1)
    page.wait_for_timeout(1500)  # three times as long as a page that looks would need
    assert asked == []
    page.evaluate(hide, False)
    rounds_said(page, "8 of 40")


def test_lines_can_be_hidden_and_other_axes_chosen(tmp_path: Path, watched: Watched, open_page: Open) -> None:
    page = open_page(watched(GrowingRun(tmp_path / "run").add(3)).url)
    page.locator(".chart svg").wait_for()
    page.get_by_role("button", name="local").click()
    until(page, "document.querySelectorAll('.chart polyline').length === 1")
    page.get_by_label("Every seed").check()
    until(page, "document.querySelectorAll('.chart polyline').length === 3")
    page.get_by_label("Against").select_option("bytes")
    page.locator(".chart text", has_text="kB").first.wait_for()
    page.get_by_label("Against").select_option("virtual")
    page.get_by_text("not measured in this run, so rounds are shown").wait_for()
    page.reload()  # what was chosen is kept
    until(page, "document.querySelectorAll('.chart polyline').length === 3")


def test_the_table_is_filtered_and_paged(tmp_path: Path, watched: Watched, open_page: Open) -> None:
    run = GrowingRun(tmp_path / "run", ["fedavg"], (1,), [f"hospital-{number}" for number in range(130)]).add(1)
    page = open_page(watched(run).url)
    page.locator("#tab-clients").click()
    page.get_by_text("130 of 130 clients; rows 1 to 50.").wait_for()
    page.get_by_role("button", name="Last", exact=True).click()
    page.get_by_text("130 of 130 clients; rows 101 to 130.").wait_for()
    page.get_by_label("Filter").fill("HOSPITAL-12")
    page.get_by_text("11 of 130 clients; rows 1 to 11.").wait_for()
    run.add(1)  # a new round does not disturb what is being typed
    rounds_said(page, "2 of 10")
    assert page.evaluate("document.activeElement.value") == "HOSPITAL-12"


def test_of_a_pooled_model_it_says_that_every_example_leaves(tmp_path: Path, watched: Watched, open_page: Open) -> None:
    run = GrowingRun(tmp_path / "run", ["fedavg", "pooled"], (1,)).add(2)
    with sqlite3.connect(run.folder / "run.db") as database:  # a pooled model trains at one more client than there are
        database.execute("DELETE FROM participants WHERE cell = 2 AND client > 0")
        database.execute("UPDATE participants SET client = 3 WHERE cell = 2")
    page = open_page(watched(run).url)
    page.get_by_text("sent by clients, without pooled", exact=True).wait_for()
    show(page, "clients")
    assert "every example leaves" not in page.inner_text("main")
    page.get_by_label("Algorithm").select_option("pooled")
    page.get_by_text("pooled trains on all data in one place: every example leaves its client.").wait_for()
    assert "0 B" not in page.inner_text("main table")
    assert page.locator("main tbody tr").first.locator("td").all_inner_texts()[2:7] == ["–"] * 5


def test_several_runs_stand_side_by_side(tmp_path: Path, watched: Watched, open_page: Open) -> None:
    runs = [GrowingRun(tmp_path / name).add(2) for name in ("first", "second")]
    page = open_page(watched(*runs).url)
    until(page, "document.querySelectorAll('.chart svg').length === 2")
    left, right = (page.locator(".chart svg").nth(number).bounding_box() for number in (0, 1))
    assert left["y"] == right["y"]
    runs[1].add(1)
    rounds_said(page, "12 of 40")
    page.locator("#tab-clients").click()
    page.get_by_role("combobox", name="Run").select_option("1")
    page.locator("td", has_text=re.compile("^3$")).first.wait_for()


def test_pausing_and_stopping_need_the_token_and_a_yes(tmp_path: Path, watched: Watched, open_page: Open) -> None:
    run = GrowingRun(tmp_path / "run").add(1)
    server, control = watched(run), tmp_path / "run" / "control.json"
    with locked(run.folder, "busy"):  # as the run's process does
        page = open_page(server.url, ignores=("401",))
        page.get_by_text("Pause or stop").click()
        page.get_by_role("textbox", name="The operator’s token").fill("wrong")
        page.get_by_role("button", name="Use it").click()
        page.get_by_text("This is not the operator's token.").wait_for()
        page.get_by_role("textbox", name="The operator’s token").fill(server.token)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Pause").click()
        page.get_by_text("The run pauses after the round that is running.").wait_for()
        assert json.loads(control.read_text())["wish"] == "pause"
        run.store.set_fact("paused", 1)
        page.get_by_text("Paused after round 1").wait_for()
        page.get_by_role("button", name="Continue").click()
        page.get_by_role("button", name="Pause").wait_for()
        assert not control.exists()
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Cancel").click()
        assert not control.exists()
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Stop the run").click()
        page.get_by_text("The run stops after the round that is running.").wait_for()
        assert json.loads(control.read_text())["wish"] == "stop"
        assert page.evaluate("document.cookie") == ""  # scripts cannot read it
        page.get_by_role("button", name="Forget the token").click()
        page.get_by_text("Pause or stop").wait_for()


def test_a_page_for_other_machines_is_locked(tmp_path: Path, watched: Watched, open_page: Open) -> None:
    server = watched(GrowingRun(tmp_path / "run").add(1), host="0.0.0.0")
    page = open_page(f"http://127.0.0.1:{server.port}/", ignores=("401",))
    page.get_by_role("heading", name="The operator’s token").wait_for()
    assert "fedavg" not in page.content()
    page.get_by_role("textbox", name="The operator’s token").fill(server.token)
    page.get_by_role("button", name="Use it").click()
    page.locator(".chart circle").first.wait_for()


def test_another_page_in_the_same_browser_changes_and_reads_nothing(
    tmp_path: Path, watched: Watched, open_page: Open
) -> None:
    """The other page is on another port of the same host: to SameSite cookies that is the same site."""
    run = GrowingRun(tmp_path / "run").add(1)
    server = watched(run)
    with locked(run.folder, "busy"):
        page = open_page(server.url, ignores=("403", "CORS", "ERR_FAILED", "asked http"))
        page.get_by_text("Pause or stop").click()
        page.get_by_role("textbox", name="The operator’s token").fill(server.token)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Pause").wait_for()
        body = (
            f'<form method="post" enctype="text/plain" action="{server.url}api/runs/0/control">'
            '<input name=\'{"wish": "stop", "x": "\' value=\'"}\'></form><h1>evil</h1>'
        ).encode()

        class Evil(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/html")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        evil = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Evil)
        threading.Thread(target=evil.serve_forever, daemon=True).start()
        other = page.context.new_page()
        other.goto(f"http://127.0.0.1:{evil.server_port}/")
        target = f"{server.url}api/runs/0/control"
        for mode, kind in (("no-cors", "text/plain"), ("cors", "application/json")):
            assert other.evaluate(SEND, [target, mode, kind]) == "failed"
        read = "(url) => fetch(url, {credentials: 'include'}).then((reply) => reply.text(), () => 'failed')"
        assert other.evaluate(read, f"{server.url}api/runs") == "failed"
        other.evaluate("document.forms[0].submit()")
        other.get_by_text("Requests from other pages are refused.").wait_for()
        assert not (run.folder / "control.json").exists()
        evil.shutdown()
        evil.server_close()
