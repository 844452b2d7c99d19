"""Several processes that train one model: all that a run does for them outside of its step.

One rank writes: it chooses the settings and owns the run's folder. The others follow it, from a copy
of what it wrote. Every function here does nothing, or the usual, for a process that trains alone.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lapclip.config import AUTO, NEVER, Config, Layer, build_config, replace_in
from lapclip.data.batches import Batch
from lapclip.data.dataset import DataSet
from lapclip.data.loading import checked_indexes, split_rule
from lapclip.data.pixels import View
from lapclip.data.sources import find_source
from lapclip.data.tokenizers import save_tokenizer
from lapclip.embedder import Embedder
from lapclip.errors import ConfigError, LostRank, RankFailed, RunError, TrainingError
from lapclip.machine.device import Device
from lapclip.machine.ranks import ALONE, Ranks, job, job_agent, join, under_torchrun
from lapclip.model.shapes import SHAPES
from lapclip.paths import cache_folder, temporary_folder
from lapclip.runs import events
from lapclip.runs.events import mapping, read_events
from lapclip.runs.folder import Run, run_of_job
from lapclip.runs.heartbeat import beat_of, read_beat, write_beat
from lapclip.text import counted
from lapclip.together import Agreement, invited_at, machines_wanted, name_here
from lapclip.together.bundle import load_again
from lapclip.training.checkpoint import Progress, list_checkpoints, save_model
from lapclip.training.cuda_graph import GraphedStep
from lapclip.training.frozen_features import towers_to_cache
from lapclip.training.recovery import Change, decide
from lapclip.training.request import Callbacks, RunRequest
from lapclip.training.shards import UNDER_TORCHRUN, own_batches, own_shards
from lapclip.training.step import TrainStep
from lapclip.training.teacher import teacher_paths
from lapclip.training.worth import measure_together
from lapclip.weights import CONFIG, WEIGHTS

if TYPE_CHECKING:
    from lapclip.training.run_parts import RunInputs
    from lapclip.training.trainer import Trainer, TrainOutcome

T = TypeVar("T")

# What the rank that writes has the others do with what it sends them.
FEATURES_TOGETHER, TRAIN_TOGETHER, COMPARE_TOGETHER, NOTHING_LEFT = (
    "features",
    "train",
    "compare",
    "nothing",
)
CACHED_FOR_OTHERS = "features-*.npy", "packed-*/index.jsonl"  # files of this computer's cache
RANKS_EVENT_SECONDS = 5.0
SLOW_STEPS = 2  # at the beginning


# --- settings -------------------------------------------------------------------------------------


def fit_ranks(request: RunRequest, count: int, *, together: bool) -> RunRequest:
    """Settings that follow from how many processes share the work; one alone may be the rest of several."""
    train, notes = request.config.train, []
    if together and not request.is_set("train", "shards"):
        train = replace(train, shards=max(UNDER_TORCHRUN, count))
    if 0 < train.shards < count:
        raise ConfigError(
            f"train.shards {train.shards} gives {counted(count - train.shards, 'rank')} of {count} nothing to compute.",
            hint=f"--set train.shards={max(UNDER_TORCHRUN, count)}, or fewer ranks",
        )
    if count > 1 and train.compile not in ("none", "compiled"):
        # What ranks exchange in the middle of a step is no part of a recording.
        rest = "compiled" if "compiled" in train.compile else "none"
        if train.compile != AUTO:
            notes = [f"train.compile {train.compile} is not used by several ranks"]
        train = replace(train, compile=rest)
    return replace(
        request, config=replace(request.config, train=train), notes=[*request.notes, *notes]
    )


def fit_threads(request: RunRequest, ranks: Ranks) -> RunRequest:
    """As many threads on every rank as the smallest computer has for one: results depend on the number."""
    if not ranks.many or request.config.train.threads != AUTO:
        return request
    config = replace_in(request.config, "train", threads=ranks.fewest_threads)
    reasons = {"train.threads": "what the rank with the fewest cores has"}
    return replace(request, config=config, reasons=request.reasons | reasons)


def fit_to_ranks(request: RunRequest, ranks: Ranks) -> RunRequest:
    """Settings that follow from the ranks, before the data is loaded."""
    return fit_threads(fit_ranks(request, ranks.count, together=under_torchrun()), ranks)


def choose_shards(
    config: Config, device: Device, ranks: Ranks, *, is_set: bool
) -> tuple[Config, str | None]:
    """How many shards ranks share, now that their device is known. On a GPU, which promises no bits, eight small passes
    take several times as long as one, so there each rank has one part of the batch, and a single rank all of it."""
    if is_set:
        return config, "asked for"
    if config.train.shards == 1:
        return config, None
    if device.is_cpu:
        return config, "several ranks on CPUs: the result does not depend on how many"
    why = f"one part for each rank: on {device.kind} small passes take longer, and bits are not promised"
    return replace_in(config, "train", shards=0 if ranks.many else 1), why


def share_again(config: Config, ranks: Ranks, device: Device) -> Config:
    """The settings of a run that ranks go on with, whoever began it."""
    if ranks is ALONE:
        return config
    train = config.train  # one may be what is left of several
    shards = (UNDER_TORCHRUN if device.is_cpu else 0) if train.shards == 1 else train.shards
    plain = "compiled" if "compiled" in train.compile else "none"
    return replace_in(
        config, "train", shards=shards, compile=plain if ranks.many else train.compile
    )


def check_teacher_was_sent(config: Config, data: DataSet, teacher_digest: str) -> None:
    """Refuse to open a teacher for a host: a guest has what the host's teacher makes of the pairs."""
    if not config.train.teacher or Agreement.of_this_process() is None:
        return
    if not all(path.exists() for path in teacher_paths(teacher_digest, config, data)):
        raise RunError(
            "The host did not send what its teacher makes of the pairs; a guest opens no teacher."
        )


