"""What a run does for several ranks outside of its steps: who begins it, and what the others are handed.

One rank writes: it chooses settings and owns the run's folder. It hands its settings, tokenizer and initial weights to
the others before all build the model, and its weights and optimizer before the first step.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lapclip.config import DEFAULT_RECIPE, FSDP, NEVER, Config, Layer, build_config, read_recipe
from lapclip.data.tokenizers import save_tokenizer
from lapclip.embedder import Embedder
from lapclip.errors import ConfigError, LostRank, TrainingError
from lapclip.join.agreement import Agreement, invited_machines, name_here
from lapclip.machine.torchrun import job, job_agent, under_torchrun
from lapclip.model.shapes import SHAPES
from lapclip.paths import cache_folder, temporary_folder, write_atomic
from lapclip.runs import events
from lapclip.runs.events import EventLog, read_events
from lapclip.runs.folder import Run, run_of_job
from lapclip.runs.heartbeat import beat_of, read_beat, write_beat
from lapclip.text import one_line
from lapclip.training.checkpoint import Progress, optimizer_tensors, restore_optimizer, save_model
from lapclip.training.distributed import (
    Ranks,
    advise_rows,
    joined_ranks,
    lost_rank,
    reason_of_last_stop,
)
from lapclip.training.recovery import MEMORY, changes_so_far, is_out_of_memory
from lapclip.training.teacher import teacher_paths

if TYPE_CHECKING:
    from lapclip.training.outcome import TrainOutcome
    from lapclip.training.run_parts import RunInputs
    from lapclip.training.trainer import Trainer

REPORT_STEPS = 10  # between events about ranks
TRAIN, OVER = "train", "over"  # what the writer has the others do
RUN, CACHE = "run", "cache"  # folders of files that ranks send
CACHED_FILES = "features-*.npy"
CHUNK_BYTES = 1 << 24
POLITE = "--polite pauses one computer while the others wait, so it is for a run on one alone."


def take_part(
    begin: Callable[[Ranks], TrainOutcome],
    resume: Callable[[Run, Ranks, bool], TrainOutcome],
) -> TrainOutcome | None:
    """Train on one of the ranks that torchrun started: begin or resume on the writer, follow it on the others.

    A job that torchrun starts again resumes the run that it began. Returns None on ranks that follow, and for a run that
    is finished.
    """
    run = run_of_job(job(), job_agent())
    with joined_ranks(holds_run=run is not None) as ranks:
        check_place(ranks)
        ranks.last_stop = reason_of_last_stop(ranks)
        if not ranks.writes:
            follow(ranks)
            return None
        if run is None:
            return begin(ranks)
        if run.last_state() == "finished":
            print(f"{run.path} is finished; this job has nothing left to do.", file=sys.stderr)
            ranks.broadcast_json({"task": OVER})
            return None
        halve_after_memory(run, ranks)
        beat = read_beat(run.job)
        # What the same agent starts again was asked to stop if someone asked for it meanwhile.
        is_detached = beat is not None and beat.process == os.getppid() and beat.alive
        return resume(run, ranks, is_detached)


def halve_after_memory(run: Run, ranks: Ranks) -> None:
    """Halve the micro-batch of a run whose ranks were started again because memory ran out on one of them."""
    reason = ranks.last_stop or ""
    if not is_out_of_memory(reason) or not run.settings.exists():
        return
    recorded = read_events(run.events)
    saved = Layer(str(run.settings), {"train": run.read_settings()["train"]})
    changes = Layer(str(run.events), {"train": changes_so_far(recorded)})
    train = build_config([read_recipe(DEFAULT_RECIPE), saved, changes], SHAPES).train
    rows = max(ranks.divide_rows(train.batch_size, train.rows))
    half = min(train.micro_batch or rows, rows) // 2
    if not half:
        return
    steps = [event["step"] for event in recorded if event["type"] == "step"]
    event = events.FellBack(
        step=max(steps, default=0),
        cause=MEMORY,
        change={"micro_batch": half},
        devices={},
        text=f"{reason}; micro_batch becomes {half:,} on all ranks, the result stays the same",
    )
    with closing(EventLog(run.events)) as log:
        log.append(event)


def check_place(ranks: Ranks) -> None:
    """Refuse a guest that would write and a host that would follow: it would open what others name."""
    is_guest = Agreement.of_this_process() is not None
    if invited_machines() and ranks.writes == is_guest:
        raise LostRank(
            "The computers have met without their host, or in another order.",
            hint="lapclip join again",
        )


def follow(ranks: Ranks) -> None:
    """Train on a rank that does not write, to the end of the run."""
    from lapclip.training.preparation import prepare_again
    from lapclip.training.request import Callbacks
    from lapclip.training.run_process import recording, stop_signals
    from lapclip.training.trainer import Trainer

    message = ranks.broadcast_json()
    if message["task"] == OVER:
        return
    with temporary_folder("rank") as folder:
        run = Run(folder / "run")
        run.path.mkdir()
        run.write_settings(message["settings"])
        receive_files(ranks, {RUN: run.path, CACHE: cache_folder()})
        saved = run.read_settings()
        saved["work"]["track"] = "none"  # only the writer has a run to show
        parts = prepare_again(run, saved, None, ranks)
        with stop_signals() as signals, recording(run, Callbacks(), parts.config) as log:
            trainer = Trainer.of_parts(run, parts, ranks=ranks)
            del parts
            trainer.log = log
            share_start(trainer)
            trainer.stop_reason = signals.reason
            trainer.run_to_end()


def share_inputs(
    inputs: RunInputs, settings: dict[str, Any], embedder: Embedder, ranks: Ranks
) -> None:
    """On the writer, hand the others what they build the model from."""
    if not ranks.is_distributed or not ranks.writes:
        return
    ranks.broadcast_json({"task": TRAIN, "settings": settings})
    with temporary_folder("rank") as folder:
        copy = Run(folder)
        save_tokenizer(inputs.tokenizer, copy.tokenizer)
        if inputs.initial_weights:
            save_model(embedder, copy.start)
        files = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                files[f"{RUN}/{path.relative_to(folder).as_posix()}"] = path
        if inputs.teacher:
            for path in teacher_paths(inputs.teacher.digest, inputs.config, inputs.data):
                files[f"{CACHE}/{path.name}"] = path
        send_files(ranks, files)


def send_files(ranks: Ranks, files: Mapping[str, Path]) -> None:
    """Send files of the writer to the other ranks, under names FOLDER/PATH."""
    ranks.broadcast_json({name: path.stat().st_size for name, path in files.items()})
    for path in files.values():
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                ranks.broadcast_array(np.frombuffer(chunk, np.uint8))


def receive_files(ranks: Ranks, folders: Mapping[str, Path]) -> None:
    """Write the files that the writer sends into these folders, and nowhere else."""
    for name, size in ranks.broadcast_json().items():
        path = place_of_file(name, folders)

        def write(partial: Path, size: int = size) -> None:
            with partial.open("wb") as file:
                for _ in range(-(-size // CHUNK_BYTES)):
                    file.write(ranks.broadcast_array(None).tobytes())

        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, write)


def place_of_file(name: str, folders: Mapping[str, Path]) -> Path:
    """Return where a file of the writer is kept here.

    Raises TrainingError for a name that leads out of its folder on any system.
    """
    kind, _, relative = name.partition("/")
    is_plain = relative.isprintable() and not any(mark in relative for mark in "\\:")
    if kind == CACHE:
        is_plain = is_plain and "/" not in relative and fnmatchcase(relative, CACHED_FILES)
    if kind in folders and is_plain:
        folder = folders[kind].resolve()
        path = (folder / relative).resolve()
        if path != folder and path.is_relative_to(folder):
            return path.with_name(name_here(path.name)) if kind == CACHE else path
    raise TrainingError(f"The writer sent a file for another folder: {one_line(name)}.")


def share_start(trainer: Trainer) -> None:
    """Hand over settings that were chosen since, the progress, the weights and the optimizer's state."""
    ranks = trainer.ranks
    if not ranks.is_distributed:
        return
    message = None
    if ranks.writes:
        if invited_machines():  # so that `resume` is suggested with as many
            trainer.run.record("join", {"machines": invited_machines()})
        train = asdict(trainer.config.train)
        if trainer.features is None or trainer.features.is_empty:
            train["features"] = NEVER
        elif train["parallel"] == FSDP:
            raise ConfigError(
                "FSDP cannot train from cached features.", hint="--set train.features=never"
            )
        state = optimizer_tensors(trainer.step.model, trainer.step.optimizer)
        message = {
            "train": train,
            "progress": asdict(trainer.progress),
            "state": {name: list(value.shape) for name, value in state.items()},
            "checkpoints": str(trainer.run.checkpoints.absolute()),
        }
    message = ranks.broadcast_json(message)
    trainer.progress = Progress(**message["progress"])
    changes = {}
    if not ranks.writes:
        changes = _differences(asdict(trainer.config.train), message["train"])
    ranks.start_steps(trainer.device, message["train"]["timeout_seconds"])
    if message["train"]["parallel"] == FSDP:
        _start_sharded(trainer, changes, Path(message["checkpoints"]))
    else:
        _start_whole(trainer, changes, message["state"])
    trainer.step.ranks = ranks
    trainer.plan = trainer.plan.for_rank(rows_of_ranks(trainer), ranks.rank)
    _check_same_batches(trainer)


