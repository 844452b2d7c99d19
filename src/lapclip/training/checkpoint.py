"""Checkpoints, atomic, checked and complete; and models as files.

A checkpoint is a folder `step-00000120` with the weights and the optimiser's state as safetensors, and state.json with
the position of the run and the SHA-256 of each file. It is written under another name, flushed to disk and renamed, so
that a folder of that name is whole; the checksums catch what happens to it later. A step that is saved again, as by a
pause right after a checkpoint, replaces its folder, which is `step-00000120.before` until the new one has its name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from lapclip import paths, weights
from lapclip.embedder import Embedder
from lapclip.errors import CheckpointError, first_line
from lapclip.model.clip import CLIP
from lapclip.model.freezing import load_trainable_state, merged_state, trainable_state
from lapclip.paths import digest_of_file, digest_of_json
from lapclip.suggest import command
from lapclip.training.recovery import cause_of

CHECKPOINTS = 2
"""How many a run has: the newest, and the one before it."""
BEST = {"best_score": float, "best_step": int}
"""What of a run's progress is about its best model."""
ABOUT = "lapclip"
"""The entry of a weights file that says of which step it is."""
BEFORE = ".before"
"""Ends the name of a checkpoint whose step is being saved again."""
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"


@dataclass(frozen=True)
class Progress:
    """How far a run has come. With the weights, the optimiser and run.toml this is all that training depends on."""

    step: int = 0
    training_seconds: float = 0.0
    best_score: float = -1.0
    best_step: int = 0
    """The first step with the best score, whose model is kept."""


def save_checkpoint(
    folder: Path,
    model: CLIP,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Path:
    """Write a checkpoint, then remove the ones it replaces. If it cannot be written, the earlier ones stay.

    `others` are tensors beside the optimiser's that a step depends on.
    """
    final = folder / f"step-{progress.step:08d}"
    before = final.with_suffix(BEFORE)
    partial = paths.hidden_path(final)
    try:
        for stale in folder.glob(
            ".step-*.partial"
        ):  # what a killed process had begun; the run's lock makes this safe
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir(parents=True)
        save_tensors(trainable_state(model), partial / WEIGHTS)
        save_tensors({**_optimizer_tensors(model, optimizer), **others}, partial / OPTIMIZER)
        paths.flush(partial / WEIGHTS)
        paths.flush(partial / OPTIMIZER)
        body = {
            "progress": asdict(progress),
            "sha256": {name: digest_of_file(partial / name) for name in (WEIGHTS, OPTIMIZER)},
        }
        text = json.dumps({"body": body, "sha256": digest_of_json(body)})
        (partial / STATE).write_text(text, encoding="utf-8")
        paths.flush(partial / STATE)
        paths.flush(partial)
        if (
            final.exists()
        ):  # no system renames onto a folder that is not empty, and Windows onto none
            if before.exists():
                paths.remove_whole(before)
            paths.replace(
                final, before
            )  # still listed, so that there is a whole one at every moment
        try:
            paths.replace(partial, final)
        except OSError:
            if before.exists():
                paths.replace(before, final)
            raise
        paths.flush(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _cannot_write(final, error) from error
    keep_newest(folder, CHECKPOINTS)
    return final


def keep_newest(folder: Path, count: int) -> None:
    """Remove all checkpoints but the newest ones, and what a second save of a step replaced."""
    found = list_checkpoints(folder)
    replaced = [path for path in found if path.suffix == BEFORE and path.with_suffix("") in found]
    whole = [path for path in found if path not in replaced]
    for old in [*replaced, *whole[:-count]]:
        with suppress(OSError):  # what another program holds goes at the next save
            paths.remove_whole(old)


def save_model(embedder: Embedder, folder: Path, progress: Progress | None = None) -> None:
    """Write a model so that `load` reads it. Additions of low rank become part of its weights.

    With `progress` its weights say of which step they are and how well they scored: a run may be killed before the
    checkpoint that records it.
    """
    best = {name: getattr(progress, name) for name in BEST} if progress else None
    description = json.dumps(embedder.description(), indent=1)
    try:
        folder.mkdir(exist_ok=True)
        paths.sweep(folder)
        paths.write_atomic(
            folder / weights.WEIGHTS,
            lambda path: save_tensors(merged_state(embedder.model), path, best),
            durable=True,
        )
        paths.write_atomic(folder / weights.CONFIG, description, durable=True)
    except OSError as error:
        raise _cannot_write(folder, error) from error


def with_best_of(progress: Progress, folder: Path) -> Progress:
    """The progress of a checkpoint, with what the best model itself says of its step and score: a run that was killed
    between the two goes on from an older checkpoint than its model. A model that is gone is no best one."""
    if not (folder / weights.WEIGHTS).exists():
        return replace(progress, **{name: getattr(Progress(), name) for name in BEST})
    try:
        paths.check_plain(folder / weights.WEIGHTS)
        with safe_open(folder / weights.WEIGHTS, "numpy") as file:
            said = json.loads((file.metadata() or {})[ABOUT])
        best = {name: kind(said[name]) for name, kind in BEST.items()}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):  # damaged
        return progress
    return replace(progress, **best)


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest last."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def load_newest(
    folder: Path,
    model: CLIP,
    optimizer: torch.optim.Optimizer,
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> tuple[Progress | None, list[str]]:
    """Restore the newest good checkpoint. Damaged ones are skipped; what was wrong with each comes back too.

    Damaged ones are renamed once a good one is found, so that they do not count among the two that are kept.
    """
    damaged: dict[Path, str] = {}
    for path in reversed(list_checkpoints(folder)):
        try:
            progress = _load(path, model, optimizer, others)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            RuntimeError,
            SafetensorError,
            CheckpointError,
        ) as error:
            if cause_of(error) is not None:  # no room for it, or no device: that is no damage
                raise
            damaged[path] = f"{path.name}: {first_line(error)}"
            continue
        for bad in damaged:
            with suppress(OSError):  # Windows leaves a folder alone that another program looks into
                shutil.rmtree(bad.with_name(f"damaged-{bad.name}"), ignore_errors=True)
                paths.replace(bad, bad.with_name(f"damaged-{bad.name}"))
        return progress, list(damaged.values())
    return None, list(damaged.values())


