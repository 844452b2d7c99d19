"""The server's life: an address, a line that says it, and the end by Ctrl-C."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from lapclip.errors import ConfigError

PORT = 8765
TRIES = 50


def serve(names: Sequence[str], host: str = "127.0.0.1", port: int | None = None) -> int:
    """Serve the page until Ctrl-C. It opens on the runs `names`. Without a port: 8765, or the next free one."""
    # Here, so that the command's help does not wait for the modules of the web server.
    import uvicorn

    from lapclip.watch.web.application import Application
    from lapclip.watch.web.listing import run_named
    from lapclip.watch.web.security import door_for

    names = [Path(name).name for name in names]
    application = Application(names)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            application.closing.set()  # else the end would wait for streams that have none
            super().handle_exit(sig, frame)

    with _listen(host, port) as listening:
        address, port = str(listening.getsockname()[0]), int(listening.getsockname()[1])
        loopback = ipaddress.ip_address(address).is_loopback
        door = door_for(host, port, loopback=loopback)
        for name in names:
            if run_named(name) is None:
                print(f"There is no run called {name} yet; the page shows it as soon as it begins.")
        print(f"Watching the runs in this folder: {_link(host, address, port, door.token)}")
        if not loopback:
            print("Who has this address can look at your runs. What is sent is not encrypted.")
        print("Ctrl-C ends the page; training goes on.", flush=True)
        config = uvicorn.Config(
            application.behind(door),
            log_level="error",
            access_log=False,  # it would write down the token
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            http="h11",
            loop="asyncio",
            timeout_graceful_shutdown=2,
        )
        try:
            Server(config).run(sockets=[listening])
        except KeyboardInterrupt:  # the way to end it
            pass
    return 0


def _listen(host: str, port: int | None) -> socket.socket:
    """A socket at the address; without a port, the first free one from PORT on."""
    if port is not None and not 0 <= port <= 65535:
        raise ConfigError(f"--port must be 0 to 65535, not {port}.", hint="lapclip watch --web --port 8765")
    wanted = [port] if port is not None else list(range(PORT, PORT + TRIES))
    for each in wanted:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, each, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                reason = f"Cannot listen at {host}, port {each}: {error.strerror or error}."
                raise ConfigError(reason, hint="lapclip watch --web, without --host and --port") from None
    raise ConfigError(f"Port {wanted[-1]} is in use.", hint=f"lapclip watch --web --port {wanted[-1] + 1}")


def _link(host: str, address: str, port: int, token: str | None) -> str:
    """The address to open in a browser. A server at all addresses is named by one that others can reach."""
    name = _reachable(address) if ipaddress.ip_address(address).is_unspecified else host
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def _reachable(address: str) -> str:
    """The address by which this machine goes out. Nothing is sent for that."""
    version6 = ":" in address
    try:
        with socket.socket(socket.AF_INET6 if version6 else socket.AF_INET, socket.SOCK_DGRAM) as trial:
            trial.connect(("2001:db8::1" if version6 else "192.0.2.1", 9))  # documentation addresses: nobody's
            return str(trial.getsockname()[0])
    except OSError:
        return socket.gethostname()
