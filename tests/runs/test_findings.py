"""What `lapclip doctor` finds: each fault in a run that has it, really trained where that takes seconds."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lapclip.config import DataConfig
from lapclip.data.dataset import Pairs
from lapclip.data.sources.built_in import load_scenes
from lapclip.embedder import Embedder, load_torch
from lapclip.errors import TrainingError
from lapclip.model.clip import CLIP
from lapclip.runs.events import read_events
from lapclip.runs.findings import CHECKS, Finding, Surroundings, findings, surroundings_of
from lapclip.runs.folder import Run
from lapclip.runs.follow import FollowedRun
from lapclip.runs.summary import Summary, summarise
from lapclip.suggest import quoted
from lapclip.training.cuda_graph import make_step
from lapclip.training.preparation import prepare
from lapclip.training.request import Callbacks
from lapclip.training.run_parts import RunParts, make_plan

from ..small_runs import train
from ..suggestions import check_command, commands_in

SMALL = [
    "model.name=tiny",
    "data.tokenizer=characters",
    "data.train_pairs=64",
    "train.optimizer=adamw",  # the faults are those of a plain run
    "train.word_weight=0",
    "train.warmup=0.2",
    "train.batch_size=32",
    "train.steps=32",
    "train.evaluate_every_epochs=100",
    "train.dtype=float32",
    "train.device=cpu",
    "train.threads=1",
    "train.loader_threads=1",
    "train.image_attention=fused",  # kernels are else chosen by timing, which takes longer than these runs
    "train.text_attention=fused",
    "train.linear=torch",
]
Change = Callable[[RunParts], RunParts]
Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Run]]:
    """Trains the run of a name once, and gives it."""
    trained: dict[str, Run] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("findings"))

        def run(name: str) -> Run:
            if name not in trained:
                settings, change = FAULTS[name]
                if change is later:
                    run("healthy")
                _train(name, settings, change)
                trained[name] = Run(Path("runs") / name)
            return trained[name]

        yield run


def _train(name: str, settings: list[str], change: Change) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lapclip.training.trainer.prepare", lambda *arguments: change(prepare(*arguments))
        )
        train("first-run", [*SMALL, *settings], name=name)


def as_it_is(setup: RunParts) -> RunParts:
    return setup


def with_splits(setup: RunParts, **splits: Pairs) -> RunParts:
    data = replace(setup.data, splits={**setup.data.splits, **splits})
    return replace(setup, data=data, plan=make_plan(setup.config, data, setup.tokenizer))


def black(setup: RunParts) -> RunParts:
    """Every image is black, as if none had been decoded."""
    blank = {
        name: Pairs(np.zeros_like(pairs.pixels[:]), pairs.captions)
        for name, pairs in setup.data.splits.items()
    }
    return with_splits(setup, **blank)


def few_captions(setup: RunParts) -> RunParts:
    """Four captions for all held-out images, eight for all training images."""

    def repeated(pairs: Pairs, count: int) -> Pairs:
        return Pairs(pairs.pixels, [pairs.captions[row % count][:1] for row in range(len(pairs))])

    held_out, train = setup.data.held_out, setup.data.train
    return with_splits(setup, val=repeated(held_out, 4), train=repeated(train, 8))


def few_held_out(setup: RunParts) -> RunParts:
    held_out = setup.data.held_out
    return with_splits(setup, val=Pairs(held_out.pixels[:20], held_out.captions[:20]))


class SlowDisk:
    """Images that take their time."""

    def __init__(self, pixels: np.ndarray) -> None:
        self._pixels = pixels

    def __getitem__(self, rows: Any) -> np.ndarray:
        time.sleep(0.06)
        return self._pixels[rows]


def slow_disk(setup: RunParts) -> RunParts:
    train: Any = SlowDisk(setup.data.train.pixels[:])
    return with_splits(setup, train=Pairs(train, setup.data.train.captions))


def frozen_text(setup: RunParts) -> RunParts:
    model = CLIP(setup.config.model)
    model.text.requires_grad_(False)
    step = make_step(model, setup.config.train, setup.device)
    return replace(setup, step=step, embedder=Embedder(model, setup.tokenizer, setup.device))


def tiny_projection(setup: RunParts) -> RunParts:
    """Weights of a wrong size: what is divided by their length grows as they shrink."""
    with torch.no_grad():
        setup.step.model.image.get_parameter("projection").mul_(1e-6)
    return setup


def later(setup: RunParts) -> RunParts:
    """A model that knows some pairs by heart is trained on others, and scored on the ones it knew."""
    setup.step.model.load_state_dict(load_torch("runs/healthy").model.state_dict())
    known = load_scenes(DataConfig(train_pairs=64), setup.config.model.image_size).train
    return with_splits(
        setup, val=Pairs(known.pixels, [captions[:1] for captions in known.captions])
    )


FAULTS: dict[str, tuple[list[str], Change]] = {
    "healthy": (["train.steps=120"], as_it_is),
    "no-rate": (["train.learning_rate=0"], as_it_is),
    "wild": (["train.learning_rate=0.1"], as_it_is),
    "black": ([], black),
    "duplicates": ([], few_captions),
    "few-held-out": ([], few_held_out),
    "slow-disk": (
        ["model.image_layers=1", "model.text_layers=1", "model.text_width=16"],
        slow_disk,
    ),
    "frozen": ([], frozen_text),
    "tiny-projection": (["train.learning_rate=1e-7"], tiny_projection),
    "small-batch": (["train.batch_size=8", "train.warmup=1.0"], as_it_is),
    "forgetful": (
        [
            "data.seed=1",
            "train.learning_rate=2e-3",
            "train.steps=36",
            "train.evaluate_every_epochs=1",
        ],
        later,
    ),
}


def summary_of(run: Run) -> Summary:
    followed = FollowedRun(run)
    followed.refresh()
    return followed.summary


BUSY = "waiting-for-data"
"""True of any run of a tiny model while other programs have the cores: not what most of these tests are about."""


def found_in(run: Run) -> dict[str, Finding]:
    found = findings(summary_of(run), surroundings_of(run))
    return {
        finding.id: finding for finding in found if finding.id != BUSY or run.name == "slow-disk"
    }


def changed(run: Run, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Summary:
    """The run's events with something about them changed."""
    return summarise([change(event) for event in read_events(run.events)])


