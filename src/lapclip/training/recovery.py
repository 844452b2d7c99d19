"""What happens when training fails: the whole policy, and the code that acts on it.

    failure             what is tried                     how often                  recorded
    out of memory       half the micro-batch              until it is one pair       fell_back
    swap                half the micro-batch              until it is one pair,      fell_back
                                                          then training continues
    missing operation   continue on the CPU               once                       fell_back
    device error        continue on the CPU               once                       fell_back
    float16 overflow    skip the update; the loss scale   30 updates in a row,       step without
                        is halved                         then as not a number       gradient norms
    loss or gradient    nothing: the run ends, and the    -                          failed
    is not a number     checkpoint before it is kept
    anything else       nothing: the run ends             -                          failed

With several ranks nothing is tried in the process: it ends, and torchrun starts all ranks again, as
often as its --max-restarts. If memory ran out on one, `ranks_in_a_run.halve_after_memory` halves the
micro-batch of all. If others are gone, `save_after_loss` there saves first.

A smaller micro-batch gives the same result in less memory. After each change the model and its
optimizer are built again and the newest checkpoint is loaded, so the run continues exactly as a run
that is resumed after the failure.
"""

from __future__ import annotations

import errno
import gc
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lapclip.config import Config, TrainConfig
from lapclip.errors import ConfigError, LapclipError, OutOfMemory, TrainingError
from lapclip.machine.choose_device import device_of
from lapclip.machine.cpu import Cpu
from lapclip.runs import events
from lapclip.runs.events import mapping
from lapclip.training.memory import describe, predict_bytes

if TYPE_CHECKING:
    from lapclip.training.final_scores import FinalScores
    from lapclip.training.step import StepMetrics
    from lapclip.training.trainer import Trainer

MEMORY, SWAP, OPERATION, DEVICE = "out of memory", "swap", "missing operation", "device error"
MAX_OVERFLOWS = 30  # updates in a row; by then the loss scale has fallen by 2^30
MAX_MESSAGE_LENGTH = 160  # characters of an error that are quoted in a sentence

# Parts of the messages of torch and of the system, in lower case.
OUT_OF_MEMORY = (
    "out of memory",  # CUDA, XPU, MPS ("MPS backend out of memory"), and CUDA's own error of that name
    "can't allocate memory",  # torch's allocator for the CPU on Linux and macOS
    "not enough memory",  # the same on Windows
    "cannot allocate memory",  # the system's own message
    "bad_alloc",  # a C++ library's
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED and its relatives: a library got no memory for itself
    "out_of_device_memory",  # XPU's runtime
    "out_of_host_memory",
    "could not create a primitive",  # oneDNN's only message for it, seen under a limit
    "invalid buffer size",  # MPS, for a single tensor that is larger than it can have
)
NO_SUCH_OPERATION = (
    "not currently implemented for the mps device",
    "not implemented for",
    "not supported on",
    "doesn't support float64",
    "could not run 'aten::",  # torch's dispatcher: no kernel for the device
    "mps: unsupported",
)
FAILED_DEVICE = (
    "cuda error",
    "cuda driver error",
    "device-side assert",
    "cublas_status",
    "cudnn_status",
    "cudnn error",
    "cusolver error",
    "illegal memory access",
    "xpu error",
    "ur_result_error",
    "level-zero",
    "sycl",
)
MPS = re.compile(r"\bmps\b")  # any other complaint of MPS
# Where in torch's source the CPU's allocator failed, which means nothing to a user.
ENFORCED = re.compile(r"^\[enforce fail at [^\]]*\] .*?\. (?=\w)")


class SwapGrew(Exception):
    """The system swaps because of this process. Raised between steps, when the state is complete."""


@dataclass(frozen=True)
class Change:
    """A change of settings after a failure."""

    cause: str
    settings: dict[str, Any]
    """Settings of `train` that change."""
    text: str
    """A sentence for the user."""


def cause_of(error: BaseException) -> str | None:
    """Return the kind of failure, or None if no change of settings would help.

    Looks at the error and at those that led to it. Running out of memory often causes a second
    error, for example of the device when a CUDA graph is ended, so it takes precedence.
    """
    chain = list(_chain(error))
    if any(isinstance(link, LapclipError) for link in chain):
        return None  # already explained
    causes = {_cause(link) for link in chain}
    for kind in (SWAP, MEMORY, OPERATION, DEVICE):  # the first one explains the others
        if kind in causes:
            return kind
    return None


