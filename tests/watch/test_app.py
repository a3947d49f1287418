"""The page's requests: what anybody may see, what needs the token, and what no other page may do."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.requests import Request

from fedloom.errors import InputError
from fedloom.watch import app as watch_app
from fedloom.watch.app import FILES, Page, make_app, same_token
from fedloom.watch.guard import MOST_BODY
from fedloom.watch.live_run import LiveRun, RunOnceItExists
from tests.network.conftest import Requests
from tests.watch.growing_run import HOSTILE, GrowingRun

ORIGIN = {"origin": "http://coordinator"}
TOKEN = "the operator's"


class Agents:
    """Stands for a coordinator."""

    def __init__(self) -> None:
        self.deeds: list[tuple[str, str]] = []

    def state(self) -> dict[str, Any]:
        return {"agents": []}

    def act(self, deed: str, name: str) -> dict[str, Any]:
        if deed == "revoke" and name == "nobody":
            raise InputError("There is no agent 'nobody'.")
        self.deeds.append((deed, name))
        return {}


def requests(*runs: Path, **more: Any) -> Requests:
    page = Page([LiveRun(run) for run in runs], same_token(TOKEN), ["coordinator"], **more)
    return Requests(make_app(page))


@pytest.fixture
def run(tmp_path: Path) -> GrowingRun:
    return GrowingRun(tmp_path / "run").add(2)


@pytest.fixture
def client(run: GrowingRun) -> Iterator[Requests]:
    made = requests(run.folder)
    yield made
    made.close()


def login(client: Requests, token: str = TOKEN) -> dict[str, str]:
    reply = client.post("/api/login", json={"token": token}, headers=ORIGIN)
    assert reply.status_code == 200, reply.text
    return {**ORIGIN, "cookie": reply.headers["set-cookie"].split(";")[0]}


def test_the_page_gets_different_names_of_runs_with_the_same_name(tmp_path: Path) -> None:
    facts = {"description": {"name": "seven", "metrics": ["accuracy"]}}
    client = requests(*(GrowingRun(tmp_path / name, facts=facts).add(1).folder for name in ("even", "skewed")))
    assert [run["name"] for run in client.get("/api/runs").json()] == ["even", "skewed"]
    client.close()


def test_everything_is_bound_by_a_strict_policy_and_comes_from_the_package(client: Requests) -> None:
    for path in ("/", *(f"/static/{name}" for name in FILES), "/api/page", "/api/runs", "/nothing"):
        reply = client.get(path)
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("default-src 'self'; ")
        assert "unsafe" not in policy
        assert "*" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
    for name, file in FILES.items():
        assert client.get(f"/static/{name}").content == file.read_bytes()
    assert client.get("/static/../app.py").status_code == 404
    assert client.get("/static/%2e%2e%2fapp.py").status_code == 404


def test_no_file_of_the_page_names_another_host_or_has_code_in_html() -> None:
    for name, file in FILES.items():
        text = file.read_text()
        assert set(re.findall(r"https?://[^\s\"')]+", text)) <= {"http://www.w3.org/2000/svg"}, name
        for unsafe in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "onclick=",
        ):
            assert unsafe not in text, name
    page = FILES["index.html"].read_text()
    assert "style=" not in page
    assert re.findall(r"<script[^>]*>(.*?)</script>", page) == [""]


def test_what_the_views_show_can_be_asked_for(client: Requests) -> None:
    about = client.get("/api/page").json()
    assert (about["locked"], about["operator"], about["federation"]) == (False, False, False)
    (shown,) = client.get("/api/runs").json()
    assert shown["name"] == "run"
    cell = "label=fedavg&seed=1&metric=accuracy&phase=post_fit"
    for path in (
        "/curves?metric=accuracy&panel=post_fit",
        f"/clients?{cell}",
        f"/distribution?{cell}",
        "/settings",
    ):
        assert client.get(f"/api/runs/0{path}").status_code == 200, path
    assert len(client.get(f"/api/runs/0/matrix?{cell}").content) == 24 + 5 * 2 * 3
    reply = client.get("/api/runs/0/curves?metric=accuracy&panel=nose")
    assert (reply.status_code, reply.json()["detail"][:25]) == (409, "There is no panel 'nose'.")
    assert client.get("/api/runs/1/settings").status_code == 404
    assert client.get("/api/runs/-1/settings").status_code == 404
    assert client.get("/openapi.json").status_code == 404


def test_names_are_sent_as_they_are_and_only_as_data(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "run", labels=[HOSTILE], clients=[HOSTILE, "b"]).add(1)
    client = requests(run.folder)
    reply = client.get("/api/runs")
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()[0]["labels"][0]["label"] == HOSTILE
    assert HOSTILE not in client.get("/").text
    client.close()


def test_pausing_needs_the_token(client: Requests, run: GrowingRun) -> None:
    pause = {"wish": "pause"}
    assert client.post("/api/runs/0/control", json=pause, headers=ORIGIN).status_code == 401
    for wrong in ("", "wrong", TOKEN + "x", TOKEN[:-1]):
        reply = client.post("/api/login", json={"token": wrong}, headers=ORIGIN)
        assert (reply.status_code, "set-cookie" in reply.headers) == (401, False)
    known = login(client)
    assert client.get("/api/page", headers=known).json()["operator"]
    assert client.post("/api/runs/0/control", json=pause, headers=known).json()["wish"] == "pause"
    assert json.loads((run.folder / "control.json").read_text())["wish"] == "pause"
    assert client.post("/api/runs/0/control", json={"wish": "explode"}, headers=known).status_code == 422
    assert client.post("/api/runs/0/control", json={"wish": "continue"}, headers=known).json()["wish"] == ""
    assert not (run.folder / "control.json").exists()
    assert client.post("/api/logout", json={}, headers=known).status_code == 200
    assert client.post("/api/runs/0/control", json=pause, headers=known).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"host": "evil.example", "origin": "http://evil.example"},
        {"origin": "http://coordinator", "sec-fetch-site": "cross-site"},
        {"origin": ""},
    ],
)
def test_another_page_can_do_nothing_even_with_the_cookie(
    client: Requests, run: GrowingRun, headers: dict[str, str]
) -> None:
    cookie = login(client)["cookie"]
    for path, body in (
        ("/api/runs/0/control", {"wish": "stop"}),
        ("/api/login", {"token": TOKEN}),
        ("/api/logout", {}),
    ):
        assert client.post(path, json=body, headers={**headers, "cookie": cookie}).status_code == 403
    assert not (run.folder / "control.json").exists()
    # a form elsewhere sends no JSON
    form = {**ORIGIN, "cookie": cookie, "content-type": "application/x-www-form-urlencoded"}
    assert client.post("/api/runs/0/control", content="wish=stop", headers=form).status_code == 422


def test_a_forged_host_reads_nothing(client: Requests) -> None:
    for path in ("/", "/api/page", "/api/runs", "/api/events"):
        assert client.get(path, headers={"host": "evil.example"}).status_code == 403


def test_a_private_page_shows_nothing_without_the_token(run: GrowingRun) -> None:
    client = requests(run.folder, private=True)
    paths = ("/api/runs", "/api/runs/0/settings", "/api/events", "/api/federation")
    assert [client.get(path).status_code for path in paths] == [401] * 4
    assert client.get("/api/page").json()["locked"]
    assert str(run.folder) not in client.get("/api/page").text
    known = login(client)
    assert client.get("/api/runs", headers=known).json()[0]["name"] == "run"
    client.close()


def test_a_stranger_cannot_send_much(run: GrowingRun) -> None:
    client = requests(run.folder, private=True)
    for path in ("/api/login", "/api/runs/0/control", "/api/federation"):
        reply = client.post(path, json={"token": "x" * MOST_BODY}, headers=ORIGIN)
        assert (reply.status_code, reply.text) == (413, "The request is too large.\n")
    login(client)
    client.close()


def test_what_belongs_to_the_event_loop_is_used_in_it(run: GrowingRun) -> None:
    loops = []
    client = requests(
        run.folder, private=True, recognise=lambda request, session: loops.append(asyncio.get_running_loop())
    )
    assert client.get("/api/runs", headers=login(client)).status_code == 200
    assert len(loops) == 1
    client.close()


def test_agents_are_for_the_operator_alone(run: GrowingRun) -> None:
    agents = Agents()
    client = requests(run.folder, operator=agents)
    revoke = {"deed": "revoke", "name": "kerry"}
    assert client.get("/api/federation").status_code == 401
    assert client.post("/api/federation", json=revoke, headers=ORIGIN).status_code == 401
    known = login(client)
    assert client.get("/api/federation", headers=known).json() == {"agents": []}
    assert client.post("/api/federation", json=revoke, headers=known).status_code == 200
    assert agents.deeds == [("revoke", "kerry")]
    reply = client.post("/api/federation", json={"deed": "revoke", "name": "nobody"}, headers=known)
    assert (reply.status_code, reply.json()["detail"]) == (409, "There is no agent 'nobody'.")
    client.close()
    alone = requests(run.folder)
    assert alone.get("/api/federation", headers=login(alone)).status_code == 404
    alone.close()


def heard(word: str) -> tuple[Any, ...]:
    """What the stream says: whether something changed, and how many rounds the first cell of each run has."""
    news = json.loads(word.removeprefix("data: "))
    return news["changed"], *(run["cells"][0]["rounds_done"] for run in news["runs"])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLANCE", "REST"):
        monkeypatch.setattr(watch_app, name, 0.001)


def test_the_stream_of_a_private_page_ends_with_its_session(run: GrowingRun, quick: None) -> None:
    page = Page([LiveRun(run.folder)], same_token(TOKEN), private=True)
    scope = {"type": "http", "scheme": "http", "path": "/", "server": ("localhost", 8600)}
    cookie = str(page.sessions.open(Request({**scope, "headers": []}), TOKEN)).split(";")[0]
    request = Request({**scope, "headers": [(b"cookie", cookie.encode())]})

    async def listen() -> list[str]:
        words = []
        async for word in watch_app._news(page, request):
            words.append(word)
            if len(words) == 2:
                page.sessions.close(request)
                run.add(1)
            if len(words) == 3:  # it goes on
                break
        return words

    assert len(asyncio.run(listen())) == 2


def test_the_stream_says_how_far_runs_are_and_looks_at_files_only_while_somebody_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    runs = [GrowingRun(tmp_path / name).add(1) for name in ("a", "b")]
    page = Page([LiveRun(run.folder) for run in runs], same_token(TOKEN))
    looks = []
    stamp = LiveRun.stamp
    monkeypatch.setattr(LiveRun, "stamp", lambda self: (looks.append(1), stamp(self))[1])

    async def listen() -> list[str]:
        news = watch_app._news(page, cast(Any, None))
        assert looks == []
        words = [await anext(news), await anext(news)]
        runs[1].add(1)
        words.append(await anext(news))
        monkeypatch.setattr(watch_app, "ALIVE", 0.01)
        words.append(await anext(news))
        await news.aclose()
        return words

    retry, *words = asyncio.run(listen())
    assert retry == "retry: 500\n\n"
    assert [heard(word) for word in words] == [(True, 1, 1), (True, 1, 2), (False, 1, 2)]
    before = len(looks)
    runs[0].add(1)
    assert len(looks) == before


def test_the_stream_says_once_why_a_run_cannot_be_read_and_goes_on(tmp_path: Path, quick: None) -> None:
    (tmp_path / "run.db").write_bytes(b"this is no database" * 100)
    os.utime(tmp_path / "run.db", (0, 0))
    page = Page(RunOnceItExists(tmp_path), same_token(TOKEN))

    async def listen() -> list[str]:
        news = watch_app._news(page, cast(Any, None))
        words = [await anext(news), await anext(news)]
        (tmp_path / "run.db").unlink()
        words.append(await anext(news))
        await news.aclose()
        return words

    _, wrong, then = asyncio.run(listen())
    assert "run.db" in json.loads(wrong.removeprefix("data: "))["error"]
    assert heard(then) == (True,)


def test_the_shadow_where_a_table_goes_on_is_darker_than_the_page_and_hides_no_number() -> None:
    css = (Path(watch_app.__file__).parent / "static" / "watch.css").read_text()
    themes = [dict(re.findall(r"--(paper|shade): #(\w+);", line)) for line in css.splitlines() if "--shade: " in line]
    assert len(themes) == 2
    for theme in themes:
        assert int(theme["shade"][0] * 2, 16) < int((theme["paper"] * 2)[:2], 16)
    (padding,) = re.findall(r"th, td \{ padding: \d+px (\d+)px", css)
    widths = re.findall(r"(\d+)px 100% no-repeat scroll", css)
    assert len(widths) == 2
    assert all(int(width) <= int(padding) for width in widths)