def ids(summary: Summary, around: Surroundings = Surroundings()) -> list[str]:
    return [finding.id for finding in findings(summary, around) if finding.id != BUSY]


def test_a_healthy_run_has_no_findings(runs) -> None:
    assert found_in(runs("healthy")) == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no-rate", {"stuck-loss": "alarm"}),
        ("wild", {"stuck-loss": "alarm", "collapsed": "alarm", "vanishing-gradients": "warning"}),
        ("black", {"stuck-loss": "alarm", "collapsed": "alarm"}),
        ("duplicates", {"at-chance": "alarm", "duplicate-captions": "warning"}),
        ("few-held-out", {"small-validation": "warning"}),
        ("slow-disk", {"waiting-for-data": "warning"}),
        ("frozen", {"at-chance": "alarm", "one-tower": "warning"}),
        ("tiny-projection", {"exploding-gradients": "alarm", "one-tower": "warning"}),
        ("small-batch", {"at-chance": "alarm", "small-batch": "warning"}),
        ("forgetful", {"overfitting": "warning", "small-validation": "warning"}),
    ],
)
def test_a_fault_is_found_and_no_other_is(runs, name: str, expected: dict[str, str]) -> None:
    found = found_in(runs(name))
    assert {finding.id: finding.severity for finding in found.values()} == expected
    assert all(finding.evidence and finding.next for finding in found.values())


def test_the_evidence_has_the_numbers_and_the_next_step_a_command(runs) -> None:
    stuck = found_in(runs("no-rate"))["stuck-loss"]
    assert "3.47" in stuck.evidence  # ln(32)
    assert "lapclip train --recipe first-run --name no-rate-2 --set model.name=tiny" in stuck.next
    assert stuck.next.endswith("--set train.learning_rate=0.0005")
    duplicates = found_in(runs("duplicates"))["duplicate-captions"]
    assert "val: 240 captions, 4 of them different" in duplicates.evidence
    assert "text-to-image R@1 can reach 1.7% at most" in duplicates.evidence
    assert "image-to-text 0.0%" in duplicates.evidence
    assert "image.head" in found_in(runs("tiny-projection"))["exploding-gradients"].evidence
    assert "gradient of the text tower 0," in found_in(runs("frozen"))["one-tower"].evidence
    assert "see that the images differ" in found_in(runs("black"))["collapsed"].next
    assert (
        "20 held-out pairs a recall near 50 % is only known to within 22%"
        in found_in(runs("few-held-out"))["small-validation"].evidence
    )