# --- set-up ---------------------------------------------------------------------------------------


def shared_by(step: TrainStep, ranks: Ranks) -> None:
    """From here on a step is shared by these ranks: not before, while the one that writes tries settings alone."""
    if not isinstance(step, GraphedStep):  # a recorded one is never shared
        step.ranks = ranks


def share_set_up(
    inputs: RunInputs,
    settings: dict[str, Any],
    step: TrainStep,
    embedder: Embedder,
    ranks: Ranks,
) -> None:
    """Have the other ranks build the same, to compute the features of what is frozen with this one."""
    config = inputs.config
    if not ranks.many or not ranks.writes:
        return
    if not towers_to_cache(step.model, step.boundaries, config)[0]:
        return
    with temporary_folder("rank") as folder:
        run = Run(folder)
        run.write_settings(settings)
        save_tokenizer(inputs.tokenizer, run.tokenizer)
        if inputs.initial_weights:
            save_model(embedder, run.start)
        ranks.connect(step.device.collectives)
        task = {"task": FEATURES_TOGETHER, "run": "features", "base": str(run.base)}
        ranks.from_writer(task, "set-up")
        files = [path for path in sorted(run.path.rglob("*")) if path.is_file()]
        digest = inputs.teacher.digest if inputs.teacher else ""
        share_run_files(run, files, ranks, cached_for_others(digest, config, inputs.data))


def share_run_files(
    run: Run, files: Sequence[Path], ranks: Ranks, cached: Sequence[Path] = ()
) -> None:
    """Give the others files of a run, and some of this computer's cache."""
    ranks.share_files(run.path, files)
    there = [path for path in cached if path.exists()]
    ranks.share_files(cache_folder(), there, CACHED_FOR_OTHERS, named=name_here)


def cached_for_others(teacher_digest: str, config: Config, data: DataSet) -> list[Path]:
    """What other ranks are given of this computer's cache: what a teacher makes of the pairs, because it may be here
    alone, and which images can be used, because to decode all of them takes long. Guests see for themselves."""
    indexes = [] if machines_wanted() else checked_indexes(config.data, View.of(config.model))
    return [*teacher_paths(teacher_digest, config, data), *indexes]


def note_job(run: Run) -> None:
    """Leave word of which job of torchrun works on a run, and which process starts it again: one that it starts again
    goes on with the run, and until then someone may ask it to stop."""
    if under_torchrun():
        write_beat(run.job, beat_of(os.getppid(), job()))


def company(run: Run, ranks: Ranks) -> list[str]:
    """Who has gone or come since the run was last trained, and who is still missing, where several computers train."""
    if ranks is ALONE:
        return []
    now, before = Counter(ranks.hosts), Counter(ranks.hosts)
    for event in read_events(run.events):
        if event["type"] == "together":
            before = Counter(map(str, mapping(event.get("worth")).get("hosts") or []))
    gone, come = sorted((before - now).elements()), sorted((now - before).elements())
    notes = []
    if gone:
        notes.append(f"goes on without {' and '.join(gone)}")
    if come:
        notes.append(f"{' and '.join(come)} joined")
    if ranks.many and not notes and run.events.exists():
        notes = [f"trained by {' and '.join(ranks.hosts)}"]
    if ranks.count < machines_wanted():
        notes.append(
            f"{ranks.count} of {machines_wanted()} computers are here; the others may join again"
        )
    return notes


