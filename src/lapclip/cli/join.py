"""`lapclip join`, and what a host shows while it waits for guests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)

from lapclip.cli.output import ARGUMENTS, Common, emit, typed_in
from lapclip.errors import ConfigError, JoinError, WrongKey
from lapclip.text import duration, printable, size
from lapclip.together import quiet_torch

if TYPE_CHECKING:
    from lapclip.together.invitation import Guest

TRIES = 3
"""How often a key is asked for."""
FLAGS = ("--machines", "--address")
"""What the command that trains on the host is not given."""


def join(
    host: str,
    /,
    *,
    key_file: Path | None = None,
    data: str | None = None,
    anyway: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    common: Common | None = None,
) -> int:
    """Train with another computer: take the data from it, and compute a share of each batch.

    `lapclip train --machines 2` on the other computer shows the line to type here, and a key. Settings, weights and
    data come from there; the run's folder stays there. Ctrl-C ends the run on all computers; it is saved.

    For example:

    - `lapclip join 192.168.1.20:29400`
    - `lapclip join desktop.local:29400 --key-file key.txt`

    Parameters
    ----------
    host
        The address and the port that the host shows. Example: lapclip join 192.168.1.20:29400
    key_file
        A file with the key; without it, the key is asked for. Example: lapclip join 192.168.1.20:29400 --key-file
        key.txt
    data
        Where this computer has a copy of data that the host streams. Example: lapclip join 192.168.1.20:29400 --data
        shards/
    anyway
        Join from macOS to Linux or back, which is reported not to work. Example: lapclip join 192.168.1.20:29400
        --anyway
    """
    quiet_torch()
    from lapclip.commands.join import GuestAtWork, split_place
    from lapclip.together.invitation import Host

    place, shown, tries = split_place(host), TogetherDisplay(), 1
    while True:
        try:
            joined = GuestAtWork(Host(*place, _key(key_file)), shown, data, anyway=anyway).work()
            break
        except WrongKey as error:
            if key_file or tries == TRIES:
                raise
            shown.say(error.message)
            tries += 1
    lines = [f"After {duration(joined.seconds)} with {joined.host}: {joined.message}."]
    emit(joined.to_dict(), [escape(line) for line in lines], common)
    return joined.status


def _key(path: Path | None) -> str:
    """The key, from a file or a prompt. Not from the command line, which other users of a computer can see."""
    from lapclip.together.invitation import tidy_key

    if path:
        try:
            return tidy_key(path.read_text(encoding="utf-8")[:1000])
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} cannot be read: {getattr(error, 'strerror', None) or error}."
            ) from None
    if not sys.stdin.isatty():
        raise JoinError(
            "The key is asked for, and there is no terminal to ask at.", hint="--key-file FILE"
        )
    return tidy_key(getpass("Key that the host shows: "))


def own_arguments() -> list[str]:
    """The arguments of this process without those that invite others."""
    kept, skip = [], False
    for word in ARGUMENTS.get():
        if skip:
            skip = False
        elif word in FLAGS:
            skip = True
        elif not word.startswith(tuple(f"{flag}=" for flag in FLAGS)):
            kept.append(word)
    return kept


def check_machines(machines: int | None, address: str | None, *, background: bool) -> None:
    """Refuse what does not go together with --machines."""
    from lapclip.machine.torchrun import under_torchrun

    if machines is None and address is not None:
        raise ConfigError("--address is for --machines.", hint="--machines 2")
    if machines is None:
        return
    if machines < 2:
        raise ConfigError(
            f"--machines {machines}: with this computer there are at least 2.", hint="--machines 2"
        )
    if background:
        raise ConfigError(
            "--machines shows a key, so it is not for the background.", hint="without --background"
        )
    quiet_torch()
    if under_torchrun():
        raise ConfigError(
            "--machines is not for torchrun, which starts its processes itself.",
            hint="one or the other",
        )


class TogetherDisplay:
    """Lines, and a bar for each computer that fetches the data, on the terminal; lines alone where there is none."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, str] = {}
        """How each guest stood when that was last said."""
        self._begun: set[str] = set()

    def say(self, line: str) -> None:
        """One line, above the bars."""
        self._console.print(printable(typed_in(line)), markup=False, soft_wrap=True)

    def invite(self, lines: Sequence[str]) -> None:
        """What to do on the other computers."""
        for line in lines:
            self.say(line)

    def show_guests(self, guests: Sequence[Guest], wanted: int) -> None:
        """Who has joined, and how far each is."""
        for guest in guests:
            name = f"{guest.name} ({guest.address})"
            self._follow(guest.id, name, guest.done, guest.total)
            if guest.state != self._told.get(guest.id):
                self._told[guest.id] = guest.state
                self.say(
                    f"{name} {'fetches the data' if guest.state == 'fetching' else 'is ready'}"
                )
        for gone in self._told.keys() - {guest.id for guest in guests}:
            del self._told[gone]
            self._end(gone)
            self.say("a guest has left")

    def fetching(self, done: int, total: int, /) -> None:
        """Called while the data is brought over."""
        self._now_and_then("fetching the data", done, total)

    def preparing(self, done: int, total: int, /) -> None:
        """Called while the data is made ready to be sent."""
        self._now_and_then("preparing the data", done, total)

    def close(self) -> None:
        """Leave the terminal tidy."""
        if self._bars is not None:
            self._bars.stop()
        self._bars, self._tasks = None, {}

    def _now_and_then(self, what: str, done: int, total: int) -> None:
        if not self._console.is_terminal and what not in self._begun:
            self._begun.add(what)
            self.say(f"{what}, {size(total)}")
        self._follow(what, what, done, total)
        if done == total:
            self.close()

    def _follow(self, key: str, name: str, done: int, total: int) -> None:
        if not self._console.is_terminal or not total:
            return
        if self._bars is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                DownloadColumn(),
            )
            self._bars = Progress(
                *columns, TransferSpeedColumn(), console=self._console, transient=True, expand=True
            )
            self._bars.start()
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(printable(name), total=total)
        self._bars.update(self._tasks[key], completed=done, total=total)

    def _end(self, key: str) -> None:
        if self._bars is not None and key in self._tasks:
            self._bars.remove_task(self._tasks.pop(key))