@pytest.mark.parametrize(("weight", "expected"), [(0.9, ["stuck-loss"]), (1.0, ["at-chance"])])
def test_a_stuck_loss_is_found_beside_a_teachers(runs, weight: float, expected: list[str]) -> None:
    """Its part has another scale; where it is all of the loss, nothing can be compared with guessing."""

    def taught(event: dict[str, Any]) -> dict[str, Any]:
        if event["type"] != "step":
            return event
        taught = {**event, "loss": (1 - weight) * event["loss"] + weight * 0.5, "teacher_loss": 0.5}
        return taught | ({"contrastive_loss": event["loss"]} if weight < 1 else {})

    assert ids(changed(runs("no-rate"), taught)) == expected
    assert ids(changed(runs("healthy"), taught)) == []


def test_overfitting_names_the_step_since_when(runs) -> None:
    kept = [event for event in summary_of(runs("forgetful")).evaluations if event["best"]][-1]
    assert f"at step {kept['step']} to" in found_in(runs("forgetful"))["overfitting"].evidence


@pytest.mark.parametrize("good", [1, 2, 3])
def test_one_late_evaluation_as_good_as_the_best_is_no_overfitting(runs, good: int) -> None:
    """All of the last three must be worse, whichever of them is not."""
    run = runs("forgetful")
    evaluations = summary_of(run).evaluations
    kept = [event for event in evaluations if event["best"]][-1]
    late = evaluations[-good]["step"]

    def recovered(event: dict[str, Any]) -> dict[str, Any]:
        mended = event["type"] == "evaluation" and event["step"] == late
        return {**event, "evaluation": kept["evaluation"]} if mended else event

    assert "overfitting" in ids(summary_of(run))
    assert "overfitting" not in ids(changed(run, recovered))


def test_the_ceiling_is_one_that_a_perfect_model_reaches() -> None:
    captions = [["a cat"], ["a cat", "a red cat"], ["a dog"], ["a dog"]]
    counted = Pairs(np.zeros((4, 1, 1, 3), np.uint8), captions).repeats()
    assert counted == {"captions": 5, "distinct": 3, "told_apart": 0.25}


def test_not_a_number_is_found_in_the_run_it_ended(
    runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrainingError):
        train("first-run", [*SMALL, "train.learning_rate=1e30"], name="nan")
    found = found_in(Run(Path("runs/nan")))
    assert list(found) == ["not-a-number"]
    assert "loss is not a number at step 2" in found["not-a-number"].evidence
    assert found["not-a-number"].next.endswith("--set train.learning_rate=0.0005")


def test_a_run_that_failed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def unplugged(event: Any) -> None:
        if event.type == "step" and event.step == 3:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        train("first-run", SMALL, name="unlucky", callbacks=Callbacks([unplugged]))
    found = found_in(Run(Path("runs/unlucky")))
    assert list(found) == ["failed"]
    assert "the disk is gone" in found["failed"].evidence
    assert found["failed"].next == "lapclip resume unlucky"


def test_nothing_is_said_about_learning_after_a_few_steps(runs) -> None:
    for name in ("no-rate", "wild", "black", "tiny-projection", "frozen"):
        early = [event for event in read_events(runs(name).events) if event.get("step", 0) <= 10]
        assert ids(summarise(early)) == []


def test_a_run_that_died_is_resumed_and_one_that_waits_is_paused(runs, tmp_path: Path) -> None:
    run = cut_short(
        runs("healthy"), tmp_path, {"type": "paused", "step": 20, "reason": "on battery below 30 %"}
    )
    found = found_in(run)
    assert list(found) == ["died"]
    assert "nothing after step 20 of 120" in found["died"].evidence
    assert found["died"].next.startswith(
        f"lapclip resume {quoted(str(run.path))}, "
    )  # it lies elsewhere
    assert "memory" not in found["died"].evidence
    started = [event for event in read_events(run.events) if event["type"] == "started"]
    early = {
        finding.id: finding
        for finding in findings(summarise(started), Surroundings(name="m", state="died"))
    }
    assert "out of memory" in early["died"].evidence  # it never took a step
    assert "train.micro_batch=" in early["died"].next
    with run.lock():
        found = found_in(run)
    assert {finding.id: finding.severity for finding in found.values()} == {"paused": "note"}
    assert "on battery below 30 %" in found["paused"].evidence
    went_on = {"type": "went_on", "step": 20, "seconds": 300.0}
    assert ids(summarise([*read_events(run.events), went_on]), Surroundings(state="running")) == []


