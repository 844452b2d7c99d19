from __future__ import annotations

import dataclasses

from lapclip.machine.cpu import Cpu
from lapclip.model.shapes import SHAPES
from lapclip.tuning.measure import Setting
from lapclip.tuning.workload import Rehearsal, make_workload, some_pairs

from .made import small

CPU = Cpu()


TINY = SHAPES["tiny"]


def test_a_rehearsal_learns() -> None:
    rehearsal = Rehearsal(small(), CPU)
    step = rehearsal.repeated()
    first = step().loss
    assert min(step().loss for _ in range(20)) < first


def test_images_are_made_once_and_differ() -> None:
    pairs = some_pairs(6, 16)
    assert pairs.pixels.shape == (6, 16, 16, 3)
    assert len({image.tobytes() for image in pairs.pixels[:]}) == 6
    assert some_pairs(6, 16) is pairs


def test_a_workload_leaves_nothing_to_choose() -> None:
    train = make_workload(TINY, 4, CPU).train
    assert "auto" not in (train.loader_threads, *(getattr(train, field.name) for field in dataclasses.fields(Setting)))
