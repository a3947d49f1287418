"""The page's requests: files of the page, what the views show, a stream of news."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import HTTPException
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel

from fedloom import __version__
from fedloom.errors import FedloomError
from fedloom.experiment.control import Wish, read_control, write_wish
from fedloom.watch import views
from fedloom.watch.guard import Guarded, Sessions, own_hosts
from fedloom.watch.live_run import MARKS, LiveRun
from fedloom.watch.models import models as models_of

STATIC = Path(__file__).parent / "static"
FILES = {path.name: path for path in sorted(STATIC.iterdir())}
GLANCE = 0.25  # seconds between two looks at the files of the runs, while somebody watches
REST = 0.8  # seconds of quiet after news: runs with short rounds must not pay for the page
ALIVE = 10.0  # seconds after which the stream says something, so that a broken connection is noticed
Json = dict[str, Any]


class Operator(Protocol):
    """What a coordinator adds to the page: its agents, and what an operator can do about them."""

    def state(self) -> Json:
        """Return what the coordinator is doing now."""

    def act(self, deed: str, name: str) -> Json:
        """Do something: invite an agent, or revoke one; raise `FedloomError` if that cannot be done."""


@dataclass(frozen=True)
class Page:
    """A page to serve: some runs, and who may do what."""

    runs: Sequence[LiveRun]
    is_token: Callable[[Request, str], bool]
    hosts: Collection[str] = ()
    private: bool = False  # whether the token is needed to see anything
    operator: Operator | None = None
    is_own_host: Callable[[str], bool] | None = None
    closing: Callable[[], bool] = lambda: False
    recognise: Callable[[Request, str], None] = lambda request, session: None
    sessions: Sessions = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sessions", Sessions(self.is_token))

    # in the event loop, not in threads: sessions, guesses and connections belong to it
    async def reader(self, request: Request) -> None:
        """Refuse a request that may not read."""
        if self.private:
            await self.writer(request)

    async def writer(self, request: Request) -> None:
        """Refuse a request that is not the operator's."""
        if not self.sessions.is_open(request):
            raise HTTPException(401, "The operator's token is needed.")
        self.recognise(request, self.sessions.name(request))

    def run(self, number: int) -> LiveRun:
        """Return the run with a number."""
        if not 0 <= number < len(self.runs):
            raise HTTPException(404, "There is no such run.")
        return self.runs[number]


def same_token(known: str) -> Callable[[Request, str], bool]:
    """Return a function that compares a token with the known one, in constant time."""
    return lambda request, given: hmac.compare_digest(given.encode(), known.encode())


class Login(BaseModel):
    """What the form sends."""

    token: str


class Control(BaseModel):
    """What the operator wishes a run to do."""

    wish: Wish


class Deed(BaseModel):
    """What the operator does about agents."""

    deed: str
    name: str = ""