def _differences(own: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    return {name: theirs[name] for name in own if own[name] != theirs[name]}


def _start_whole(
    trainer: Trainer, changes: dict[str, Any], state_shapes: dict[str, list[int]]
) -> None:
    """Take over the settings of the writer, its weights and the state of its optimizer."""
    if changes:
        trainer.rebuild(changes)
    ranks, model, optimizer = trainer.ranks, trainer.step.model, trainer.step.optimizer
    if not ranks.writes:
        state = {name: torch.zeros(shape) for name, shape in state_shapes.items()}
        restore_optimizer(model, optimizer, state)
    state = optimizer_tensors(model, optimizer)
    ranks.broadcast(model.parameters())
    ranks.broadcast(state[name] for name in sorted(state))
    ranks.broadcast(trainer.step.others.values())


def _start_sharded(trainer: Trainer, changes: dict[str, Any], checkpoints: Path) -> None:
    """Build the model again with a part of each weight on every rank, and load the newest checkpoint into it."""
    trainer.run.checkpoints = checkpoints
    trainer.drop_model()
    trainer.rebuild(changes)
    refuse_few_rows(rows_of_ranks(trainer), trainer.config.train.micro_batch)
    # All ranks drew or read the same weights. A shared disk has those that were trained.
    trainer.load_newest()
    agree_on_progress(trainer)  # only the writer knows the best model


def refuse_few_rows(rows: list[int], micro_batch: int) -> None:
    """Refuse FSDP if a rank has fewer rows than others have micro-batches: all make equally many."""
    if micro_batch and -(-max(rows) // micro_batch) > min(rows):
        raise ConfigError(
            f"With FSDP, {min(rows)} rows of a rank are too few for micro-batches of {micro_batch:,}.",
            hint="a larger train.micro_batch, or train.rows that differ less",
        )


def rows_of_ranks(trainer: Trainer) -> list[int]:
    """Return how many rows of a batch each rank takes."""
    train = trainer.config.train
    return trainer.ranks.divide_rows(train.batch_size, train.rows)


def _check_same_batches(trainer: Trainer) -> None:
    """Refuse ranks whose batches differ: they would train another model without anyone noticing."""
    batch = trainer.plan.batch(min(trainer.progress.step + 1, trainer.steps))
    digest = hashlib.sha256(batch.tokens_BL.tobytes() + batch.sided_B.tobytes())
    digests = trainer.ranks.gather_json(digest.hexdigest())
    for rank, other in enumerate(digests):
        if other != digests[trainer.ranks.writer]:
            host = trainer.ranks.hosts[rank]
            raise TrainingError(
                f"Rank {rank} on {host} has other batches than the rank that writes.",
                hint="the same data, and the same releases of lapclip, on all computers",
            )


def check_stop(trainer: Trainer) -> None:
    """Raise if another rank was told to end by its system: torchrun starts again those that are left."""
    reason, ranks = trainer.stopped_by, trainer.ranks
    is_own = ranks.count == 1 or f"rank {ranks.rank} " in reason
    if reason.startswith("SIGTERM (rank") and not is_own:
        raise LostRank(
            f"{reason}: it was told to end, so all ranks have saved and ended.",
            hint="lapclip resume goes on",
        )


def save_after_loss(trainer: Trainer, error: Exception) -> str:
    """Save the state of the last step if other ranks are gone, and return why the run ended."""
    failure = lost_rank(error)
    if failure is None:
        return str(error) or type(error).__name__
    # Gradients are summed before the optimizer begins, so that the weights are those of the last step.
    if not trainer.step.touched and trainer.config.train.parallel != FSDP:
        with suppress(Exception):
            trainer.save()
    return failure.message


def agree_on_progress(trainer: Trainer) -> None:
    """Take over the progress of the writer: it knows the scores, and they decide when a run ends."""
    if trainer.ranks.is_distributed:
        progress = trainer.ranks.broadcast_json(asdict(trainer.progress))
        trainer.progress = Progress(**progress)


@contextmanager
def encoding_together(embedder: Embedder, ranks: Ranks) -> Iterator[None]:
    """Have ranks share the batches that an embedder computes."""
    before = embedder.map_batches
    if ranks.is_distributed:
        embedder.map_batches = ranks.compute_in_shares
    try:
        yield
    finally:
        embedder.map_batches = before


class RankReports:
    """Writes down now and then how fast each host is, and which division of rows would be faster."""

    def __init__(self) -> None:
        self._seconds = self._waiting = 0.0
        self._steps = 0

    def record(
        self, trainer: Trainer, number: int, step_seconds: float, waiting_seconds: float
    ) -> None:
        """Count a step and its waiting for other ranks, and write an event if one is due."""
        ranks = trainer.ranks
        if not ranks.is_distributed:
            return
        self._seconds += step_seconds
        self._waiting += waiting_seconds
        self._steps += 1
        if number % REPORT_STEPS and number < trainer.steps:
            return
        own = [self._seconds / self._steps, self._waiting / self._steps]
        every = [[_seconds_of(value) for value in times] for times in ranks.gather_json(own)]
        rows = rows_of_ranks(trainer)
        trainer.log.append(
            events.Ranks(
                step=number,
                hosts=list(ranks.hosts),
                rows=rows,
                waited=[min(1.0, waited / max(total, 1e-9)) for total, waited in every],
                writer=ranks.writer,
                advice=self._advice(ranks, rows, every),
            )
        )
        self._seconds, self._steps, self._waiting = 0.0, 0, 0.0

    def _advice(self, ranks: Ranks, rows: list[int], every: list[list[float]]) -> str:
        """Return which division of rows among hosts would be faster. Empty for one host."""
        rows_of, seconds_of, names = {}, {}, {}
        for rank, node in enumerate(ranks.node_numbers):
            total, waited = every[rank]
            rows_of[node] = rows_of.get(node, 0) + rows[rank]
            seconds_of[node] = max(seconds_of.get(node, 0.0), total - waited)
            names[node] = ranks.hosts[rank]
        if len(rows_of) == 1:
            return ""
        exchange_seconds = min(waited for _, waited in every)
        advice = advise_rows(
            list(names.values()), list(rows_of.values()), list(seconds_of.values())
        )
        return advice.text(exchange_seconds)


def _seconds_of(value: Any) -> float:
    """Return a time that a rank has sent, or 0 for what is none."""
    is_time = isinstance(value, float | int) and 0 <= value < math.inf
    return float(value) if is_time else 0.0


def note_job(run: Run) -> None:
    """Note which job of torchrun works on a run, and which process starts it again."""
    if under_torchrun():
        write_beat(run.job, beat_of(os.getppid(), job()))


def refuse_settings(config: Config, ranks: Ranks) -> None:
    """Refuse settings that several ranks cannot have."""
    if config.work.polite and ranks.count > 1:
        raise ConfigError(POLITE)


def refuse_rows(config: Config, ranks: Ranks) -> None:
    """Refuse weights of another number of hosts than a new run begins with."""
    weights = config.train.rows
    if weights and ranks.is_distributed and not ranks.are_weighed_by(weights):
        raise ConfigError(
            f"train.rows {weights} is for another number of hosts than the "
            f"{len(set(ranks.node_numbers))} that train.",
            hint="--set train.rows=3,1 for a host that takes three times as many rows as the second",
        )


def company(run: Run, ranks: Ranks, weights: str) -> list[str]:
    """Return which computers have left or joined since the run was last trained.

    Says it if `weights` of rows are for another number of them.
    """
    if not ranks.is_distributed:
        return []
    now, before = Counter(ranks.hosts), Counter(ranks.hosts)
    for event in read_events(run.events):
        if event["type"] == "ranks":
            before = Counter(map(str, event.get("hosts") or []))
    gone, come = sorted((before - now).elements()), sorted((now - before).elements())
    notes = [ranks.last_stop] if ranks.last_stop else []
    if gone:
        notes.append(f"continues without {' and '.join(gone)}")
    if come:
        notes.append(f"{' and '.join(come)} joined")
    if ranks.count > 1 and not notes:
        notes.append(f"trained by {' and '.join(ranks.hosts)}")
    if weights and ranks.count > 1 and not ranks.are_weighed_by(weights):
        notes.append(f"train.rows {weights} is for other hosts: ranks take equally many rows")
    return notes