def decide(error: BaseException, train: TrainConfig, step: int) -> Change | None:
    """Return what to change after a failure in a step, or None if nothing would help."""
    cause = cause_of(error)
    if cause in (MEMORY, SWAP):
        return _halve(cause, error, train, step)
    device = device_of(train.device)
    if cause is None or device.is_cpu:
        return None
    what = "lacks an operation" if cause == OPERATION else "failed"
    text = f"{device.kind} {what} at step {step:,} ({brief(error)}); the CPU takes over"
    # float32 and torch's own kernels work on every CPU, and are as exact as those of the device.
    settings = {
        "device": Cpu.kind,
        "dtype": "float32",
        "compile": "none",
        "image_attention": "fused",
        "text_attention": "fused",
        "linear": "torch",
    }
    changed = {name: value for name, value in settings.items() if getattr(train, name) != value}
    return Change(cause, changed, text)


def is_out_of_memory(message: str) -> bool:
    """Return whether a message says that memory ran out."""
    return any(phrase in message.lower() for phrase in OUT_OF_MEMORY)


def half_micro_batch(train: TrainConfig) -> int | None:
    """Return half the micro-batch, or None if it is one pair already."""
    now = min(train.micro_batch or train.batch_size, train.batch_size)
    return now // 2 if now > 1 else None


def brief(error: BaseException) -> str:
    """Return the first line of an error, short enough for a sentence."""
    lines = ENFORCED.sub("", str(error).strip()).splitlines()
    first = (lines[0] if lines else type(error).__name__).rstrip(".")
    if len(first) <= MAX_MESSAGE_LENGTH:
        return first
    return f"{first[: MAX_MESSAGE_LENGTH - 3]}..."