def shards_note(trainer: Trainer, shards: int) -> list[str]:
    """That a run goes on with other shards than it began with."""
    if shards == trainer.config.train.shards:
        return []
    return [
        f"the run began with the whole batch as one shard and goes on with {trainer.config.train.shards}, for "
        f"{counted(trainer.ranks.count, 'rank')}: losses match to about 1e-5, not to the bit"
    ]


def share_run(trainer: Trainer) -> None:
    """Give the other ranks what a run is resumed from: `follow` has them go on from there as this one does."""
    run, ranks = trainer.run, trainer.ranks
    if ranks is ALONE or not ranks.writes:
        return
    if not ranks.many:
        ranks.connect(trainer.device.collectives)
        return
    if not list_checkpoints(run.checkpoints):
        trainer.save()
    ranks.connect(trainer.device.collectives)
    newest = list_checkpoints(run.checkpoints)[-1]
    files = [run.settings, run.tokenizer]
    for folder in (run.start, newest):
        if folder.exists():
            files.extend(sorted(folder.iterdir()))
    # With what fallbacks have changed since the run began, which run.toml does not have.
    settings = asdict(trainer.config.train)
    if trainer.features is None or trainer.features.is_empty:  # then the others take none, either
        settings["features"] = NEVER
    task = {"task": TRAIN_TOGETHER, "run": run.name, "base": str(run.base), "train": settings}
    ranks.from_writer(task, "set-up")
    digest = str(run.read_settings()["run"].get("teacher_digest", ""))
    cached = cached_for_others(digest, trainer.config, trainer.data)
    share_run_files(run, [path for path in files if path.is_file()], ranks, cached)
    begin_together(trainer)


def begin_together(trainer: Trainer) -> None:
    """Check on every rank that all begin alike, and find out how fast they will be."""
    agree_on_progress(trainer)
    check_same_start(trainer)
    measure(trainer)


def check_same_start(trainer: Trainer) -> None:
    """Ranks that began with other weights or other batches than the writer would train another model without anyone
    noticing."""
    digest = hashlib.sha256()
    for parameter in trainer.step.model.parameters():
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    batch = next_batch(trainer)
    tokens = hashlib.sha256(batch.tokens_BL.tobytes() + batch.positives_BB.tobytes())
    own = {"weights": digest.hexdigest(), "batches": tokens.hexdigest()}
    theirs = trainer.ranks.from_writer(own, "digest of weights and batches")
    other = [name for name in own if own[name] != theirs[name]]
    if other:
        raise TrainingError(
            f"Rank {trainer.ranks.rank} has other {' and '.join(other)} than the rank that writes.",
            hint="the same releases of lapclip and torch on all computers",
        )


def next_batch(trainer: Trainer) -> Batch:
    """The batch of the next step, with the images of this rank's own shards alone: others need not be read here. A rank
    without shards has them all, to be timed with."""
    shards, ranks, plan = trainer.config.train.shards, trainer.ranks, trainer.plan
    if own_shards(ranks, shards or ranks.count):
        plan = own_batches(plan, shards, ranks)
    return plan.batch(min(trainer.progress.step + 1, trainer.steps))


def measure(trainer: Trainer) -> None:
    """Before ranks train together, find out how fast that will be, and deal the shards by the speed of each."""
    ranks, train, step = trainer.ranks, trainer.config.train, trainer.step
    if isinstance(step, GraphedStep):
        return
    if ranks.writes:
        batch = trainer.plan.batch(min(trainer.progress.step + 1, train.steps))
    else:
        batch = next_batch(trainer)
    worth = measure_together(step, batch, train, trainer.device, ranks)
    ranks.speeds, ranks.overlaps = worth.shards, worth.overlaps
    ranks.sent_bytes, ranks.waited_seconds = 0, 0.0  # of what follows
    trainer.log.append(
        events.Together(
            step=trainer.progress.step, worth=worth.to_dict(), text=worth.line(train.batch_size)
        )
    )
    if ranks.writes:
        wanted = machines_wanted()  # so that others know how the run is gone on with
        invited = {"machines": wanted, "address": invited_at()} if wanted else {}
        trainer.run.record("together", worth.to_dict() | invited)


