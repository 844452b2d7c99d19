"""Whole runs in which memory runs out or the device fails, at chosen moments, with torch's own errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lapclip.commands.resume import resume
from lapclip.errors import ConfigError, TrainingError
from lapclip.machine import system_memory
from lapclip.machine.adamw import AdamW
from lapclip.machine.choose_device import choose_device
from lapclip.machine.gpus import Cuda
from lapclip.model.towers import ImageTower
from lapclip.runs.events import read_events
from lapclip.runs.folder import Run, find_run
from lapclip.training import run_parts, trainer
from lapclip.training.objectives import Objectives
from lapclip.training.recovery import DEVICE, OPERATION
from lapclip.training.request import Callbacks

from ..conftest import SMALL, lapclip, set_flags
from ..second_device import pretend
from ..small_runs import events, losses, stop_after, train, train_small


def close_to(wanted: dict[int, float]) -> dict:
    """Equal up to the rounding of sums in another order, which grows over the steps."""
    return {number: pytest.approx(loss, rel=2e-5) for number, loss in wanted.items()}


def no_memory(*_: object) -> None:
    """Fails as torch's allocator does, because it does."""
    torch.empty(1 << 50)


def failing(
    real: Callable, *at: int, fail: Callable = no_memory, counts: Callable = lambda: True
) -> Callable:
    """A function that fails at some of the calls that count."""
    calls = iter(range(1, 10**6))

    def call(*arguments, **options):
        if counts() and next(calls) in at:
            fail(*arguments)
        return real(*arguments, **options)

    return call


