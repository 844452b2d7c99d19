"""`lapclip join`, and `--machines` of other commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from getpass import getpass
from typing import TYPE_CHECKING, Any

from lapclip.cli.display import display
from lapclip.cli.output import ARGUMENTS, Common, emit, typed_in
from lapclip.errors import ConfigError, WrongKey
from lapclip.progress import DataProgress
from lapclip.text import duration, printable

if TYPE_CHECKING:
    from lapclip.commands.join import Plan

MAX_TRIES = 3  # of a key


def join(host: str, /, *, common: Common | None = None) -> int:
    """Train with another computer: copy its data, and compute some rows of each batch.

    `lapclip train --machines 2` on the other computer shows the line to type here, and a key. Settings, weights and
    data come from there; the run's folder stays there. Ctrl-C ends the run on all computers; it is saved.

    For example:

    - `lapclip join 192.168.1.20:29400`

    Parameters
    ----------
    host
        The address and the port that the host shows. Example: lapclip join 192.168.1.20:29400
    """
    quiet_torch()
    from lapclip.commands.join import join as join_host
    from lapclip.commands.join import parse_place
    from lapclip.join.client import HostClient
    from lapclip.join.key import parse_key

    address, port = parse_place(host)
    tries = MAX_TRIES if sys.stdin.isatty() else 1
    with display() as shown:
        joined = None
        while joined is None:
            client = HostClient(address, port, parse_key(_ask_for_key()))
            try:
                joined = join_host(client, say, shown.counting("copying the data"))
            except WrongKey as error:
                tries -= 1
                if not tries:
                    raise
                say(error.message)
    line = f"The run of {joined.host} is over, after {duration(joined.seconds)}."
    emit(joined.to_dict(), [line], common)
    return 0


def _ask_for_key() -> str:
    """Return the key. It is no argument, because other users of a computer can see those."""
    if sys.stdin.isatty():
        return getpass("Key that the host shows: ")
    return sys.stdin.readline(1000)


def check_machines(machines: int | None, *, background: bool) -> None:
    """Refuse what cannot be combined with --machines."""
    from lapclip.join.agreement import invited_machines
    from lapclip.machine.torchrun import under_torchrun

    if machines is None:
        return
    if machines < 2:
        raise ConfigError(
            f"--machines {machines} is too few: this computer counts too.", hint="--machines 2"
        )
    if background:
        raise ConfigError("--machines shows a key, so it cannot run with --background.")
    if under_torchrun() and not invited_machines():
        raise ConfigError("--machines starts processes itself, so it cannot run under torchrun.")


def invite(machines: int, make_plan: Callable[[Any, DataProgress], Plan], *further: str) -> int:
    """Invite other computers to a run, and train with them. `make_plan` gets the module of the command.

    The process that trains gets the arguments of this command, and `further` ones.
    """
    quiet_torch()
    from lapclip.commands import join as plans

    with display() as shown:
        plan = make_plan(plans, shown.data_progress)
        shown.close()
        progress = shown.counting("files read")
        return plans.invite(plan, machines, [*ARGUMENTS.get(), *further], say, progress)


def quiet_torch() -> None:
    """Keep torch's warnings about names and closed connections off the terminal. Call it before the import."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def say(line: str) -> None:
    """Print a line for a person."""
    print(printable(typed_in(line)), file=sys.stderr, flush=True)