def cut_short(run: Run, folder: Path, *more: dict[str, Any]) -> Run:
    """A copy of a run that ends after step 20, with some events more."""
    copy = Run(folder / "runs" / "half-done")
    copy.path.mkdir(parents=True)
    copy.settings.write_text(run.settings.read_text())
    kept = [event for event in read_events(run.events) if event.get("step", 0) <= 20]
    copy.events.write_text("".join(json.dumps(event) + "\n" for event in (*kept, *more)))
    return copy


def test_a_machine_that_slept_is_a_note(runs) -> None:
    slept = changed(
        runs("healthy"),
        lambda event: {**event, "time": event["time"] + 7200 * (event.get("step", 0) > 50)},
    )
    assert ids(slept) == ["paused"]
    assert "nothing happened for 120 min in all, once" in findings(slept)[0].evidence


def test_runs_that_train_at_once_compete(
    runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cut_short(runs("healthy"), tmp_path)
    other = Run(run.path.with_name("other"))
    other.path.mkdir()
    other.settings.write_text(run.settings.read_text())
    other.events.write_text(run.events.read_text())
    monkeypatch.chdir(tmp_path)
    with run.lock():
        assert list(found_in(run)) == []
        with other.lock():
            assert list(found_in(run)) == ["competing-runs"]
            assert "lapclip stop other" in found_in(run)["competing-runs"].next
            started = {
                **next(read_events(run.events)),
                "devices": {"image": "cuda", "text": "cuda"},
            }
            other.events.write_text(json.dumps(started) + "\n")
            assert list(found_in(run)) == []


def test_gradients_that_grow_thirtyfold_explode(runs) -> None:
    def grown(event: dict[str, Any], times: float) -> dict[str, Any]:
        return {**event, "grad_norm": 10.0 * (times if event.get("step", 0) > 40 else 1)}

    assert ids(changed(runs("healthy"), lambda event: grown(event, 29))) == []
    assert ids(changed(runs("healthy"), lambda event: grown(event, 31))) == ["exploding-gradients"]


def test_slower_than_tuned_counts_from_a_third_more(runs) -> None:
    typical = statistics.median(event["gap"] for event in summary_of(runs("healthy")).steps[-20:])

    def tuned(seconds: float) -> Summary:
        return changed(runs("healthy"), lambda event: {**event, "tuned_seconds": seconds})

    assert ids(tuned(typical)) == []
    (finding,) = findings(tuned(typical / 2))
    assert finding.id == "slower-than-tuned"
    assert "2.0 times" in finding.evidence
    assert "lapclip tune" in finding.next


def test_what_needs_another_machine(runs) -> None:
    """Heat, swap and full memory cannot be had in seconds, so they are written into the events of a healthy run."""
    events = list(read_events(runs("healthy").events))
    limit = events[0]["memory_limit_bytes"]
    assert limit > events[-1]["peak_memory_bytes"]
    sensors = next(event for event in events if event["type"] == "sensors")
    events = [
        event for event in events if event["type"] != "sensors"
    ]  # a slow run has more of them
    hot = [
        {**sensors, "step": at, "throttled": at % 3 == 0, "celsius": 90.0 + at, "megahertz": 900}
        for at in range(9)
    ]
    assert ids(summarise([*events, *hot])) == ["throttled"]
    assert "at 3 of 9 readings" in findings(summarise([*events, *hot]))[0].evidence
    assert (
        ids(summarise([*events, hot[0], *({**look, "throttled": False} for look in hot)])) == []
    )  # once is nothing
    busy = [
        {**sensors, "step": at, "core_use": [1.0, 1.0], "others": 0.5 if at % 3 == 0 else 0.1}
        for at in range(9)
    ]
    assert ids(summarise([*events, *busy])) == []  # one thread finds a core
    config = events[0]["config"]
    two = [
        {**events[0], "config": {**config, "train": {**config["train"], "threads": 2}}},
        *events[1:],
    ]
    assert ids(summarise([*two, *busy])) == ["busy-cores"]
    (finding,) = findings(summarise([*two, *busy]))
    assert f"at 3 of {9 + sum(event['type'] == 'sensors' for event in events)}" in finding.evidence
    assert "train.threads=1" in finding.next
    assert "50%" in finding.evidence
    assert ids(summarise([*two, *busy[:6]])) == []  # twice is nothing
    on_gpu = [{**two[0], "devices": {"image": "cuda", "text": "cuda"}}, *two[1:]]
    assert ids(summarise([*on_gpu, *busy])) == []
    lost = {
        "type": "fell_back",
        "step": 1,
        "cause": "device",
        "devices": two[0]["devices"],
        "text": "on the CPU",
    }
    assert "busy-cores" in ids(summarise([*on_gpu, lost, *busy]))
    for odd in (
        {"others": 1e308},
        {"others": -(10**308)},
        {"step": "five"},
        {"step": None},
        {"core_use": 3},
    ):
        findings(summarise([*two, *({**event, **odd} for event in [*busy, *hot])]))
    swapped = [
        {**sensors, "swap_bytes": sensors["swap_bytes"] + grown} for grown in (0, 2_000_000_000)
    ]
    assert ids(summarise([*events, *swapped])) == ["swapping"]
    full = {"type": "memory", "step": 80, "process_bytes": 1, "peak_bytes": round(0.95 * limit)}
    (finding,) = findings(summarise([*events[:-1], full]))
    assert finding.id == "memory-limit"
    assert "--set train.micro_batch=16" in finding.next
    fell = {
        "type": "fell_back",
        "step": 40,
        "cause": "out of memory",
        "change": {"micro_batch": 16},
        "text": "smaller",
    }
    (finding,) = findings(summarise([*events, fell]))
    assert (finding.id, finding.severity) == ("fell-back", "note")
    assert "micro_batch = 16" in finding.evidence


def ranks(*waited: float) -> dict[str, Any]:
    return {
        "type": "ranks",
        "step": 100,
        "hosts": ["desktop", "laptop"],
        "rows": [64, 64],
        "waited": list(waited),
    }


def test_a_run_at_chance_is_an_alarm_from_half_of_its_steps_on(runs) -> None:
    """Whose training pairs are learnt, as where captions were shuffled: held-out recall alone tells."""

    def shuffled(
        event: dict[str, Any], candidates: int = 240, found: float = 10 / 240
    ) -> dict[str, Any]:
        if not event.get("evaluation"):
            return event
        half, chance = 0.02, 10 / candidates
        ways = {f"{way}_r10": value for way in ("t2i", "i2t") for value in [found]}
        scores = {
            **event["evaluation"],
            "candidates": candidates,
            **ways,
            "chances": dict.fromkeys(ways, chance),
        }
        return {
            **event,
            "evaluation": {
                **scores,
                "intervals": {key: [found - half, found + half] for key in ways},
            },
        }

    around = replace(
        surroundings_of(runs("healthy")),
        settings={"run": {"recipe": "photos", "asked": {"data": {"source": "/data/my photos"}}}},
    )
    (finding,) = findings(changed(runs("healthy"), shuffled), around)
    assert (finding.id, finding.severity) == ("at-chance", "alarm")
    assert "val R@10" in finding.evidence
    assert "test R@10" in finding.evidence
    first, second = finding.next.splitlines()
    assert "lapclip data check '/data/my photos' --page pairs.html" in first
    assert "lapclip train '/data/my photos' --recipe heads" in second
    assert ids(changed(runs("healthy"), lambda event: shuffled(event, found=0.1))) == []
    assert (
        ids(changed(runs("healthy"), lambda event: shuffled(event, candidates=30, found=1 / 3)))
        == []
    )
    begun = [
        shuffled(event)
        for event in read_events(runs("healthy").events)
        if event.get("step", 0) <= 59
    ]
    evaluation = {
        "type": "evaluation",
        "step": 59,
        "epoch": 29,
        "split": "val",
        "evaluation": {"x": 0},
    }
    assert ids(summarise([*begun, shuffled(evaluation)])) == []  # not yet half of 120


def test_vanishing_gradients_beside_a_teacher_are_judged_by_the_contrastive_part(runs) -> None:
    """A model that has learnt all but its teacher's part has small gradients because nothing is left to learn."""

    def learnt(event: dict[str, Any]) -> dict[str, Any]:
        if event["type"] != "step":
            return event
        parts = {"image.0": 1e-9, "text.0": 1e-9}
        return {**event, "loss": 1.01, "contrastive_loss": 0.02, "grad_norms": parts}

    def without_teacher(event: dict[str, Any]) -> dict[str, Any]:
        changed_event = learnt(event)
        changed_event.pop("contrastive_loss", None)
        return changed_event

    assert ids(changed(runs("healthy"), learnt)) == []
    alone = changed(runs("healthy"), without_teacher)
    assert ids(alone) == ["vanishing-gradients"]


def test_the_gravest_come_first(runs) -> None:
    severities = [finding.severity for finding in found_in(runs("wild")).values()]
    assert severities == ["alarm", "alarm", "warning"]


@pytest.mark.parametrize("name", ["healthy", "wild", "forgetful", "duplicates"])
def test_fields_that_are_missing_or_odd_never_raise(runs, name: str) -> None:
    events = [*read_events(runs(name).events), *[ranks(0.9, 0.1)] * 3]
    fields = {field for event in events for field in event} - {"type"}
    fields |= {f"evaluation.{field}" for event in events for field in event.get("evaluation") or ()}
    for field in sorted(fields):
        outer, _, inner = field.partition(".")
        for odd in (None, "odd", {}, [1]):
            touched = [
                {
                    **event,
                    outer: {**event[outer], inner: odd} if inner and event.get(outer) else odd,
                }
                if outer in event
                else event
                for event in events
            ]
            findings(summarise(touched))
    assert findings(summarise([])) == []


def test_every_suggested_command_is_one_and_keeps_the_data_the_recipe_and_the_name(
    runs, tmp_path: Path
) -> None:
    """What each check would say is asked for with whatever finds it, of a run whose data has spaces in its name."""
    asked = {
        "data": {"source": str(tmp_path / "my photos"), "caption_column": "a title"},
        "train": {"batch_size": 32},
    }
    settings = {"run": {"recipe": "photos", "asked": asked}}
    around = Surroundings("my run", settings, "mine-2", "running", ("other",))
    seen = set()
    for summary in [*map(summary_of, map(runs, FAULTS)), *_events_of_rare_faults(runs("healthy"))]:
        for state in ("running", "died"):
            for finding in findings(summary, replace(around, state=state)):
                seen.add(finding.id)
                for words in commands_in(finding.next):
                    check_command(words)
                    if words[0] == "train":
                        assert words[1] == str(tmp_path / "my photos")
                        assert words[words.index("--name") + 1] == "mine-2"
                        assert "data.caption_column=a title" in words
                        assert words[words.index("--recipe") + 1] in ("photos", "heads")
                    if words[0] in ("resume", "report"):
                        assert words[1] in ("my run", "other")
    assert {
        "stuck-loss",
        "at-chance",
        "overfitting",
        "small-validation",
        "memory-limit",
        "died",
        "throttled",
    } <= seen
    assert {check.id for check in CHECKS} - seen <= {
        "not-a-number",
        "failed",
        "paused",
        "swapping",
    }


def _events_of_rare_faults(run: Run) -> Iterator[Summary]:
    events = list(read_events(run.events))
    sensors = next(event for event in events if event["type"] == "sensors")
    fell = {
        "type": "fell_back",
        "step": 40,
        "cause": "out of memory",
        "change": {"micro_batch": 16},
        "text": "smaller",
    }
    hot = {**sensors, "throttled": True, "others": 0.5, "core_use": [1.0, 1.0]}
    config = events[0]["config"]
    two = {**events[0], "config": {**config, "train": {**config["train"], "threads": 2}}}
    yield summarise([two, *events[1:], *({**hot, "step": at} for at in range(9)), fell])
    yield summarise([{**event, "tuned_seconds": 1e-6} for event in events])
    yield summarise(
        [*events[:-1], {"type": "memory", "step": 80, "process_bytes": 1, "peak_bytes": 10**15}]
    )
    yield summarise([{**event, "grad_norm": 2000.0} for event in events])
    photos = {**events[0], "pairs": {"train": 400, "val": 50, "test": 50}}
    yield summarise([photos, *events[1:]])


def test_ids_are_unique_and_said_in_words() -> None:
    names = [check.id for check in CHECKS]
    assert len(names) == len(set(names)) >= 20
    assert all(
        check.title and check.counts and check.severity in ("alarm", "warning", "note")
        for check in CHECKS
    )