class FailsInBackward(torch.autograd.Function):
    """The loss itself, but its backward pass runs out of memory."""

    @staticmethod
    def forward(ctx, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        no_memory()


@pytest.fixture(scope="module")
def whole(trained: Path) -> dict[int, float]:
    return {
        event["step"]: event["loss"]
        for event in read_events(trained / "events.jsonl")
        if event["type"] == "step"
    }


@pytest.fixture
def undisturbed(here: Path, whole: dict[int, float]) -> dict[int, float]:
    """The losses of a run in which nothing happens."""
    return whole


def fail_in_forward(patch: pytest.MonkeyPatch, *at: int) -> None:
    patch.setattr(
        ImageTower, "forward", failing(ImageTower.forward, *at, counts=torch.is_grad_enabled)
    )


def fail_in_evaluation(patch: pytest.MonkeyPatch, *at: int) -> None:
    forward = failing(ImageTower.forward, *at, counts=torch.is_inference_mode_enabled)
    patch.setattr(ImageTower, "forward", forward)


def fail_in_backward(patch: pytest.MonkeyPatch, at: int) -> None:
    real, calls = Objectives.loss, iter(range(1, 1000))

    def sometimes(*arguments):
        loss = real(*arguments)
        if next(calls) == at:
            return replace(loss, total=FailsInBackward.apply(loss.total))
        return loss

    patch.setattr(Objectives, "loss", sometimes)


def fail_in_update(patch: pytest.MonkeyPatch, *at: int) -> None:
    def spoil(optimizer: torch.optim.AdamW, *_: object) -> None:
        for group in optimizer.param_groups:
            group["params"][0].data.add_(1.0)
        no_memory()

    patch.setattr(AdamW, "step", failing(AdamW.step, *at, fail=spoil))


ONCE = [*range(1, 13)]


@pytest.mark.parametrize(
    ("fail", "calls", "fell_back", "steps"),
    [
        (fail_in_forward, [5], [(4, 8)], ONCE),  # nothing that was done is lost, or done twice
        (fail_in_forward, [5, 6], [(4, 8), (4, 4)], ONCE),
        (fail_in_backward, [7], [(6, 8)], ONCE),
        # From the newest checkpoint: the state in memory may not belong to the last step.
        (fail_in_evaluation, [2], [(4, 8)], [*range(1, 9), *range(5, 13)]),
        (fail_in_update, [7], [(4, 8)], [*range(1, 6), *range(5, 13)]),
    ],
)
def test_out_of_memory_halves_the_micro_batch_and_keeps_the_result(
    undisturbed: dict,
    monkeypatch: pytest.MonkeyPatch,
    fail: Callable[..., None],
    calls: list[int],
    fell_back: list[tuple[int, int]],
    steps: list[int],
) -> None:
    fail(monkeypatch, *calls)
    outcome = train_small("train.checkpoint_every_epochs=1")
    assert outcome.state == "finished"
    found = events("fell_back")
    assert [(event["step"], event["change"]["micro_batch"]) for event in found] == fell_back
    assert {event["cause"] for event in found} == {"out of memory"}
    assert "micro_batch 16 becomes 8, the result stays the same; going on after" in found[0]["text"]
    assert found[0]["text"] in Path("runs/run/log.txt").read_text()
    assert [event["step"] for event in events("step")] == steps
    assert events("evaluation")[-1]["step"] == 12
    first = fell_back[0][0]
    before = {number: loss for number, loss in losses().items() if number <= first}
    assert before == {number: undisturbed[number] for number in before}
    assert losses() == close_to(undisturbed)


def test_what_failed_is_gone_before_it_is_built_again(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be no room for two models."""
    real, models = run_parts.build, []

    def build(*arguments):
        assert [model() for model in models] == [None] * len(models)
        step, embedder = real(*arguments)
        models.append(weakref.ref(step.model))
        return step, embedder

    for module in (run_parts, trainer):
        monkeypatch.setattr(module, "build", build)
    monkeypatch.setattr(
        ImageTower, "forward", failing(ImageTower.forward, 5, 6, counts=torch.is_grad_enabled)
    )
    train_small()
    assert len(models) == 3
    train_small("train.dtype=bfloat16", name="half", callbacks=stop_after(3))
    models.clear()
    monkeypatch.setattr(
        ImageTower, "forward", failing(ImageTower.forward, 2, counts=torch.is_grad_enabled)
    )
    resume("half")
    assert len(models) == 2


def test_out_of_memory_before_the_first_step_is_explained(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_parts, "make_step", no_memory)
    with pytest.raises(
        ConfigError,
        match=r"tiny ran out of memory before its first step .*\n.*train\.micro_batch=8",
    ):
        train_small()
    assert Run(Path("runs/run")).never_began


def test_one_pair_at_a_time_ends_with_the_figures(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ImageTower,
        "forward",
        failing(ImageTower.forward, *range(1, 100), counts=torch.is_grad_enabled),
    )
    message = r"at step 1 of .*with micro_batch 1 .*about 0\.4 GB.*were free on cpu"
    with pytest.raises(TrainingError, match=message) as caught:
        train_small("train.steps=3")
    assert len(str(caught.value).splitlines()) == 2
    assert [event["change"]["micro_batch"] for event in events("fell_back")] == [8, 4, 2, 1]
    assert find_run("run").state == "failed"
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert resume("run").state == "finished"


class Killed(BaseException):
    """What kill -9 does: no handler runs."""


def test_a_run_killed_after_a_fallback_resumes_to_the_same_losses_bit_for_bit(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Path("runs/run/run.toml")
    for name in ("whole", "run"):
        with monkeypatch.context() as patched:
            patched.setattr(
                ImageTower, "forward", failing(ImageTower.forward, 6, counts=torch.is_grad_enabled)
            )

            def kill(event, name: str = name) -> None:
                if name == "run" and event.type == "step" and event.step == 9:
                    raise Killed

            if name == "whole":
                train_small(name=name)
            else:
                with pytest.raises(Killed):
                    train_small(name=name, callbacks=Callbacks([kill]))
    began_with = settings.read_text()
    assert resume("run").state == "finished"
    assert losses("run") == losses("whole")
    assert [event["step"] for event in events("resumed")] == [
        5
    ]  # the state that was good is on disk
    assert settings.read_text() == began_with
    assert "micro_batch = 0" in began_with


@pytest.mark.parametrize(
    ("error", "cause", "dtype"),
    [
        (NotImplementedError("The operator 'aten::x' is not currently implemented for the MPS device."), OPERATION,
         "float32"),
        (RuntimeError("CUDA error: device-side assert triggered"), DEVICE, "float16"),
    ],
    ids=[OPERATION, DEVICE],
)  # fmt: skip
def test_a_device_that_fails_is_left_for_the_cpu_from_the_newest_checkpoint(
    here: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, cause: str, dtype: str
) -> None:
    def break_down(tower: ImageTower, *_: object) -> None:
        if cause == DEVICE:  # nothing in the memory of a device that has failed can be trusted
            for parameter in tower.parameters():
                parameter.data.fill_(torch.nan)
        raise error

    accelerated = [
        setting for setting in SMALL if "device" not in setting and "dtype" not in setting
    ]
    accelerated += ["train.checkpoint_every_epochs=1", f"train.dtype={dtype}"]
    with monkeypatch.context() as patched:
        keep_torch(patched)
        pretend(patched)
        train("first-run", accelerated, name="whole")
        broken = failing(ImageTower.forward, 7, fail=break_down, counts=torch.is_grad_enabled)
        patched.setattr(ImageTower, "forward", broken)

        def stop(event) -> None:
            if event.type == "step" and event.step == 9:
                find_run("run").ask_to_stop()

        train("first-run", accelerated, name="run", callbacks=Callbacks([stop]))
    (fell_back,) = events("fell_back")
    assert fell_back["cause"] == cause
    assert fell_back["change"]["device"] == "cpu"
    assert "xpu" in fell_back["text"]
    # Without the change the run could not be resumed: there is no such accelerator any more.
    outcome = resume("run")
    assert outcome.state == "finished"
    tolerance = 1e-5 if dtype == "float32" else 2e-2  # float16 goes on in float32
    assert losses() == {
        number: pytest.approx(loss, rel=tolerance) for number, loss in losses("whole").items()
    }


def keep_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process have its accelerator back after the test."""
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", torch.accelerator.current_accelerator
    )
    monkeypatch.setattr(torch.cuda, "is_available", torch.cuda.is_available)


def test_a_failed_device_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch asks of CUDA in each optimiser step, even on the CPU, would raise the device's error again."""

    def dead(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    keep_torch(monkeypatch)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "current_stream", dead)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", dead)
    weight = torch.ones(3, requires_grad=True)
    weight.sum().backward()
    optimizer = torch.optim.AdamW([weight], fused=True)
    with pytest.raises(RuntimeError, match="device-side assert"):
        optimizer.step()
    Cuda().abandon()
    optimizer.step()
    assert choose_device("auto")[0].is_cpu


def test_a_missing_operation_on_the_cpu_itself_is_a_fault(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lack(*_: object) -> None:
        torch.linalg.cholesky(torch.ones(3, 3, dtype=torch.half))

    monkeypatch.setattr(
        ImageTower,
        "forward",
        failing(ImageTower.forward, 5, fail=lack, counts=torch.is_grad_enabled),
    )
    with pytest.raises(NotImplementedError, match="not implemented for 'Half'"):
        train_small()
    assert find_run("run").state == "failed"


def growing_swap(monkeypatch: pytest.MonkeyPatch, *, own: bool) -> None:
    """A system whose swap grows by a fifth of memory between any two looks, for us or for others."""
    share = system_memory.total_bytes() // 5 + (2 << 30)
    monkeypatch.setattr(system_memory, "EVERY_SECONDS", 0.0)
    readings, sizes = iter(range(0, 1000 * share, share)), iter(range(0, 1000 * share, share))
    monkeypatch.setattr(system_memory, "swap_bytes", lambda: next(readings))
    monkeypatch.setattr(system_memory, "held_bytes", lambda: next(sizes) if own else 0)


def test_growing_swap_halves_the_micro_batch_once_for_each_look_and_never_ends_a_run(
    undisturbed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing_swap(monkeypatch, own=True)
    train_small()
    fell_back = events("fell_back")
    assert [event["cause"] for event in fell_back] == ["swap"] * 5
    assert [event["change"] for event in fell_back] == [
        {"micro_batch": size} for size in (8, 4, 2, 1)
    ] + [{}]
    assert "the system began to swap at step 2 (swap has grown by" in fell_back[0]["text"]
    assert "micro_batch is 1 already" in fell_back[-1]["text"]
    assert [event["step"] for event in events("step")] == list(range(1, 13))
    assert losses() == close_to(undisturbed)


def test_swap_that_grows_for_other_programs_changes_nothing(
    undisturbed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing_swap(monkeypatch, own=False)
    train_small()
    assert not events("fell_back")
    assert losses() == undisturbed


def test_a_model_too_large_for_memory_is_refused_before_anything_is_built(here: Path) -> None:
    """Real memory, and a model of 1.2 trillion parameters."""
    large = ["model.image_width=65536", "model.image_layers=24", "model.image_heads=64"]
    done = lapclip("train", "--json", *set_flags(*SMALL, *large))
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert "tiny with 16 pairs at once needs about 19,8" in error
    assert "GB are free on cpu, and one pair at once does not fit either." in error
    assert "Try: " in error
    assert Run(Path("runs/first-run")).never_began


CUDA_RUN = """
import sys, torch
from lapclip.commands.train import train
from lapclip.model.towers import ImageTower
from lapclip.runs.folder import TrainRequest
real, calls, what = ImageTower.forward, iter(range(1, 10**6)), sys.argv[1]

def failing(self, pixels):
    if torch.is_grad_enabled() and next(calls) == int(sys.argv[2]):
        if what == "assert":
            torch.zeros(2, device="cuda")[torch.tensor([7], device="cuda")]
            torch.cuda.synchronize()
        if what == "memory":
            torch.empty(1 << 45, device="cuda")
    return real(self, pixels)

ImageTower.forward = failing
outcome = train(TrainRequest("first-run", tuple(sys.argv[3:])), name="run")
assert outcome.state == "finished", outcome
print(outcome.places)
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA device is needed to fail")
@pytest.mark.parametrize("what", ["assert", "memory"])
@pytest.mark.parametrize("how", ["none", "graph"])
def test_a_real_cuda_device_that_fails(here: Path, what: str, how: str) -> None:
    """In a process of its own: after a device-side assert CUDA cannot be used any more in that process."""
    settings = [setting for setting in SMALL if "device" not in setting]
    settings += ["train.device=cuda", f"train.compile={how}", "train.checkpoint_every_epochs=1"]
    train("first-run", settings, name="whole")
    call = {"none": 7, "graph": 4}[
        how
    ]  # after the checkpoint of an epoch of 4 steps, and while recording
    done = subprocess.run(
        [sys.executable, "-c", CUDA_RUN, what, str(call), *settings],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    (fell_back,) = events("fell_back")
    (finished,) = events("finished")
    if what == "assert":
        assert fell_back["change"]["device"] == "cpu"
        after = {"step": fell_back["step"] + 1, "image": "cpu", "text": "cpu"}
        before = [{"step": 1, "image": "cuda", "text": "cuda"}] if fell_back["step"] else []
        assert finished["places"] == [*before, after]
        assert fell_back["step"] == {"none": 4, "graph": 0}[how]
    else:
        assert fell_back["change"] == {"micro_batch": 8}
        assert finished["places"] == [{"step": 1, "image": "cuda", "text": "cuda"}]
    assert losses() == {
        number: pytest.approx(loss, rel=1e-3) for number, loss in losses("whole").items()
    }
