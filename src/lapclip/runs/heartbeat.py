"""A sign of life: which process works on something, and when it last gave one.

A process number alone says little, because systems give it out again; together with the moment the process began it
names one process. On another computer, which shares the folder, only the heartbeat counts.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from lapclip.paths import (
    LARGEST_SETTINGS,
    cache_folder,
    digest_of_bytes,
    parse_json,
    read_bytes,
    write_atomic,
)
from lapclip.text import number, printable

EVERY = 5.0
"""Seconds between two beats."""
LATE = 60.0
"""Seconds without a beat after which a process on another computer counts as dead."""
BEATS_WATCHED = 2
"""Beats that a process on another computer may miss while it is watched: its disk may be slow."""
CLOCK_STEP = 2.5
"""Seconds by which two readings of when a process began may differ: the boot time has whole seconds."""
LONG_DEAD = 86_400.0
"""Seconds without a beat by which no two clocks differ."""


@dataclass(frozen=True)
class Beat:
    """A process's sign of life: which process it is, on which computer, and when this was."""

    process: int
    began: float
    host: str
    time: float
    about: str = ""
    """What it works on."""

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this computer."""
        return self.host == platform.node()

    @property
    def alive(self) -> bool:
        """Whether that very process is still there."""
        if not self.is_here:
            return abs(time.time() - self.time) < LATE
        try:
            process = psutil.Process(self.process)
            same = abs(_began(process) - self.began) < CLOCK_STEP
            return (
                same and process.status() != psutil.STATUS_ZOMBIE
            )  # dead, and nobody has looked yet
        except psutil.Error:
            return False


def beat_of(process: int, about: str = "") -> Beat:
    """The beat of a process of this computer, now."""
    return Beat(process, _began(psutil.Process(process)), platform.node(), time.time(), about)


def _began(process: psutil.Process) -> float:
    """Return when a process began, on a scale that does not move when the clock is set.

    psutil adds the boot time to what Linux and macOS report, and the boot time moves with the clock.
    """
    created = process.create_time()
    return created if sys.platform == "win32" else created - psutil.boot_time()


def read_beat(path: Path) -> Beat | None:
    """The last beat written there, if there is a whole one."""
    try:
        saved: dict[str, Any] = parse_json(
            read_bytes(path, LARGEST_SETTINGS, own=True).decode("utf-8")
        )
        beat = Beat(**saved)
    except (OSError, ValueError, TypeError):
        return None
    sound = isinstance(beat.process, int) and isinstance(beat.host, str)
    return (
        beat if sound and number(beat.began) is not None and number(beat.time) is not None else None
    )


def beat_elsewhere(path: Path) -> Beat | None:
    """The last beat written there, if it is that of a process on another computer that lives.

    Two clocks may differ, so a beat that looks old is watched for a moment: whoever lives writes the next one.
    """
    beat = read_beat(path)
    if beat is None or beat.is_here:
        return None
    if beat.alive:
        return beat
    if abs(time.time() - beat.time) < LONG_DEAD:
        wait = f"{BEATS_WATCHED * EVERY:.0f} s"
        print(
            f"{printable(beat.host)} worked here last: watching {wait} for a sign of life.",
            file=sys.stderr,
        )
        for _ in range(BEATS_WATCHED * 4):
            time.sleep(EVERY / 4)
            if (later := read_beat(path)) != beat:
                return later
    return None


def write_beat(path: Path, beat: Beat) -> None:
    """Replaced as a whole, so that nobody reads half of one; a full disk costs the sign, not the run."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(asdict(beat)))


class Pulse:
    """Writes beats to a file from the beginning of a `with` to its end."""

    def __init__(self, path: Path, about: str = "") -> None:
        self._path, self._about = path, about
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lapclip-pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._write()  # so that others know from here on
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._over.wait(EVERY):
            self._write()

    def _write(self) -> None:
        write_beat(self._path, beat_of(os.getpid(), self._about))


def using(run: Path) -> Pulse:
    """Mark a run as used by this process while the `with` block lasts, so that `clean` leaves it alone."""
    about = os.path.realpath(run)
    part = digest_of_bytes(os.fsencode(about))[:16]
    return Pulse(_using_folder() / f"{platform.node()} {os.getpid()} {part}.json", about)


def runs_in_use() -> set[str]:
    """Return the real paths of runs whose models other processes of this computer use.

    Removes the files of processes that have ended.
    """
    in_use = set()
    for path in sorted(_using_folder().glob("*.json")):
        beat = read_beat(path)
        if beat is None or not beat.alive:
            with suppress(OSError):
                path.unlink()
        elif beat.is_here and beat.process != os.getpid():  # a home may be shared by computers
            in_use.add(beat.about)
    return in_use


def _using_folder() -> Path:
    return cache_folder() / "using"