# --- steps ----------------------------------------------------------------------------------------


class RankReports:
    """Writes down now and then how the ranks fare, and at the end how long their steps took."""

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        self._since = time.perf_counter()
        self._before: list[tuple[float, int]] = []

    def record(self, trainer: Trainer, number: int, step_seconds: float) -> None:
        """Count a step, and write how the ranks fare if that was long ago."""
        ranks = trainer.ranks
        if not ranks.many:
            return
        self.step_seconds.append(step_seconds)
        seconds = time.perf_counter() - self._since
        if seconds < RANKS_EVENT_SECONDS and number < trainer.steps:
            return
        before = self._before or [(0.0, 0)] * ranks.count
        gained = [
            (waited - old[0], sent - old[1])
            for (waited, sent), old in zip(ranks.metrics, before, strict=True)
        ]
        self._since, self._before = time.perf_counter(), ranks.metrics
        shards = trainer.config.train.shards or ranks.count
        trainer.log.append(
            events.Ranks(
                step=number,
                hosts=list(ranks.hosts),
                shards=[len(own_shards(ranks, shards, rank)) for rank in range(ranks.count)],
                waited=[min(1.0, waited / seconds) for waited, _ in gained],
                bytes_per_second=[sent / seconds for _, sent in gained],
                writer=ranks.writer,
            )
        )

    def record_truth(self, run: Run) -> None:
        """Put how long the steps of several ranks took beside what was predicted."""
        taken = self.step_seconds[SLOW_STEPS:]
        if not taken:
            return
        predicted = run.read_settings().get("together")
        if predicted:
            run.record("together", predicted | {"step_seconds": statistics.median(taken)})


def agree_on_progress(trainer: Trainer) -> None:
    """Take over how far the rank that writes has come: it knows the scores, and they decide when a run ends."""
    if trainer.ranks.many:
        told = trainer.ranks.from_writer(asdict(trainer.progress), "evaluation")
        trainer.progress = Progress(**told)


@contextmanager
def encoding_together(embedder: Embedder, trainer: Trainer) -> Iterator[None]:
    """Have several ranks compute embeddings in shares."""
    embedder.ranks = trainer.ranks
    try:
        yield
    finally:
        embedder.ranks = ALONE


# --- failures -------------------------------------------------------------------------------------


def decide_together(error: Exception, trainer: Trainer) -> Change | None:
    """What to change. All ranks change the same, and only after a failure that all know of: in the middle of a step, or
    in what they compute in shares."""
    train, number, ranks = trainer.config.train, trainer.progress.step + 1, trainer.ranks
    if not ranks.many:
        return decide(error, train, number)
    if not isinstance(error, RankFailed):
        return None
    change = decide(error.__cause__, train, number) if error.__cause__ else None
    said = ranks.agree_on_change(
        asdict(replace(change, text=f"{change.text}, on all ranks")) if change else None
    )
    return Change(**said) if said else None


def restore_together(trainer: Trainer, restore: Callable[[], list[str] | None]) -> list[str] | None:
    """`restore`, and the others take over what the rank that writes has."""
    ranks, run = trainer.ranks, trainer.run
    if not ranks.many:
        return restore()
    skipped = restore() if ranks.writes else None
    newest = list_checkpoints(run.checkpoints)[-1:] if ranks.writes else []
    ranks.share_files(run.path, [path for folder in newest for path in sorted(folder.iterdir())])
    if not ranks.writes:
        restore()
    agree_on_progress(trainer)
    return skipped


# --- the end --------------------------------------------------------------------------------------


def share_best_model(trainer: Trainer) -> None:
    """The rank that writes gives the best model to the others."""
    run = trainer.run
    trainer.ranks.share_files(run.path, [run.model / WEIGHTS, run.model / CONFIG])


def load_together(trainer: Trainer, load: Callable[[], T]) -> T:
    """Load a model on all ranks or on none."""
    return trainer.ranks.all_or_none(load)


def close_ranks(trainer: Trainer) -> None:
    """The others have done all there was for them to do."""
    trainer.ranks.close()
    trainer.ranks = ALONE


# --- the ranks that follow ------------------------------------------------------------------------