def changes_so_far(events_so_far: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of `train` that were changed after failures. A resumed run keeps them."""
    changes: dict[str, Any] = {}
    for event in events_so_far:
        if event["type"] == "fell_back":
            changes |= mapping(event.get("change"))
    return changes


class NumberCheck:
    """Ends a run whose loss or gradient is not a number; tolerates some overflows of float16."""

    def __init__(self) -> None:
        self._overflows = 0

    def reset(self) -> None:
        """Forget overflows: the steps are computed again."""
        self._overflows = 0

    def overflowed(self, metrics: StepMetrics, trainer: Trainer, step: int) -> bool:
        """Return whether the update was skipped because float16 overflowed. Raise if the run must end."""
        is_finite = math.isfinite(metrics.grad_norm)
        overflow = trainer.config.train.dtype == "float16" and not is_finite
        self._overflows = self._overflows + 1 if overflow else 0
        if not math.isfinite(metrics.loss):
            raise _not_a_number("loss", trainer, step)
        if self._overflows > MAX_OVERFLOWS or not (is_finite or overflow):
            raise _not_a_number("gradient", trainer, step)
        return overflow


def _not_a_number(what: str, trainer: Trainer, step: int) -> TrainingError:
    train = trainer.config.train
    gentler = f"train.learning_rate={train.learning_rate / 4:g}"
    if train.optimizer == "muon" and train.matrix_rate > TrainConfig().matrix_rate:
        gentler = f"train.matrix_rate={TrainConfig().matrix_rate:g}"
    if train.dtype == "float16":
        gentler = "train.dtype=float32"
    return TrainingError(
        f"The {what} is not a number at step {step} of {trainer.run.path}; the checkpoint before "
        "it is kept. Resuming would end the same way.",
        hint=f"a new run: {trainer.run.train_again(gentler)}",
    )


@contextmanager
def explain_memory(config: Config) -> Iterator[None]:
    """Explain memory that runs out before the first step, when there is no run to return to."""
    try:
        yield
    except Exception as error:
        if cause_of(error) != MEMORY:
            raise
        half = half_micro_batch(config.train)
        hint = "a smaller model"
        if half:
            hint = f"--set train.micro_batch={half}, which gives the same result"
        raise ConfigError(
            f"{config.model.name} ran out of memory before its first step ({brief(error)}).",
            hint=hint,
        ) from error


def train_with_recovery(trainer: Trainer) -> FinalScores | None:
    """Train to the end and return the final scores. None if the run was stopped."""
    while True:
        try:
            return trainer.train()
        except Exception as error:
            change = _change_after(error, trainer)
            if change.cause == DEVICE:
                # The error's frames hold memory of the device, which can be neither trusted nor freed.
                trainer.device.abandon(error, trainer.step, trainer.embedder, trainer.pending)
            else:
                _save_if_complete(trainer)
        # Here the error is gone, and with it the tensors that its traceback held.
        try:
            _apply(change, trainer)
        except Exception as error:
            if cause_of(error) == MEMORY:
                raise _out_of_memory(error, trainer) from error
            raise


def _change_after(error: Exception, trainer: Trainer) -> Change:
    """Return what to change, or raise the error, explained if possible."""
    change = trainer.decide(error)
    if change is not None:
        return change
    if cause_of(error) == SWAP:
        trainer.swap_watch = None
        return Change(SWAP, {}, f"{error}; micro_batch is 1 already, so the run goes on, slowly")
    if cause_of(error) == MEMORY:
        raise _out_of_memory(error, trainer) from error
    raise error


def _save_if_complete(trainer: Trainer) -> None:
    """Save the state in memory if all of it belongs to the last complete step."""
    if trainer.step.touched or trainer.is_saved():
        return
    trainer.step.optimizer.zero_grad(set_to_none=True)
    # There may be no memory for it. Then the newest checkpoint has to do.
    with suppress(Exception):
        trainer.save()


def _apply(change: Change, trainer: Trainer) -> None:
    """Build the model again with other settings, load the newest checkpoint, and record the change."""
    device = trainer.device
    trainer.drop_model()
    gc.collect()
    if change.cause != DEVICE:
        device.release_memory()
    trainer.rebuild(change.settings)
    skipped = trainer.load_newest() or []
    step = trainer.progress.step
    damaged = "".join(f"; skipped a damaged checkpoint, {reason}" for reason in skipped)
    trainer.log.append(
        events.FellBack(
            step=step,
            cause=change.cause,
            change=change.settings,
            devices=trainer.step.model.tower_devices(),
            text=f"{change.text}; going on after step {step:,}{damaged}",
        )
    )


def _out_of_memory(error: BaseException, trainer: Trainer) -> OutOfMemory:
    """Explain, with numbers, that memory ran out and nothing more can be halved."""
    train, model, run = trainer.config.train, trainer.config.model, trainer.run
    caption_tokens = trainer.plan.batch(1).tokens_BL.shape[1]
    parts = predict_bytes(model, train, caption_tokens)
    micro_batch = train.micro_batch or train.batch_size
    free = ""
    with suppress(Exception):  # a missing number is better than another error
        free = f", {trainer.device.free_bytes() / 1e9:.1f} GB were free on {trainer.device.kind}"
    return OutOfMemory(
        f"Out of memory at step {trainer.progress.step + 1:,} of {run.path}, with micro_batch "
        f"{micro_batch:,} ({brief(error)}). {model.name} needs about {describe(parts)}{free}.",
        hint=f"close other programs and {run.resume_command()}; or a new run, which takes longer: "
        f"{run.train_again('train.recompute=true')}",
    )


def _halve(cause: str, error: BaseException, train: TrainConfig, step: int) -> Change | None:
    half = half_micro_batch(train)
    if half is None:
        return None
    now = min(train.micro_batch or train.batch_size, train.batch_size)
    what = "out of memory" if cause == MEMORY else "the system began to swap"
    text = (
        f"{what} at step {step:,} ({brief(error)}); micro_batch {now:,} becomes {half:,}, "
        "the result stays the same"
    )
    return Change(cause, {"micro_batch": half}, text)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and what it arose from."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _cause(error: BaseException) -> str | None:
    if isinstance(error, SwapGrew):
        return SWAP
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return MEMORY
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return MEMORY
    if not isinstance(error, RuntimeError | TypeError):  # NotImplementedError is a RuntimeError
        return None
    message = str(error).lower()
    if is_out_of_memory(message):
        return MEMORY
    lacks_operation = any(phrase in message for phrase in NO_SUCH_OPERATION)
    if lacks_operation or isinstance(error, NotImplementedError):
        return OPERATION
    # Older releases of torch have no class of its own for a device's errors.
    accelerator = getattr(torch, "AcceleratorError", None)
    if accelerator is not None and isinstance(error, accelerator):
        return DEVICE
    failed = any(phrase in message for phrase in FAILED_DEVICE) or MPS.search(message)
    return DEVICE if isinstance(error, RuntimeError) and failed else None
