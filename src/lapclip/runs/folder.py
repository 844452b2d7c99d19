"""A run is a folder of plain files.

run.toml        the resolved configuration with the reasons for each automatic choice
tokenizer.json  how captions become tokens
events.jsonl    what happened, one JSON line an event
log.txt         the same for people
checkpoints/    the last two, complete; of a finished run the last
model/          the best model so far, ready to load
start/          the model that a run began with, where that was trained before
blended/        the model between start and end that `lapclip eval --before MODEL --blend` wrote
pictures/       small images of what the model answers to a few captions
questions.json  captions and phrases that stand for questions in general
calibration.safetensors  what `lapclip eval` found of its scores, for search
lock            held by the process that works on the run; the system frees it when that process dies
pulse           which process that is, and when it last gave a sign of life
job             which job of torchrun worked on it last, where one did, and the process that starts it again
stop            there while someone asks the run to save and end
request.json    what was asked for, in place of run.toml until the settings are chosen
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock
import tomli_w

from lapclip import paths
from lapclip.config import SECTIONS
from lapclip.errors import RunBusy, RunError, nearest, split_hint
from lapclip.paths import (
    LARGEST_SETTINGS,
    first_link,
    has_second_name,
    hidden_path,
    is_link,
    parse_json,
    partial_path,
    read_bytes,
    read_toml,
    sweep,
    write_atomic,
)
from lapclip.runs.events import read_events
from lapclip.runs.heartbeat import LATE, beat_elsewhere, beat_of, read_beat, write_beat
from lapclip.runs.summary import RunProgress
from lapclip.suggest import command, resume_command, train_command
from lapclip.text import printable

FORMAT = 1  # of run.toml and events.jsonl
RUNS = Path("runs")
GIVEN = RUNS / ".data"
"""Data that Python code had in memory, written down for the runs beside it (`lapclip.data.in_memory`)."""
REQUEST = "request.json"
RUN_FILES = ("run.toml", "events.jsonl", REQUEST)
"""Files of which each run has one at least."""
BELOW = "./"  # start of data paths that are relative to the folder of `runs/`
DATA_PATHS = ("source", "pictures")  # settings of `data` that hold paths


@dataclass(frozen=True)
class TrainRequest:
    """What `train` was asked for."""

    recipe: str
    settings: tuple[str, ...] = ()
    """Changes of the recipe, as `--set` takes them."""
    minutes: float | None = None

    @classmethod
    def read(cls, path: Path) -> TrainRequest:
        """Read a request, or raise a `RunError` if the file is damaged."""
        try:
            saved = parse_json(read_bytes(path, LARGEST_SETTINGS, own=True).decode("utf-8"))
            return cls(str(saved["recipe"]), tuple(map(str, saved["settings"])), saved["minutes"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{path} is not readable: {error}.", hint="lapclip train starts a new run"
            ) from None


class Run:
    """A run's folder."""

    def __init__(self, path: Path, base: Path | None = None) -> None:
        self.path = path
        self.name = path.name
        self.base = base or Path(os.path.abspath(path)).parent.parent
        """The folder of `runs/`, which data paths may be relative to."""
        self.request = path / REQUEST
        self.settings = path / "run.toml"
        self.tokenizer = path / "tokenizer.json"
        self.events = path / "events.jsonl"
        self.log = path / "log.txt"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.start = path / "start"
        """The model it began with, where that was trained before."""
        self.blended = path / "blended"
        """A model between its start and its end."""
        self.images = path / "pictures"
        self.pulse = path / "pulse"
        self.seen = path / "seen.npy"
        """Which images it learns from."""
        self.questions = path / "questions.json"
        """Its caption bank (`lapclip.evaluation.hubness`)."""
        self.calibration = path / "calibration.safetensors"
        """What held-out pairs say of its scores (`lapclip.evaluation.calibration`)."""
        self.job = path / "job"
        """Which job of torchrun worked on it last (`lapclip.machine.torchrun.job`), and the process that starts it."""
        self._stop = path / "stop"
        self._lock = path / "lock"

    def check_links(self) -> None:
        """Refuse a folder with a link in it, as one from elsewhere may have: what is written to the run would be
        written where that leads. The folder itself may be a link."""
        if link := first_link(self.path):
            raise _leads_elsewhere(link)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Work on the run alone. A second process is refused, on another computer that shares the disk as well: locks
        may not reach that far, so its sign of life counts too."""
        self.check_links()
        for path in (
            self._lock,
            self.events,
            self.log,
        ):  # the others are replaced, these are written to
            if has_second_name(path):
                raise _leads_elsewhere(path)
        lock = filelock.FileLock(self._lock)
        try:
            lock.acquire(timeout=0.5)
        except filelock.Timeout:
            raise RunBusy(
                f"Another process is working on {self.path}.", hint=command("stop", self.typed)
            ) from None
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        try:
            if beat := beat_elsewhere(self.pulse):
                stop = command("stop", self.typed)
                raise RunBusy(
                    f"A process on {printable(beat.host)} is working on {self.path}.",
                    hint=f"{stop}; if that computer has crashed, the same command in {LATE:.0f} s",
                )
            yield
        finally:
            lock.release()

    @property
    def state(self) -> str:
        """starting, running, finished, stopped, failed, or died: ended without a word."""
        return self.state_after(self.last_state)

    def state_after(self, last_state: Callable[[], str]) -> str:
        """Return the state, calling `last_state` for that of its events if no process works on it."""
        if self.running:
            return "running" if self.settings.exists() else "starting"
        if self.is_about_to_start:
            return "starting"
        state = last_state()
        return "starting" if state != "finished" and self.is_between_starts else state

    @property
    def is_about_to_start(self) -> bool:
        """Whether a process of this computer has yet to take its lock."""
        beat = read_beat(self.pulse)
        return beat is not None and beat.is_here and beat.alive

    @property
    def never_began(self) -> bool:
        """Whether its start failed or was interrupted before the settings were chosen."""
        is_prepared = self.settings.exists() or not self.request.exists()
        return not is_prepared and not self.running and not self.is_about_to_start

    def last_state(self) -> str:
        """The state of a run that no process works on, by its events."""
        return self.last_ending().get("type", "died")

    def last_ending(self) -> dict[str, Any]:
        """The event that ended the run; empty where there is none, or where it went on since."""
        progress = RunProgress()
        for event in read_events(self.events):
            progress.take(event)
        return progress.ending

    @property
    def running(self) -> bool:
        """Whether a process works on it."""
        beat = read_beat(self.pulse)
        if not self._lock.exists():  # acquiring it would create it, even in a folder that is no run
            return beat is not None and not beat.is_here and beat.alive
        if is_link(self._lock) or has_second_name(self._lock):  # asking might write where it leads
            return beat is not None and beat.alive
        try:
            with filelock.FileLock(self._lock, timeout=0):
                # Locks may not reach another computer, so there the sign of life counts.
                return beat is not None and not beat.is_here and beat.alive
        except filelock.Timeout:
            return True
        except OSError:  # a folder of another computer may not know locks, or may not be written to
            return beat is not None and beat.alive

    @property
    def is_between_starts(self) -> bool:
        """Whether no process works on it, but one of this computer will start it again: torchrun, or a host that other
        computers have joined."""
        beat = read_beat(self.job)
        return beat is not None and beat.is_here and beat.alive and not self.running

    @property
    def typed(self) -> str:
        """What a command here calls it: its name, or its path where it lies elsewhere."""
        return self.name if self.path == RUNS / self.name else str(self.path)

    def train_again(self, *changes: str) -> str:
        """The command for another run with the same data, recipe and settings, but for these (`train.epochs=3`)."""
        return train_command(self.read_settings(), *changes, name=self.next_name())

    def resume_command(self) -> str:
        """The command that goes on with it."""
        try:
            return resume_command(self.typed, self.read_settings())
        except RunError:
            return command("resume", self.typed)

    def next_name(self) -> str:
        """A free name after this one, where the user chose it; empty where the recipe did, which names the next too."""
        base = (
            re.sub(r"[^A-Za-z0-9._-]+", "-", re.sub(r"-\d+$", "", self.name)).lstrip("._-") or "run"
        )
        if base == next(_free_names(self.recipe)):
            return ""
        return next(
            name
            for number in itertools.count(2)
            if not (RUNS / (name := f"{base}-{number}")).exists()
        )

    @property
    def recipe(self) -> str:
        """The recipe the run was started with."""
        return str(self.read_settings()["run"].get("recipe"))

    def data_source(self) -> str | None:
        """What the run learnt from; None where its settings cannot be read."""
        try:
            return str(self.read_settings().get("data", {}).get("source"))
        except RunError:
            return None

    def record(self, section: str, values: dict[str, Any]) -> None:
        """Add a section to run.toml, or replace it."""
        self.write_settings({**self.read_settings(), section: values})

    def write_settings(self, values: dict[str, Any]) -> None:
        """Write run.toml, with paths of data below the folder of `runs/` relative to that folder."""
        try:
            text = tomli_w.dumps(_map_data_paths(values, self._relative))
            write_atomic(self.settings, text)
            self.request.unlink(missing_ok=True)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def read_settings(self) -> dict[str, Any]:
        """Return the contents of run.toml, with absolute paths of data."""
        try:
            values = read_toml(self.settings, own=True)
        except FileNotFoundError:
            raise self._not_prepared() from None
        except (OSError, ValueError) as error:
            raise RunError(
                f"{self.settings} is not readable: {error}.", hint="lapclip train starts a new run"
            ) from None
        for section in ("run", *SECTIONS, "reasons"):
            if not isinstance(values.get(section, {}), dict):
                raise RunError(
                    f"{self.settings} is damaged: {section} is no section.",
                    hint="lapclip train starts a new run",
                )
        found = values.get("run", {}).get("format")
        if found != FORMAT:
            raise RunError(
                f"{self.settings} has format {found!r}; this lapclip reads {FORMAT}.",
                hint="lapclip train starts a new run",
            )
        return _map_data_paths(values, self._absolute)

    def _not_prepared(self) -> RunError:
        """Return the error for a run whose settings are not chosen."""
        if not self.request.exists():
            return RunError(f"{self.path} is not a run: it has no run.toml.", hint="lapclip runs")
        if self.state == "starting":
            return RunError(
                f"{self.path} is still starting; see {self.log}.",
                hint=command("watch", self.typed),
            )
        ending = self.last_ending()
        if ending.get("type") == "failed":
            reason, hint = split_hint(str(ending.get("error")))
            return RunError(f"{self.path} did not start: {reason}", hint=hint)
        return RunError(
            f"{self.path} ended before its first step.", hint=command("resume", self.typed)
        )

    def _relative(self, path: str) -> str:
        """Return a path below the folder of `runs/` as relative to it, any other unchanged."""
        if os.path.isabs(path) and Path(path).is_relative_to(self.base):
            return BELOW + Path(path).relative_to(self.base).as_posix()
        return path

    def _absolute(self, path: str) -> str:
        return str(self.base / path) if path.startswith(BELOW) else path

    def ask_to_stop(self) -> None:
        """Ask the process that works on the run to save and end."""
        if is_link(self._stop):
            raise _leads_elsewhere(self._stop)
        try:
            self._stop.touch()
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def stop_asked(self) -> bool:
        """Whether someone asked the run to end. Polled, because a detached Windows process gets no signals."""
        return self._stop.exists()

    def clear_stop(self) -> None:
        """Forget an earlier request."""
        self._stop.unlink(missing_ok=True)


def _map_data_paths(values: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return settings with their paths of data changed, both the resolved ones and those that were asked for."""
    mapped = dict(values)
    if isinstance(values.get("data"), dict):
        mapped["data"] = dict(values["data"])
        for name in DATA_PATHS:
            if isinstance(mapped["data"].get(name), str):
                mapped["data"][name] = change(mapped["data"][name])
    about = values.get("run")
    if isinstance(about, dict) and isinstance(about.get("asked"), dict):
        mapped["run"] = {**about, "asked": _map_data_paths(about["asked"], change)}
    return mapped


