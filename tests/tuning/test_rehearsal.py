"""Real steps on built-in images, to be timed."""

from __future__ import annotations

import dataclasses

from lapclip.machine.cpu import Cpu
from lapclip.measure.phases import PHASES
from lapclip.model.shapes import SHAPES
from lapclip.tuning.rehearsal import Rehearsal, make_workload, some_pairs
from lapclip.tuning.trial import Setting

from .made import small

CPU = Cpu()


def test_a_rehearsal_learns() -> None:
    rehearsal = Rehearsal(small(), CPU)
    step = rehearsal.repeat_batch()
    first = step().loss
    assert min(step().loss for _ in range(20)) < first


def test_images_are_made_once_and_differ() -> None:
    pairs = some_pairs(6, 16)
    assert pairs.pixels.shape == (6, 16, 16, 3)
    assert len({image.tobytes() for image in pairs.pixels[:]}) == 6
    assert some_pairs(6, 16) is pairs


def test_a_workload_leaves_nothing_to_choose() -> None:
    train = make_workload(SHAPES["tiny"], 4, CPU).train
    settings = [field.name for field in dataclasses.fields(Setting)]
    assert "auto" not in (train.loader_threads, *(getattr(train, name) for name in settings))


def test_every_phase_of_a_step_is_timed() -> None:
    rehearsal = Rehearsal(small(), CPU, pairs=16)
    seconds = rehearsal.time_phases(2)
    assert tuple(seconds) == PHASES
    assert min(seconds["forward"], seconds["backward"]) > 0
    assert rehearsal.steps_taken == 3
