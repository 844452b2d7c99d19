"""`lapclip watch --web`: one page on this machine that follows the runs of a folder, from its start to Ctrl-C.

feed            all runs, a line each; and one run as it goes on, read once for all tabs
snapshot        one run as numbers for the charts, whether it learns, and what it answered at each evaluation
static/         the page

What it shares with other pages (address, security, style, plotly.js) is in lapclip.web. Which address answers what:

GET /                           the page
GET /runs                       all runs, a line each
GET /runs/NAME                  one run as numbers for the charts
GET /runs/NAME/events           its events as they come (server-sent)
GET /runs/NAME/pictures/17.png  an image that the run answered with
GET /plotly.js, /page.css, ...  what the page loads
"""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from lapclip.paths import read_bytes
from lapclip.text import to_json
from lapclip.watch.web.feed import Feed, Feeds, RunList, run_named, wait
from lapclip.web.server import (
    Announcement,
    answer_file,
    page_files,
    plotly_file,
    serve_until_interrupted,
)

STATIC = Path(__file__).parent / "static"

PATIENCE = 60.0
"""Seconds that a stream waits for a run that is not there yet: training sets up first."""
A_DAY = 86_400
LARGEST_IMAGE = 2_000_000
PORT = 8765


class Application:
    """Answers to the page."""

    def __init__(self, names: Sequence[str]) -> None:
        self.closing = asyncio.Event()
        """Set when the server ends: streams end with it."""
        self._names = names
        self._list, self._feeds = RunList(), Feeds()
        self._list_lock = asyncio.Lock()
        self._files, self._plotly = page_files(STATIC), plotly_file()

    def routed(self) -> ASGIApp:
        """The application with its addresses."""
        routes = [
            Route("/", self._page),
            Route("/runs", self._runs),
            Route("/runs/{name}", self._run),
            Route("/runs/{name}/events", self._events),
            Route("/runs/{name}/pictures/{number:int}.png", self._image),
            Route("/plotly.js", self._plotly_js),
            Route("/{file}", self._file),
        ]
        app = Starlette(routes=routes)
        app.router.redirect_slashes = False
        return app

    async def _page(self, request: Request) -> Response:
        return Response(_page(self._names), media_type="text/html; charset=utf-8")

    async def _runs(self, request: Request) -> Response:
        async with self._list_lock:
            rows = await asyncio.to_thread(self._list.rows)
        return Response(to_json(rows), media_type="application/json")

    async def _run(self, request: Request) -> Response:
        tag, encoded = await self._feed(request).snapshot()
        headers = {"ETag": f'"{tag}"', "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == f'"{tag}"':
            return Response(status_code=304, headers=headers)
        return Response(encoded, media_type="application/json", headers=headers)

    async def _events(self, request: Request) -> Response:
        feed = await self._awaited_feed(request)
        position = request.headers.get("last-event-id") or request.query_params.get("after")
        return StreamingResponse(
            feed.stream(position, self.closing), media_type="text/event-stream"
        )

    async def _image(self, request: Request) -> Response:
        run = run_named(request.path_params["name"])
        if run is None:
            raise HTTPException(404)
        image = await asyncio.to_thread(_read_image, run.path, request.path_params["number"])
        # The page names a version in the address, so an image may be cached.
        return Response(
            image, media_type="image/png", headers={"Cache-Control": f"private, max-age={A_DAY}"}
        )

    async def _plotly_js(self, request: Request) -> Response:
        return answer_file(request, self._plotly, max_age=A_DAY)

    async def _file(self, request: Request) -> Response:
        path = self._files.get(request.path_params["file"])
        if path is None:
            raise HTTPException(404)
        return answer_file(request, path)

    def _feed(self, request: Request) -> Feed:
        feed = self._feeds.get(request.path_params["name"])
        if feed is None:
            raise HTTPException(404, "There is no run of this name.")
        return feed

    async def _awaited_feed(self, request: Request) -> Feed:
        """The feed of a run that may be about to begin."""
        name, clock = request.path_params["name"], asyncio.get_running_loop()
        until = clock.time() + PATIENCE
        while (
            re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)
            and clock.time() < until
            and not self.closing.is_set()
        ):
            if run_named(name) or await request.is_disconnected():
                break
            await wait(self.closing, 0.3)
        return self._feed(request)


def _page(names: Sequence[str]) -> bytes:
    """The page. It opens on the runs that were named."""
    text = (STATIC / "page.html").read_text(encoding="utf-8")
    return text.replace("{{runs}}", html.escape(to_json(list(names)))).encode()


def _read_image(run: Path, number: int) -> bytes:
    """An image out of the run's own folder: a link that leads elsewhere is not followed."""
    path = run / "pictures" / f"{number}.png"
    try:
        if not path.resolve().is_relative_to(run.resolve()):
            raise HTTPException(404)
        return read_bytes(path, LARGEST_IMAGE, own=True)
    except OSError:
        raise HTTPException(404) from None


def serve(
    names: Sequence[str],
    host: str = "127.0.0.1",
    port: int | None = None,
    *,
    output: TextIO | None = None,
    ready: Callable[[str], None] = lambda address: None,
) -> int:
    """Serve the page until Ctrl-C. It opens on the runs `names`. Without a port: 8765, or the next free one."""
    names = [Path(name).name for name in names]
    absent = [name for name in names if run_named(name) is None]
    announcement = Announcement(
        command="lapclip watch --web",
        title="Watching the runs in this folder",
        shared="Who has this address can look at your runs.",
        ending="Ctrl-C ends the page; training goes on.",
        notes=[
            f"There is no run called {name} yet; the page shows it as soon as it begins."
            for name in absent
        ],
    )
    application = Application(names)
    app = application.routed()
    serve_until_interrupted(
        app, announcement, host, port, PORT, application.closing.set, output, ready
    )
    return 0