def given_name(source: str) -> str:
    """The name of data that Python code gave to a run, whatever folder its runs lay in; empty for other data. It tells
    the data, because it is made from the content."""
    path = Path(source)
    return path.name if path.parts[-3:-1] == GIVEN.parts else ""


def check_name(name: str | None) -> None:
    """Refuse a name that cannot be a folder or is taken. A run that never began does not hold its name."""
    if name is None:
        return
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise RunError(
            f"{name[:120]!r} cannot name a run: at most 100 letters, digits, dots, dashes and underscores.",
            hint="--name my-run",
        )
    run = Run(RUNS / name)
    if not run.path.exists() or run.never_began:
        return
    over = run.last_state() == "finished"
    hint = f"--name {name}-2" if over else f"{run.resume_command()}, or another --name"
    raise RunError(f"{run.path} exists.", hint=hint)


def _cannot_write(path: Path, error: OSError) -> RunError:
    return RunError(
        f"Cannot write to {path}: {error.strerror or error}.",
        hint="free some disk space, or the right to write there; then the same command",
    )


def _leads_elsewhere(path: Path) -> RunError:
    return RunError(
        f"{path} is a link: what is written to the run would be written elsewhere.",
        hint="a copy in place of the link, if you trust the folder; the whole folder of a run may be a link",
    )


