"""All commands as one application, and how errors reach the user. No torch until a command needs it."""

from __future__ import annotations

import errno
import os
import sys
import traceback

from cyclopts import App
from cyclopts.exceptions import CycloptsError

from lapclip import __version__
from lapclip.cli import interrupts
from lapclip.cli.claims import claims
from lapclip.cli.clean import clean
from lapclip.cli.compare import compare
from lapclip.cli.data import data
from lapclip.cli.doctor import doctor
from lapclip.cli.embed import embed
from lapclip.cli.eval import evaluate
from lapclip.cli.export import export
from lapclip.cli.join import join
from lapclip.cli.machine import machine
from lapclip.cli.model import model, models
from lapclip.cli.output import ARGUMENTS
from lapclip.cli.probe import probe
from lapclip.cli.report import report
from lapclip.cli.resume import resume
from lapclip.cli.runs import runs
from lapclip.cli.search import search
from lapclip.cli.serve import serve
from lapclip.cli.stop import stop
from lapclip.cli.train import train
from lapclip.cli.tune import tune
from lapclip.cli.watch import watch
from lapclip.errors import LapclipError, LostRank
from lapclip.machine.torchrun import will_restart
from lapclip.text import printable, printable_lines, to_json

app = App(
    name="lapclip",
    version=__version__,
    help="Train, understand and ship CLIP on the computer you own.\n\nExample: `lapclip train`",
    help_format="markdown",
    suppress_keyboard_interrupt=False,
    help_epilogue="Every command takes `--json` for scripts and `--debug` for the traceback of an error.",
)
app.command(train, sort_key=1)
app.command(data)
app.command(resume, sort_key=2)
app.command(join, sort_key=2)
app.command(stop, sort_key=3)
app.command(runs, sort_key=4)
app.command(watch, sort_key=5)
app.command(doctor, sort_key=6)
app.command(evaluate, name="eval", sort_key=7)
app.command(report, sort_key=8)
app.command(export, sort_key=8)
app.command(search, sort_key=8)
app.command(serve, sort_key=8)
app.command(embed, sort_key=8)
app.command(probe, sort_key=9)
app.command(machine, sort_key=9)
app.command(tune, sort_key=10)
app.command(compare, sort_key=11)
app.command(claims, sort_key=12)
app.command(model, sort_key=13)
app.command(models, sort_key=13)
app.command(clean, sort_key=14)


def main(arguments: list[str] | None = None) -> None:
    """Run a command. Exit status: 0 done, 1 a fault of ours, 2 the user's input, 130 and 143 stopped by a signal."""
    arguments = sys.argv[1:] if arguments is None else arguments
    ARGUMENTS.set(tuple(arguments))
    # Of several ranks one prints what scripts read.
    debug, as_json = (
        "--debug" in arguments,
        "--json" in arguments and os.environ.get("RANK", "0") == "0",
    )
    try:
        with interrupts.in_command():
            status = (
                app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
                or 0
            )
            if sys.stdout is not None:  # nobody listens
                sys.stdout.flush()
    except LapclipError as error:
        is_restarted = isinstance(error, LostRank) and will_restart()
        parts = [printable(error.message)]  # names in it may hold a line break
        if is_restarted:
            parts.append("Starting again.")
        elif error.hint:
            parts.append(f"Try: {printable(error.hint)}")
        # The process that is started next will have a result.
        status = _report(2, "\n".join(parts), as_json and not is_restarted, debug)
    except CycloptsError as error:
        from lapclip.cli.hints import explain

        message, hint = explain(error, arguments)
        status = _report(2, f"{printable(message)}\nTry: {printable(hint)}", as_json, debug)
    except KeyboardInterrupt as interrupt:
        status = _report(interrupts.exit_status(), str(interrupt) or "Interrupted.", as_json, debug)
    except (
        BrokenPipeError
    ):  # whoever read has gone away, as `| head` does; the rest goes nowhere, without a word
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # stdout, by its number
        status = 0
    except Exception as error:
        full = _disk_is_full(error)
        message = f"A fault in lapclip: {type(error).__name__}: {error}\nTry: the same command with --debug"
        if full:
            message = f"Nothing can be written any more: {error}\nTry: free some disk space, then the same command"
        status = _report(2 if full else 1, message, as_json, debug)
    sys.exit(status)


def _disk_is_full(error: Exception) -> bool:
    """Whether that is all that is wrong, where no command has said so already: torch wants a temporary folder when it
    is imported."""
    codes = {getattr(errno, name, None) for name in ("ENOSPC", "EDQUOT", "EFBIG")} - {None}
    no_folder = "No usable temporary directory" in str(error)
    return isinstance(error, OSError) and (error.errno in codes or no_folder)


def _report(status: int, message: str, as_json: bool, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(
        printable_lines(message), file=sys.stderr
    )  # it may hold names of files and words out of them
    if as_json:
        print(to_json({"error": message}))
    return status