def make_app(page: Page) -> FastAPI:
    """Return the application of a page."""
    app = FastAPI(title="fedloom watch", openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(Guarded, is_own_host=page.is_own_host or own_hosts(page.hosts))
    reads, writes = Depends(page.reader), Depends(page.writer)

    @app.exception_handler(FedloomError)
    def _told(request: Request, error: FedloomError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=409)

    @app.get("/")
    def index() -> Response:
        return FileResponse(FILES["index.html"])

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in FILES:
            raise HTTPException(404, "There is no such file.")
        return FileResponse(FILES[name])

    @app.get("/api/page")
    def about(request: Request) -> Json:
        known = page.sessions.is_open(request)
        if page.private and not known:
            return {"version": __version__, "locked": True, "operator": False, "federation": False}
        about = {"version": __version__, "locked": False, "operator": known, "federation": page.operator is not None}
        return {**about, "marks": ["took part", *(words for words, _ in MARKS.values())]}

    # what is asked for again and again is answered as it is: FastAPI would look at every number of it
    @app.get("/api/runs", dependencies=[reads])
    def overviews() -> Response:
        return JSONResponse(_overviews(page))

    @app.get("/api/runs/{number}/curves", dependencies=[reads])
    def curves(
        number: int, metric: str, panel: str, axis: str = "rounds", each_seed: bool = False, known: str = ""
    ) -> Response:
        return JSONResponse(views.curves(page.run(number).data(), metric, panel, axis, each_seed, known))

    @app.get("/api/runs/{number}/clients", dependencies=[reads])
    def clients(number: int, label: str, seed: int, metric: str, phase: str) -> Response:
        return JSONResponse(views.clients(page.run(number), label, seed, metric, phase))

    @app.get("/api/runs/{number}/matrix", dependencies=[reads])
    def matrix(number: int, label: str, seed: int, metric: str, phase: str, after: int = 0) -> Response:
        content = views.matrix(page.run(number), label, seed, metric, phase, after)
        return Response(content, media_type="application/octet-stream")

    @app.get("/api/runs/{number}/distribution", dependencies=[reads])
    def distribution(number: int, metric: str, phase: str, seed: int, round: int | None = None) -> Response:
        return JSONResponse(views.distribution(page.run(number).data(), metric, phase, seed, round))

    @app.get("/api/runs/{number}/models", dependencies=[reads])
    def models(number: int, label: str, seed: int, metric: str, phase: str) -> Response:
        return JSONResponse(models_of(page.run(number).data(), label, seed, metric, phase))

    @app.get("/api/runs/{number}/settings", dependencies=[reads])
    def settings(number: int) -> Json:
        live = page.run(number)
        return {**views.settings(live.data()), "cautions": live.cautions()}

    @app.get("/api/events", dependencies=[reads])
    async def events(request: Request) -> StreamingResponse:
        return StreamingResponse(_news(page, request), media_type="text/event-stream")

    @app.post("/api/login")
    async def login(request: Request, given: Login) -> Response:
        cookie = page.sessions.open(request, given.token)
        if cookie is None:
            raise HTTPException(401, "This is not the operator's token.")
        return JSONResponse({}, headers={"set-cookie": cookie})

    @app.post("/api/logout", dependencies=[writes])
    async def logout(request: Request) -> Response:
        return JSONResponse({}, headers={"set-cookie": page.sessions.close(request)})

    @app.post("/api/runs/{number}/control", dependencies=[writes])
    def control(number: int, given: Control) -> Json:
        live = page.run(number)
        write_wish(live.folder, given.wish)
        return read_control(live.folder)

    @app.get("/api/federation", dependencies=[writes])
    def federation() -> Json:
        return _operator(page).state()

    @app.post("/api/federation", dependencies=[writes])
    def act(given: Deed) -> Json:
        return _operator(page).act(given.deed, given.name)

    return app


def _operator(page: Page) -> Operator:
    if page.operator is None:
        raise HTTPException(404, "These runs have no agents.")
    return page.operator


def _overviews(page: Page) -> list[Json]:
    runs = [(live.data(), read_control(live.folder)) for live in page.runs]
    names = views.names([run for run, _ in runs])
    return [{**views.overview(*run), "name": name} for run, name in zip(runs, names, strict=True)]


def _stamps(page: Page) -> object:
    try:
        return [live.stamp() for live in page.runs]
    except FedloomError:
        return None  # what is wrong is said when the runs are read


async def _news(page: Page, request: Request) -> AsyncGenerator[str, None]:
    """Say how far the runs are whenever one has changed, as long as somebody listens and may.

    Nobody looks at their files otherwise. News without a change are a sign of life, and tell of a process that has
    ended without a word.
    """
    yield "retry: 500\n\n"
    known: object = None
    silent = ALIVE  # the first word comes at once
    while not page.closing() and (not page.private or page.sessions.is_open(request)):
        stamps = _stamps(page)
        if stamps == known and silent < ALIVE:
            await asyncio.sleep(GLANCE)
            silent += GLANCE
            continue
        news: Json = {"changed": stamps != known}
        try:
            news["runs"] = await asyncio.to_thread(_overviews, page)
        except FedloomError as error:
            news["error"] = str(error)
        yield f"data: {json.dumps(news)}\n\n"
        known, silent = stamps, 0.0
        await asyncio.sleep(REST)