def create_run(name: str | None, recipe: str, request: TrainRequest) -> Run:
    """Make a folder under runs/, named after the recipe if not named.

    From its first moment it holds the request, from which `resume` starts it if this process is killed.
    """
    check_name(name)
    partial = None
    try:
        RUNS.mkdir(exist_ok=True)
        sweep(RUNS)
        partial = partial_path(RUNS / "new")
        partial.mkdir()
        (partial / REQUEST).write_text(json.dumps(asdict(request)), encoding="utf-8")
        write_beat(Run(partial).pulse, beat_of(os.getpid()))
        for path in (RUNS / candidate for candidate in ([name] if name else _free_names(recipe))):
            if Run(path).never_began:
                _free(path)
            if path.exists():
                continue
            try:
                os.rename(partial, path)
                return Run(path)
            except OSError:
                if not path.exists():  # else another process took the name just now
                    raise
        raise FileExistsError(errno.EEXIST, f"{name} was taken just now")
    except OSError as error:
        raise RunError(
            f"Cannot make a run folder in {RUNS.absolute()}: {error.strerror or error}.",
            hint="free some disk space, or lapclip train in a folder that can be written to",
        ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _free(path: Path) -> None:
    """Remove a run that never began. It is asked once more out of sight, where nobody else can change it: another
    process may have freed the name and taken it since. What that one has made is put back, never removed."""
    gone = hidden_path(path)
    try:
        os.rename(path, gone)
    except OSError:  # another process has freed the name, or Windows keeps a folder that is open
        return
    if Run(gone).never_began:
        paths.remove(gone)
        return
    for name in itertools.chain([path.name], _free_names(path.name)):
        with suppress(OSError):  # taken, too
            os.rename(gone, RUNS / name)
            return


def find_run(name: str | None) -> Run:
    """A run by its name or path; without one, the newest."""
    runs = all_runs()
    if name is None:
        if not runs:
            raise RunError(f"There are no runs in {RUNS.absolute()}.", hint="lapclip train")
        return runs[-1]
    for path in (RUNS / name, Path(name)):
        if any((path / file).exists() for file in RUN_FILES):
            return Run(path)
        if path.is_dir():
            raise RunError(f"{path} is not a run: it has no run.toml.", hint="lapclip runs")
    known = [run.name for run in runs]
    detail = nearest(name, known) if known else "There are none there."
    raise RunError(f"No run called {name} in {RUNS.absolute()}. {detail}", hint="lapclip runs")


def find_trained_run() -> Run:
    """Return the newest run that has a model, or the newest of all if none has one yet."""
    trained = [run for run in all_runs() if (run.model / "config.json").exists()]
    return trained[-1] if trained else find_run(None)


def find_active_run(name: str | None) -> Run:
    """Return the named run or, without a name, the newest run that a process works on."""
    if name is not None:
        return find_run(name)
    newest = find_run(None)
    for run in reversed(all_runs()):
        if run.state in ("running", "starting"):
            return run
    raise RunError(
        f"No run is running; the newest, {newest.path}, is {newest.state}.", hint="lapclip runs"
    )


def find_unfinished_run(name: str | None) -> Run:
    """Return the named run or, without a name, the newest run that can be resumed."""
    if name is not None:
        return find_run(name)
    newest = find_run(None)
    for run in reversed(all_runs()):
        state = run.state
        if state in ("stopped", "died") or (state == "failed" and run.settings.exists()):
            return run
    raise RunError(
        f"There is nothing to resume; the newest run, {newest.path}, is {newest.state}.",
        hint="lapclip runs",
    )


def run_of_job(job: str, agent: int | None = None) -> Run | None:
    """Return the newest run in this folder that a job of torchrun has worked on.

    `agent` is the process that started it, for a job without a name.
    """
    for run in reversed(all_runs()):
        beat = read_beat(run.job)
        if beat is None or beat.about != job:
            continue
        if agent is None or (beat.process == agent and beat.is_here and beat.alive):
            return run
    return None


def all_runs() -> list[Run]:
    """The runs in this folder, the newest last."""
    paths = [*RUNS.glob(f"*/{REQUEST}"), *RUNS.glob("*/run.toml")]
    found = {path.parent: path for path in paths}
    times = {}
    for folder, path in found.items():
        with suppress(FileNotFoundError):  # a run that is deleted, or has just started
            times[folder] = path.stat().st_mtime_ns
    folders = sorted(times, key=lambda folder: (times[folder], folder))
    return [Run(folder) for folder in folders if not folder.name.startswith(".")]


def _free_names(recipe: str) -> Iterator[str]:
    """A recipe's name, or the name of its file, and then numbered."""
    base = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(recipe).stem).strip("-") or "run"
    yield base
    for number in range(2, 100_000):
        yield f"{base}-{number}"
