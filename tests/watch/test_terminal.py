"""`lapclip watch` as a person meets it: in a terminal, in a pipe, in a script."""

from __future__ import annotations

import codecs
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import psutil
import pytest

from lapclip.watch.terminal import (
    DOWN,
    NEXT,
    PREVIOUS,
    QUIT,
    SHARE,
    SLOWEST,
    TICK,
    UP,
    Pace,
    curve_height,
    meanings,
)

from ..conftest import SMALL, command, lapclip, set_flags
from .recorded import append, evaluation, finished, step, trained, write

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="a pseudo-terminal is needed")


class Screen:
    """A process on a pseudo-terminal, and what its screen shows."""

    def __init__(self, width: int, height: int, *arguments: str) -> None:
        import pty
        import termios

        self._ours, self._its = pty.openpty()
        self.resize(width, height)
        self.settings = termios.tcgetattr(self._its)
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        its = self._its
        # In a group of its own, as a shell would start it: else the system may not let it be suspended.
        self.process = subprocess.Popen(
            command("watch", *arguments),
            stdin=its,
            stdout=its,
            stderr=its,
            env=environment,
            process_group=0,
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.raw = ""
        self.rows: dict[int, str] = {}

    def resize(self, width: int, height: int) -> None:
        import fcntl
        import struct
        import termios

        fcntl.ioctl(self._its, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def wait_for(self, words: str) -> str:
        """Read until the screen shows these words."""
        self._read_until(lambda: words in self.text)
        assert words in self.text, self.text + self.raw[-500:]
        return self.text

    def end(self) -> int:
        """Wait for the process, reading what it still says."""
        self._read_until(lambda: self.process.poll() is not None)
        return self.process.wait(timeout=30)

    @property
    def text(self) -> str:
        return "\n".join(self.rows[row] for row in sorted(self.rows))

    @property
    def restored(self) -> bool:
        """Whether the terminal is as it was: its settings, its first screen, its cursor, its wrapping."""
        import termios

        last = {
            mode: self.raw.rfind(f"\x1b[?{mode}h") > self.raw.rfind(f"\x1b[?{mode}l")
            for mode in (7, 25, 1049)
        }
        return termios.tcgetattr(self._its) == self.settings and last == {
            7: True,
            25: True,
            1049: False,
        }

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._its)

    def _read_until(self, done) -> None:
        import select

        end = time.monotonic() + 60
        while not done() and time.monotonic() < end:
            if select.select([self._ours], [], [], 0.1)[0]:
                self._take(self._decoder.decode(os.read(self._ours, 65536)))
        while select.select([self._ours], [], [], 0.1)[0]:
            self._take(self._decoder.decode(os.read(self._ours, 65536)))

    def _take(self, text: str) -> None:
        self.raw += text
        self.rows = {}
        shown = self.raw[self.raw.rfind("\x1b[?1049h") :]
        for row, rest in re.findall(r"\x1b\[(\d+);1H([^\r\n]*?)(?=\x1b\[\d+;1H|\x1b\[\?|$)", shown):
            if rest.startswith("\x1b[J"):
                self.rows = {at: line for at, line in self.rows.items() if at < int(row)}
            else:
                self.rows[int(row)] = re.sub(r"\x1b\[[\d;]*[mK]", "", rest)


@contextmanager
def on_screen(width: int, height: int, *arguments: str) -> Iterator[Screen]:
    screen = Screen(width, height, *arguments)
    try:
        yield screen
    finally:
        screen.close()


@POSIX
def test_q_quits_and_the_terminal_is_as_before(here: Path) -> None:
    import termios

    write(here, "mine", trained(170))
    with on_screen(80, 24, "mine") as screen:
        text = screen.wait_for("q quit")
        assert "lapclip resume mine" in text
        assert termios.tcgetattr(screen._its) != screen.settings
        assert len(screen.rows) <= 24
        assert all(len(row) <= 80 for row in screen.rows.values())
        screen.press(b"q")
        assert screen.end() == 0
        assert screen.restored


@POSIX
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_signals_leave_the_terminal_as_it_was(
    here: Path, number: signal.Signals, status: int
) -> None:
    write(here, "mine", trained(170))
    with on_screen(80, 24) as screen:
        screen.wait_for("q quit")
        screen.process.send_signal(number)
        assert screen.end() == status
        assert screen.restored
        assert "Traceback" not in screen.raw
        assert "Interrupted" not in screen.raw


@POSIX
def test_a_suspended_watch_gives_the_terminal_back_and_takes_it_again(here: Path) -> None:
    write(here, "mine", trained(170))
    with on_screen(80, 24) as screen:
        screen.wait_for("q quit")
        screen.process.send_signal(signal.SIGTSTP)
        screen._read_until(lambda: screen.raw.endswith("\x1b[?1049l"))
        while psutil.Process(screen.process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.05)
        assert screen.restored
        screen.process.send_signal(signal.SIGCONT)
        screen._read_until(lambda: screen.raw.count("q quit") == 2)
        assert not screen.restored
        screen.press(b"q")
        assert screen.end() == 0
        assert screen.restored


@POSIX
def test_keys_change_the_run_in_focus_and_a_narrow_window_scrolls(here: Path) -> None:
    write(here, "first", trained(170))
    write(here, "second", finished())
    with on_screen(80, 40, "first", "second") as screen:
        assert "lapclip resume first" in screen.wait_for("j/k other run")
        screen.press(b"j")
        assert "lapclip resume first" not in screen.wait_for("lapclip eval second")
        screen.press(b"\x1b[A")
        screen.wait_for("lapclip resume first")
        screen.press(b"\t")
        screen.wait_for("lapclip eval second")
        screen.resize(40, 12)
        screen.wait_for("space/b scroll")
        assert "heat " not in screen.text
        assert all(len(row) <= 40 for row in screen.rows.values())
        assert len(screen.rows) == 12, screen.text
        for _ in range(5):
            screen.press(b" ")
        screen.wait_for("heat ")
        screen.press(b"q")
        assert screen.end() == 0


@POSIX
def test_the_screen_follows_the_events(here: Path) -> None:
    events = trained(170)
    run = write(here, "mine", events[:200])
    with on_screen(80, 30, "mine") as screen:
        screen.wait_for("q quit")
        append(run, events[200:])
        screen.wait_for("170 of 200")
        (run / "events.jsonl").unlink()
        (run / "run.toml").unlink()
        for path in run.iterdir():
            path.unlink()
        run.rmdir()
        screen.wait_for("Its folder was deleted.")
        screen.press(b"q")
        assert screen.end() == 0


def test_help_has_examples_and_a_word_on_each_argument() -> None:
    text = lapclip("watch", "--help").stdout
    for words in (
        "lapclip watch --web",
        "lapclip watch first-run --once",
        "--port",
        "--host",
        "--json",
        "8765",
        "127.0.0.1",
    ):
        assert words in text


def test_keys_mean_the_same_in_every_terminal() -> None:
    assert list(meanings(b"j\x1b[B\x1bOB\t\x1b[C")) == [NEXT] * 5
    assert list(meanings(b"k\x1b[A\x1bOA\x1b[Z\x1b[D")) == [PREVIOUS] * 5
    assert list(meanings(b" \x1b[6~b\x1b[5~")) == [DOWN, DOWN, UP, UP]
    assert list(meanings(b"x\x1b[1;5H\xc3\xa4\x1bq")) == [QUIT]  # what is not known is passed over


def test_images_are_drawn_as_often_as_a_small_share_of_the_machine_allows() -> None:
    assert Pace(cores=2).rest(0.02) == pytest.approx(0.02 / (2 * SHARE))
    assert Pace(cores=64).rest(0.02) == TICK
    assert Pace(cores=1).rest(9.0) == SLOWEST
    assert [curve_height(height) for height in (10, 24, 40, 200)] == [2, 2, 6, 6]


def test_a_pipe_gets_a_snapshot_once(here: Path) -> None:
    write(here, "mine", finished())
    done = lapclip("watch")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "Finished in 1 min 40 s" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert lapclip("watch", "--once").stdout == done.stdout


def test_json_is_one_object_with_everything(here: Path) -> None:
    write(here, "mine", trained(170))
    write(here, "other", finished())
    done = lapclip("watch", "mine", "other", "--json")
    assert done.returncode == 0, done.stderr
    mine, other = json.loads(done.stdout)["runs"]
    assert (mine["name"], mine["state"], mine["step"], mine["steps"], mine["epoch"]) == (
        "mine",
        "died",
        170,
        200,
        9,
    )
    assert mine["best"] == pytest.approx(0.6)
    assert mine["time_left"] is None
    assert mine["memory"] == {
        "process_bytes": 7e8,
        "peak_bytes": 9e8,
        "machine_bytes": 16_000_000_000,
    }
    assert mine["sensors"]["joules"] == pytest.approx(1440)
    assert mine["sensors"]["watts"] == pytest.approx(18, rel=0.1)
    assert [row["best"] for row in mine["evaluations"]] == [True, True, True, False]
    assert len(mine["curves"]["loss"]["step"]) == len(mine["curves"]["loss"]["value"]) <= 200
    assert mine["next"][0].endswith("resume mine")
    assert other["evaluation"]["split"] == "test"
    assert other["state"] == "finished"


def with_value(values: Any, value: float) -> Any:
    """The same events with this value in place of each measured number."""
    if isinstance(values, dict):
        return {
            name: part if name == "time" else with_value(part, value)
            for name, part in values.items()
        }
    if isinstance(values, list):
        return [with_value(part, value) for part in values]
    return value if isinstance(values, float) else values


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("arguments", [["watch", "--once"], ["runs"]])
def test_json_of_a_run_that_broke_down_has_no_nan_and_no_infinity(
    here: Path, arguments: list[str], value: float
) -> None:
    write(here, "mine", [*trained(100), *with_value(trained(170)[100:], value)])
    done = lapclip(*arguments, "--json")
    assert done.returncode == 0, done.stderr

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(done.stdout, parse_constant=refuse)


@pytest.mark.parametrize(
    "arguments", [["watch"], ["watch", "nothing", "--once"], ["watch", "nothing", "--json"]]
)
def test_what_is_not_there_is_an_error_of_two_lines(here: Path, arguments: list[str]) -> None:
    refused = lapclip(*arguments, *(["--once"] if arguments == ["watch"] else []))
    assert refused.returncode == 2
    assert "Try: lapclip" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 2
    assert not (here / "runs").exists()


@pytest.mark.parametrize("arguments", [["watch", "--once"], ["watch", "--json"]])
def test_watching_loads_neither_torch_nor_numpy(here: Path, arguments: list[str]) -> None:
    write(here, "mine", trained(170))
    program = (
        "import sys\nfrom lapclip.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert not {'torch', 'numpy', 'starlette', 'plotly'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_goes_away_ends_the_watch_quietly(here: Path) -> None:
    run = write(here, "mine", trained(20))
    with filelock.FileLock(run / "lock"):
        process = subprocess.Popen(
            command("watch"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stderr is not None
        assert "mine" in process.stdout.readline()
        process.stdout.close()
        append(run, [step(21, 1e9), evaluation(21, 1e9, 0.5), step(22, 1e9)])
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == ""


def test_a_real_training_is_followed_from_its_start_to_its_end(here: Path) -> None:
    """In a pipe: the watch tells of each evaluation, and ends with the run."""
    settings = set_flags(*SMALL, "train.steps=40")
    done = lapclip("train", "--background", "--name", "mine", *settings)
    assert done.returncode == 0, done.stderr
    watch = subprocess.Popen(
        command("watch", "mine"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert watch.stdout is not None
        assert "mine  starting" in watch.stdout.readline()
        rest, _ = watch.communicate(timeout=120)
    finally:
        watch.kill()
        watch.wait()
    assert watch.returncode == 0, rest
    evaluations = [
        line for line in rest.splitlines() if "text to image R@1" in line and "epoch" in line
    ]
    recorded = [
        line
        for line in (here / "runs/mine/events.jsonl").read_text().splitlines()
        if '"evaluation","time' in line
    ]
    assert len(recorded) > 3
    assert (
        len(recorded) - 1 <= len(evaluations) <= len(recorded)
    )  # the first drawing may show one already
    assert "mine: step 40" in rest
    assert "mine: finished  Next:" in rest
    assert "finished" in lapclip("watch", "--once").stdout
