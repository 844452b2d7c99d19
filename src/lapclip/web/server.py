"""The server's life: an address, a line that prints it, and the end by Ctrl-C; and the files that pages load.

Nothing else of the disk has an address.
"""

from __future__ import annotations

import errno
import importlib.util
import ipaddress
import socket
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from lapclip.errors import ConfigError, RunError

if TYPE_CHECKING:
    import asyncio

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from lapclip.web.security import Door

TRIES = 50
SHARED = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class Announcement:
    """What a server prints at its start."""

    command: str
    """What the user types to start it."""
    title: str
    """What stands before the address."""
    shared: str
    """What others can do who have the address."""
    ending: str
    """How it ends."""
    notes: Sequence[str] = ()
    """What is printed first."""
    fragment: str = ""
    """What the page is to show first: the end of the address, which browsers keep to themselves."""


def serve_until_interrupted(
    app: ASGIApp,
    announcement: Announcement,
    host: str,
    port: int | None,
    first_port: int,
    at_end: Callable[[], None] = lambda: None,
    output: TextIO | None = None,
    ready: Callable[[str], None] = lambda address: None,
    guard: Callable[[ASGIApp, Door], ASGIApp] | None = None,
    token: bool = True,
    names: Iterable[str] = (),
    connections: int | None = None,
    patience: int = 2,
    started: Callable[[asyncio.AbstractEventLoop], None] = lambda loop: None,
) -> bool:
    """Serve an application until Ctrl-C. Without a port: `first_port`, or the next free one. A second Ctrl-C waits for
    nobody. Returns whether all requests that were under way were answered.

    `at_end` is called before connections are waited for, `patience` seconds at most; `output` is where its address is
    printed, else stdout; `ready` is told the address too. `guard` stands before the application, with a token in the
    address or without; `names` are names of this server beside those of this machine. `started` gets the loop in which
    requests are answered.
    """
    # Here, so that a command's help does not wait for the modules of the web server.
    import asyncio

    import uvicorn
    import uvicorn.loops.asyncio

    from lapclip.web.security import Connection, Guard, door_for

    class Limited(Connection):
        most = connections or Connection.most

    class Server(uvicorn.Server):
        all_answered = True

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            started(asyncio.get_running_loop())

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await super().shutdown(sockets)
            self.all_answered = not self.server_state.tasks

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            at_end()  # else the end would wait for streams that have none
            self.force_exit = self.should_exit
            super().handle_exit(sig, frame)

    server: Server | None = None

    # Ctrl-C is the way to end it, from the moment on that the address is printed; before the loop runs, its coroutine
    # is never awaited.
    warnings.filterwarnings("ignore", "coroutine 'Server.serve' was never awaited")
    with (
        _listen(host, port, first_port, announcement.command) as listening,
        suppress(KeyboardInterrupt),
    ):
        address, port = str(listening.getsockname()[0]), int(listening.getsockname()[1])
        loopback = ipaddress.ip_address(address).is_loopback
        door = door_for(host, announcement.command, loopback=loopback, token=token, names=names)
        config = uvicorn.Config(
            (guard or Guard)(app, door),
            log_level="error",
            access_log=False,  # it would write down the token
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            http=Limited,
            loop="asyncio",
            timeout_graceful_shutdown=patience,
        )
        config.load()  # before the address is printed: Ctrl-C in the middle of an import ends the process at once
        for note in announcement.notes:
            print(note, file=output)
        link = _link(host, address, port, door.token) + (
            f"#{announcement.fragment}" if announcement.fragment else ""
        )
        print(f"{announcement.title}: {link}", file=output)
        print(
            announcement.shared + ("" if loopback else " What is sent is not encrypted."),
            file=output,
        )
        print(announcement.ending, file=output, flush=True)
        ready(link)
        server = Server(config)
        server.run(sockets=[listening])
    return server is None or server.all_answered


def check_port(host: str, port: int | None, first_port: int, command: str) -> None:
    """Refuse a port that cannot be had, before work is done for a server there."""
    _listen(host, port, first_port, command).close()


def _listen(host: str, port: int | None, first_port: int, command: str) -> socket.socket:
    """A socket at the address; without a port, the first free one from `first_port` on."""
    if port is not None and not 0 <= port <= 65535:
        raise ConfigError(
            f"--port must be 0 to 65535, not {port}.", hint=f"{command} --port {first_port}"
        )
    candidates = [port] if port is not None else list(range(first_port, first_port + TRIES))
    for each in candidates:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, each, type=socket.SOCK_STREAM)[0]
            listening = socket.create_server(address[:2], family=family)
            # asyncio does this only for sockets that say that they are TCP's; without, an answer in two parts waits
            # 40 ms for the other side.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return listening
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                reason = f"Cannot listen at {host}, port {each}: {error.strerror or error}."
                raise ConfigError(reason, hint=f"{command}, without --host and --port") from None
    raise ConfigError(
        f"Port {candidates[-1]} is in use.", hint=f"{command} --port {candidates[-1] + 1}"
    )


def _link(host: str, address: str, port: int, token: str) -> str:
    """The address to open in a browser. A server at all addresses is named by one that others can reach."""
    name = _reachable(address) if ipaddress.ip_address(address).is_unspecified else host
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def _reachable(address: str) -> str:
    """The address by which this machine goes out. Nothing is sent for that."""
    version6 = ":" in address
    try:
        with socket.socket(
            socket.AF_INET6 if version6 else socket.AF_INET, socket.SOCK_DGRAM
        ) as trial:
            trial.connect(
                ("2001:db8::1" if version6 else "192.0.2.1", 9)
            )  # documentation addresses: nobody's
            return str(trial.getsockname()[0])
    except OSError:
        return socket.gethostname()


def page_files(static: Path) -> dict[str, Path]:
    """What a page loads, by its name: what all pages share, and its own."""
    return {
        path.name: path
        for folder in (SHARED, static)
        for path in folder.iterdir()
        if path.suffix in (".css", ".js", ".svg")
    }


def answer_file(request: Request, path: Path, *, max_age: int = 0) -> Response:
    """A file of ours. A browser that has it already is told so."""
    from starlette.responses import (
        FileResponse,
        Response,
    )  # reports need plotly.js, and no web server

    status = path.stat()
    tag = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
    headers = {
        "ETag": tag,
        "Cache-Control": f"private, max-age={max_age}" if max_age else "no-cache",
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return FileResponse(path, media_type=TYPES[path.suffix], headers=headers)


def plotly_file() -> Path:
    """plotly.js, as the plotly package carries it. The package itself is never imported: that takes a second."""
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise RunError(
            "The package plotly is not installed; it draws the charts.", hint="pip install plotly"
        )
    return Path(found.origin).parent / "package_data" / "plotly.min.js"