def take_part(
    begin: Callable[[Ranks], TrainOutcome],
    resume: Callable[[Run, Ranks, bool], TrainOutcome],
) -> TrainOutcome | None:
    """Under torchrun: begin on the rank that writes, and follow it on the others. Where this job has begun already and
    was started again, `resume` its run, detached or not. None for ranks that follow, and where the run is over."""
    run = run_of_job(job(), job_agent())
    with join(holds_run=run is not None, writer=writer_invited()) as ranks:
        check_place(ranks)
        if not ranks.writes:
            follow(ranks)
            return None
        if run is None:
            return begin(ranks)
        if (
            run.last_state() == "finished"
        ):  # and another rank failed after that, or the same line was typed again
            print(f"{run.path} is finished; this job has nothing left to do.", file=sys.stderr)
            ranks.connect()
            ranks.from_writer({"task": NOTHING_LEFT, "run": run.name}, "set-up")
            return None
        # What the same agent starts again was asked to stop where someone asked for it meanwhile.
        beat = read_beat(run.job)
        again = beat is not None and beat.process == os.getppid() and beat.alive
        return resume(run, ranks, again)


def writer_invited() -> int | None:
    """The rank that writes where guests have joined a host: the host, which torch numbers first. Under torchrun it
    follows from who has what."""
    return 0 if machines_wanted() else None


def check_place(ranks: Ranks) -> None:
    """A guest never writes, and a host never follows: it would open what somebody else names."""
    if machines_wanted() and ranks.writes == (Agreement.of_this_process() is not None):
        raise LostRank(
            "The computers have met without their host, or in another order.",
            hint="lapclip join again",
        )


def follow(ranks: Ranks) -> None:
    """Train on a rank that does not write, from what the writer has set up, to the end of its run."""
    from lapclip.training.preparation import prepare_again
    from lapclip.training.run_process import recording, stop_signals
    from lapclip.training.trainer import Trainer
    from lapclip.tuning.compare_machines import compare_together

    with temporary_folder("rank") as folder:
        loaded = load_early(ranks)
        ranks.connect()
        while True:
            named = ranks.from_writer(what="set-up")
            if named["task"] == COMPARE_TOGETHER:
                compare_together(ranks, lambda what: None)
            if named["task"] in (COMPARE_TOGETHER, NOTHING_LEFT):
                return
            # A name such as ".." leads nowhere else.
            run = Run(folder / f"run-{Path(named['run']).name}", Path(named["base"]))
            run.path.mkdir(exist_ok=True)
            share_run_files(run, (), ranks)
            features = named["task"] == FEATURES_TOGETHER
            saved = run.read_settings()
            # The order of streamed data depends on the shards that the run began with, which `share_again` changes.
            shards = saved["train"].get("shards", 1)
            saved["train"] = {**named.get("train", saved["train"]), "shards": shards}
            saved.setdefault("work", {})["track"] = "none"  # only the writer has a run to show
            parts = prepare_again(run, saved, None, ranks, features=features, loaded=loaded)
            if not features:
                break
            del parts  # before it is made once more: there may not be room for both
        del loaded
        with stop_signals() as signals, recording(run, Callbacks(), parts.config) as log:
            trainer = Trainer.of_parts(run, parts, ranks=ranks)
            trainer.log = log
            trainer.load_newest()
            del parts
            begin_together(trainer)
            trainer.stop_reason = signals.reason
            trainer.run_to_end()


@dataclass(frozen=True)
class Loaded:
    """Data that was loaded before the settings of its run were complete."""

    config: Config
    data: DataSet

    def fits(self, config: Config) -> bool:
        """Whether complete settings mean the same data, seen alike."""
        data = replace(self.config.data, split_rule=split_rule(self.config.data))
        if not find_source(data.source).is_drawn:
            data = replace(data, stream="always" if self.data.train.sequential else "never")
        return data == config.data and View.of(self.config.model) == View.of(config.model)


def load_early(ranks: Ranks) -> Loaded | None:
    """On a rank that follows, load the data while the writer does and chooses its settings, instead of after it. Where
    images are streamed the writer will say which of them can be used: then that is waited for."""
    announced = ranks.announced()
    if announced is None:
        return None
    config = build_config([Layer(f"what rank {ranks.writer} announced", announced)], SHAPES)
    agreed = Agreement.of_this_process()
    if config.data.stream == "always" or (
        agreed and agreed.source
    ):  # a copy of what the host streams
        return None
    return Loaded(config, load_again(config, agreed.fingerprint if agreed else "", None))
