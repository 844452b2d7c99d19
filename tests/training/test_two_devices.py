"""Towers on two devices. Both are the CPU here, each tower in its own thread: what crosses over, when, and who waits
for whom is the same as between a CPU and a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
import torch

from lapclip.config import TrainConfig
from lapclip.data.batches import Batch
from lapclip.loss import LOSSES
from lapclip.machine.choose_device import device_of, pair_of
from lapclip.machine.cpu import Cpu
from lapclip.machine.device import Device
from lapclip.machine.timing import Stopwatch
from lapclip.model.clip import CLIP
from lapclip.model.freezing import freeze
from lapclip.model.shapes import SHAPES
from lapclip.training import cuda_graph
from lapclip.training.checkpoint import Progress, load_newest, save_checkpoint
from lapclip.training.cuda_graph import RecordedHalf, make_step
from lapclip.training.initial_weights import initialise_logits
from lapclip.training.step import StepMetrics, TrainStep
from lapclip.training.two_devices import SplitStep

from .test_step import PlainAdamW, batch_of, batch_with_words

Result = TypeVar("Result")
CPU = Cpu()
BOTH = pair_of(CPU, CPU)
OFF = Stopwatch(BOTH.synchronise, on=False)


def step_on(device: Device, **settings) -> TrainStep:
    config = TrainConfig(**{"dtype": "float32", "batch_size": 8, "steps": 10, **settings})
    model = CLIP(SHAPES["tiny"], seed=1)
    initialise_logits(model, config, new=True)
    if config.word_weight:
        model.start_words(seed=2)
    model.place(device)
    freeze(model, config)
    step = make_step(model, config, device)
    assert isinstance(step, TrainStep)
    return step


def taught(batch: Batch) -> Batch:
    rows = np.random.default_rng(3).standard_normal(
        (2, len(batch.tokens_BL), SHAPES["tiny"].embedding)
    )
    image, text = (rows / np.linalg.norm(rows, axis=2, keepdims=True)).astype(np.float32)
    return replace(batch, teacher_image=image, teacher_text=text)


def with_phrases(batch: Batch) -> Batch:
    tokens = batch.tokens_BL[:, :8].copy()
    tokens[:, 5] = 32
    return replace(batch, phrase_tokens_BL=tokens, phrase_positives_BB=batch.positives_BB)


def taken(step: TrainStep, batch: Batch, count: int = 3) -> list[StepMetrics]:
    return [step(batch, number, 1e-3, OFF)() for number in range(1, count + 1)]


CASES: dict[str, tuple[dict, Callable[[], Batch]]] = {
    "plain": ({}, batch_of),
    "clipped": ({"clip_norm": 0.01}, batch_of),
    "never clipped": ({"clip_norm": 0.0}, batch_of),
    **{loss: ({"loss": loss}, batch_of) for loss in sorted(LOSSES)},
    "micro-batches": ({"micro_batch": 3}, batch_of),
    "bfloat16": ({"dtype": "bfloat16"}, batch_of),
    "bfloat16 in micro-batches": ({"dtype": "bfloat16", "micro_batch": 3}, batch_of),
    "float16": ({"dtype": "float16"}, batch_of),
    "recomputed": ({"recompute": True}, batch_of),
    "muon": ({"optimizer": "muon"}, batch_of),
    "words": ({"word_weight": 0.5}, batch_with_words),
    "taught": ({"teacher_weight": 0.5}, lambda: taught(batch_of())),
    "phrases": ({"phrases": 0.25}, lambda: with_phrases(batch_of())),
    "phrases in micro-batches": (
        {"phrases": 0.25, "micro_batch": 3},
        lambda: with_phrases(batch_of()),
    ),
    "cut and cropped": ({"patch_dropout": 0.5, "crop": 0.5, "flip": 0.5}, batch_of),
    "lora": ({"lora_rank": 2}, batch_of),
    "last blocks": ({"image_blocks": 1, "text_blocks": 0}, batch_of),
    "chunks of captions": (
        {"batch_size": 128},
        lambda: replace(batch_of(128), lengths_B=np.arange(128) // 8 + 1),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_towers_on_two_devices_learn_to_the_bit_what_they_learn_on_one(case: str) -> None:
    settings, batch = CASES[case]
    alone, split = step_on(CPU, **settings), step_on(BOTH, **settings)
    assert isinstance(split, SplitStep)
    assert taken(split, batch()) == taken(alone, batch())
    for (name, one), other in zip(
        alone.model.named_parameters(), split.model.parameters(), strict=True
    ):
        assert torch.equal(one, other), name
        if one.requires_grad:
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad), name


def test_without_fused_adamw_too() -> None:
    plain = PlainAdamW()
    alone, split = (
        step_on(device, clip_norm=0.01, dtype="float16") for device in (plain, pair_of(CPU, plain))
    )
    assert [metrics.loss for metrics in taken(split, batch_of())] == pytest.approx(
        [metrics.loss for metrics in taken(alone, batch_of())], rel=1e-4
    )


def test_both_towers_are_at_work_at_the_same_time_each_in_its_own_thread() -> None:
    """Each waits in its forward pass until the other has begun: in turn they would wait for ever."""
    split = step_on(BOTH)
    meeting, seen = threading.Barrier(2, timeout=20), {}

    def meet(tower: str) -> Callable[..., None]:
        def wait(*_: object) -> None:
            meeting.wait()
            seen[tower] = threading.current_thread().name

        return wait

    for tower in ("image", "text"):
        getattr(split.worker, tower).register_forward_pre_hook(meet(tower))
    taken(split, batch_of(), 1)
    assert set(seen) == {"image", "text"}
    assert all(name.startswith(f"lapclip-{tower}") for tower, name in seen.items())


def test_seconds_of_each_tower_and_who_waited_are_known() -> None:
    split = step_on(BOTH)
    watch = Stopwatch(BOTH.synchronise, on=True)
    split(batch_of(), 1, 1e-3, watch)()
    assert watch.towers is not None
    assert set(watch.towers) == {"image", "text"}
    whole = sum((watch.seconds or {}).values())
    for found in watch.towers.values():
        assert 0 < found["computed"] < whole
        assert 0 <= found["waited"] < whole
    alone = Stopwatch(CPU.synchronise, on=True)
    step_on(CPU)(batch_of(), 1, 1e-3, alone)()
    assert alone.towers is None


def test_a_tower_has_the_threads_that_the_caller_has_or_half_of_them_where_both_are_on_the_cpu() -> (
    None
):
    before, seen = torch.get_num_threads(), {}
    split = step_on(BOTH)
    split.worker.image.register_forward_pre_hook(
        lambda *_: seen.update(image=torch.get_num_threads())
    )
    split.worker.text.register_forward_pre_hook(
        lambda *_: seen.update(text=torch.get_num_threads())
    )
    try:
        for count in (4, 2, 1):
            torch.set_num_threads(count)
            taken(split, batch_of(), 1)
            assert seen == dict.fromkeys(("image", "text"), max(1, count // 2))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


def test_what_fails_in_a_tower_is_raised_when_the_other_has_ended() -> None:
    split = step_on(BOTH)
    ended = threading.Event()

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory, they say")

    def work(*_: object) -> None:
        threading.Event().wait(0.2)
        ended.set()

    split.worker.image.register_forward_pre_hook(fail)
    split.worker.text.register_forward_pre_hook(work)
    with pytest.raises(torch.OutOfMemoryError, match="they say"):
        taken(split, batch_of(), 1)
    assert ended.is_set()
    assert not split.touched


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_checkpoints_of_one_device_and_of_two_are_the_same(tmp_path, dtype: str) -> None:
    split, alone = step_on(BOTH, dtype=dtype), step_on(CPU, dtype=dtype)
    taken(split, batch_of())
    save_checkpoint(tmp_path, split.model, split.optimizer, Progress(step=3), split.others)
    load_newest(tmp_path, alone.model, alone.optimizer, alone.others)
    again = step_on(BOTH, dtype=dtype)
    load_newest(tmp_path, again.model, again.optimizer, again.others)
    after = [taken(step, batch_of()) for step in (split, alone, again)]
    assert after[0] == after[1] == after[2]


class Replayed:
    """Records on the CPU: what replays runs again what was recorded, and puts the results where they were."""

    def warm_up(self, run: Callable[[], Result]) -> Result:
        return run()

    def record(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        result = run()
        first = [result]

        def replay() -> None:
            if first:  # computed while it was recorded, where a GPU computes nothing
                first.clear()
                return
            found = run()
            for target, source in zip(_tensors(result), _tensors(found), strict=True):
                target.copy_(source)

        return replay, result


def _tensors(result: object) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return list(result) if isinstance(result, tuple) else []


class Recording(Cpu):
    """A CPU that records what it does, as a GPU does."""

    records_graphs = True

    def graph_recorder(self) -> Replayed:
        return Replayed()


@pytest.mark.parametrize(
    "settings", [{}, {"micro_batch": 3}, {"dtype": "float16"}, {"clip_norm": 0.0}], ids=str
)
def test_a_tower_is_recorded_on_the_device_that_records(
    settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two shapes of captions, in turn, so that each has its recordings."""
    short = batch_of()
    short = replace(short, tokens_BL=np.ascontiguousarray(short.tokens_BL[:, :10]))
    found = []
    for warm_up in (3, 100):
        monkeypatch.setattr(cuda_graph, "WARM_UP", warm_up)
        step = step_on(pair_of(CPU, Recording()), compile="graph", **settings)
        assert isinstance(step, SplitStep)
        assert isinstance(step.halves["text"], RecordedHalf)
        assert not isinstance(step.halves["image"], RecordedHalf)
        metrics = [
            step(batch, at, 1e-3, OFF)() for at, batch in enumerate([batch_of(), short] * 6, 1)
        ]
        found.append([one.loss for one in metrics])
    assert found[0] == found[1]
    alone = step_on(CPU, **settings)
    losses = [
        alone(batch, at, 1e-3, OFF)().loss for at, batch in enumerate([batch_of(), short] * 6, 1)
    ]
    # A recording reads its learning rate from memory, in float32.
    assert found[0] == pytest.approx(losses, rel=1e-2 if "dtype" in settings else 1e-5)


def test_the_loss_is_computed_on_the_accelerator_unless_another_is_asked_for() -> None:
    pair = device_of("cpu+cuda")
    assert pair.of("loss").kind == "cuda"
    assert pair.settings == {"device": "cuda", "image_device": "cpu", "text_device": "cuda"}
    assert pair_of(device_of("mps"), CPU, "cpu").of("loss").kind == "cpu"
    assert not pair.is_cpu
    assert pair.records_graphs
    assert not pair.is_deterministic
    assert BOTH.is_deterministic