def save_tensors(
    tensors: dict[str, torch.Tensor], path: Path, about: Mapping[str, Any] | None = None
) -> None:
    """Write tensors to a file, with plain data about them; a full disk is an OSError."""
    # One entry: safetensors writes several in any order.
    metadata = ({ABOUT: json.dumps(about)},) if about else ()
    try:
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            path,
            *metadata,
        )
    except SafetensorError as error:  # its own name for a full disk
        raise OSError(f"{error}") from error
    path.chmod(
        path.parent.stat().st_mode & 0o666
    )  # safetensors makes files that only their owner can read


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    return CheckpointError(
        f"Cannot write {path}: {error.strerror or error}. What was saved before is kept.",
        hint=f"free some disk space, then {command('resume', run.name)}",
    )


def _load(
    path: Path, model: CLIP, optimizer: torch.optim.Optimizer, others: Mapping[str, torch.Tensor]
) -> Progress:
    saved = paths.read_json(path / STATE)
    body = saved["body"]
    if saved["sha256"] != digest_of_json(body):
        raise CheckpointError(f"{STATE} was altered")
    for name, digest in body["sha256"].items():
        if digest_of_file(path / name) != digest:
            raise CheckpointError(f"{name} is truncated or was altered")
    load_trainable_state(model, load_file(path / WEIGHTS))
    tensors = load_file(path / OPTIMIZER)
    for name, tensor in others.items():
        tensor.copy_(tensors.pop(name))
    _restore_optimizer(model, optimizer, tensors)
    return Progress(**body["progress"])


def _optimizer_tensors(model: CLIP, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's state by the name of the parameter; empty before the first step."""
    return {
        f"{key}/{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _restore_optimizer(
    model: CLIP, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> None:
    named = dict(model.named_parameters())
    fused = {
        parameter: group["fused"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    optimizer.state.clear()
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if not name:  # float16's loss scale, in a run that went on in float32
            continue
        # AdamW counts steps on the CPU, except in its fused form, which wants the count beside the parameter.
        on_device = kind != "step" or fused[named[name]]
        # Copied, because the file's own memory is unaligned, and results may depend on that in the last bit.
        optimizer.state[named[name]][kind] = value.to(
            named[name].device if on_device else "cpu", copy=True
        )
