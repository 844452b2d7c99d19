"""The servers that run on this computer, and how one is asked to take a newer model.

Each has a file in the cache folder for as long as it lives: its process, its address, its model. Whoever asks it for a
newer model puts a file beside that, which the server looks for, because Windows has no signal for it; the server's
answer stands in its own file then.
"""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lapclip.errors import RunError
from lapclip.paths import LARGEST_SETTINGS, cache_folder, parse_json, read_bytes, write_atomic
from lapclip.runs.heartbeat import Beat, beat_of
from lapclip.suggest import command

if TYPE_CHECKING:
    from lapclip.serving.service import ServedModel

LONGEST_WAIT = 600.0
"""Seconds in which a server has to answer: it may have to measure."""


@dataclass(frozen=True)
class RunningServer:
    """What a server says of itself."""

    process: int
    began: float
    host: str
    url: str
    name: str
    reference: str
    """A path that leads to its model from every folder."""
    fingerprint: str
    answered: float = 0.0
    """When it last answered whether there is a newer model, and what it answered."""
    outcome: str = ""
    """taken, same or refused."""
    reason: str = ""

    @property
    def path(self) -> Path:
        return _folder() / f"{self.host} {self.process}.json"

    @property
    def asked(self) -> Path:
        """There while someone asks it to take a newer model."""
        return self.path.with_suffix(".reload")

    @property
    def alive(self) -> bool:
        return Beat(self.process, self.began, self.host, 0.0).alive

    def write(self) -> None:
        with suppress(OSError):  # a cache that cannot be written costs `--reload`, not the server
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps(asdict(self)))

    def remove(self) -> None:
        for path in (self.path, self.asked):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def this_server(url: str, name: str, reference: str, fingerprint: str) -> RunningServer:
    """The server that this process is."""
    beat = beat_of(os.getpid())
    return RunningServer(beat.process, beat.began, beat.host, url, name, reference, fingerprint)


def running_servers() -> list[RunningServer]:
    """The servers of this computer; what the dead left behind is removed."""
    found = []
    for path in sorted(_folder().glob("*.json")):
        server = _read(path)
        if server is None or server.path != path:
            continue
        if server.host == platform.node() and not server.alive:
            server.remove()
        elif server.host == platform.node():  # a home may be shared by computers
            found.append(server)
    return found


def find_server(name: str | None, reference: str | None) -> RunningServer:
    """The server of a model, by its name, its address or where the model lies; without any, the only one there is."""
    servers = running_servers()
    if not servers:
        raise RunError("No server is running on this computer.", hint="lapclip serve")
    fitting = [
        s
        for s in servers
        if name in (None, s.name, s.url) or (reference and s.reference == reference)
    ]
    if len(fitting) == 1:
        return fitting[0]
    shown = ", ".join(f"{server.name} at {server.url}" for server in servers)
    what = "Several servers are running" if fitting else f"No server of {name} is running"
    raise RunError(
        f"{what}: {shown}.", hint=command("serve", "--reload", (fitting or servers)[0].url)
    )


def ask_to_reload(server: RunningServer) -> RunningServer:
    """Ask a server to take a newer model, and wait for what it says."""
    try:
        server.asked.touch()
    except OSError as error:
        raise RunError(
            f"{server.asked} cannot be written: {error.strerror or error}.", hint="LAPCLIP_CACHE"
        ) from None
    until = time.monotonic() + LONGEST_WAIT
    while time.monotonic() < until:
        now = _read(server.path)
        if now is None or not now.alive:
            raise RunError(f"The server at {server.url} has ended.", hint="lapclip serve")
        if now.answered > server.answered:
            return now
        time.sleep(0.1)
    raise RunError(
        f"The server at {server.url} gives no answer.",
        hint=f"what it logged; its process is {server.process}",
    )


def answer(server: RunningServer, model: ServedModel, outcome: str, reason: str) -> RunningServer:
    """Note what became of the question whether there is a newer model."""
    said = replace(
        server, fingerprint=model.fingerprint, answered=time.time(), outcome=outcome, reason=reason
    )
    said.write()
    return said


def _read(path: Path) -> RunningServer | None:
    try:
        found = RunningServer(
            **parse_json(read_bytes(path, LARGEST_SETTINGS, own=True).decode("utf-8"))
        )
        kinds = {"process": int, "began": (int, float), "answered": (int, float)}
        if not all(isinstance(getattr(found, name), kind) for name, kind in kinds.items()):
            return None
        return (
            found
            if all(isinstance(text, str) for text in (found.host, found.url, found.name))
            else None
        )
    except (OSError, ValueError, TypeError):
        return None


def _folder() -> Path:
    return cache_folder() / "serving"
