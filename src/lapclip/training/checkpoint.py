"""Checkpoints, atomic and checked; and models as files.

A checkpoint is a folder `step-00000120` with the weights and the optimizer's state as safetensors, and
state.json with the position of the run and the SHA-256 of each file. It is written under another name,
flushed to disk and renamed, so a folder of that name is complete; the checksums detect later damage. A
step that is saved again, as by a pause right after a checkpoint, replaces its folder, which is called
`step-00000120.before` until the new one has its name.
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
from lapclip.training.distributed import ALONE, Ranks, is_sharded, whole
from lapclip.training.recovery import cause_of
from lapclip.training.sharded_checkpoint import read_parts, sizes_of_parts, write_parts

CHECKPOINTS = 2  # kept: the newest, and the one before it
BEST = {"best_score": float, "best_step": int}  # fields of a run's progress about its best model
ABOUT = "lapclip"  # metadata of a weights file: the step and the score of the model
BEFORE = ".before"  # suffix of a checkpoint whose step is being saved again
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"


@dataclass(frozen=True)
class Progress:
    """Position of a run. With the weights, the optimizer and run.toml it is all that training depends on."""

    step: int = 0
    training_seconds: float = 0.0
    best_score: float = -1.0
    best_step: int = 0
    """First step with the best score, whose model is kept. 0 before the first evaluation."""


def save_checkpoint(
    folder: Path,
    model: CLIP,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ranks: Ranks = ALONE,
) -> Path | None:
    """Write a checkpoint, then remove the ones it replaces. If it cannot be written, the earlier ones stay.

    `others` are tensors beside the optimizer's that a step depends on. All ranks call this. Returns None on those that
    do not write the run.
    """
    final = checkpoint_path(folder, progress)
    if any(is_sharded(weight) for weight in trainable_state(model).values()):
        _save_in_parts(final, model, optimizer, progress, others, ranks)
        return final if ranks.writes else None
    if not ranks.writes:
        return None
    partial = paths.hidden_path(final)
    try:
        make_partial(partial)
        save_tensors(trainable_state(model), partial / WEIGHTS)
        save_tensors({**optimizer_tensors(model, optimizer), **others}, partial / OPTIMIZER)
        paths.flush(partial / WEIGHTS)
        paths.flush(partial / OPTIMIZER)
        digests = {name: paths.digest_of_file(partial / name) for name in (WEIGHTS, OPTIMIZER)}
        publish(partial, final, progress, digests)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _cannot_write(final, error) from error
    keep_newest(folder, CHECKPOINTS)
    return final


def _save_in_parts(
    final: Path,
    model: CLIP,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    others: Mapping[str, torch.Tensor],
    ranks: Ranks,
) -> None:
    """Write a checkpoint of weights in parts (FSDP), each rank its own part, on a disk that all share.

    The writer adds the manifest when all parts are there.
    """
    partial = paths.hidden_path(final)
    try:
        if ranks.writes:
            make_partial(partial)
        # The others wait for the name, and so for the folder.
        partial = final.with_name(ranks.broadcast_json(partial.name))
        tensors = {**trainable_state(model), **optimizer_tensors(model, optimizer), **others}
        digests = write_parts(partial, tensors, ranks)
        if ranks.writes:
            refuse_missing_parts(partial, digests)
            publish(partial, final, progress, digests)
            keep_newest(final.parent, CHECKPOINTS)
    except OSError as error:
        if ranks.writes:
            shutil.rmtree(partial, ignore_errors=True)
        raise _cannot_write(final, error) from error


def refuse_missing_parts(partial: Path, digests: Mapping[str, str]) -> None:
    """Refuse a checkpoint whose parts lie on disks of other computers: nobody could load it."""
    for name in digests:
        if not (partial / name).exists():
            raise CheckpointError(
                f"{name} of a checkpoint is on the disk of another computer.",
                hint="FSDP needs runs/ on a disk that all computers share",
            )


def checkpoint_path(folder: Path, progress: Progress) -> Path:
    """Return where the checkpoint of a step is."""
    return folder / f"step-{progress.step:08d}"


def make_partial(partial: Path) -> None:
    """Make the folder that a checkpoint is written into, and remove those of killed processes."""
    for stale in partial.parent.glob(".step-*.partial"):  # the lock of the run makes this safe
        shutil.rmtree(stale, ignore_errors=True)
    partial.mkdir(parents=True)


def publish(partial: Path, final: Path, progress: Progress, digests: Mapping[str, str]) -> None:
    """Write the manifest of a checkpoint, and give the folder its name."""
    before = final.with_suffix(BEFORE)
    body = {"progress": asdict(progress), "sha256": dict(digests)}
    text = json.dumps({"body": body, "sha256": digest_of_json(body)})
    (partial / STATE).write_text(text, encoding="utf-8")
    paths.flush(partial / STATE)
    paths.flush(partial)
    # No system renames onto a folder that is not empty, and Windows onto none. The folder of the
    # same step stays listed under another name, so that there is a whole one at every moment.
    if final.exists():
        if before.exists():
            paths.remove_whole(before)
        paths.replace(final, before)
    try:
        paths.replace(partial, final)
    except OSError:
        if before.exists():
            paths.replace(before, final)
        raise
    paths.flush(final.parent)


def keep_newest(folder: Path, count: int) -> None:
    """Remove all checkpoints but the newest, and those that a second save of their step replaced."""
    checkpoints = list_checkpoints(folder)
    replaced = [
        path
        for path in checkpoints
        if path.suffix == BEFORE and path.with_suffix("") in checkpoints
    ]
    others = [path for path in checkpoints if path not in replaced]
    for old in [*replaced, *others[:-count]]:
        with suppress(OSError):  # another program holds it; the next save removes it
            paths.remove_whole(old)


def save_model(
    embedder: Embedder, folder: Path, progress: Progress | None = None, ranks: Ranks = ALONE
) -> None:
    """Write a model so that `load` reads it. Additions of low rank become part of its weights.

    All ranks call this, because each may have a part of the weights, and the writer writes.

    With `progress` its weights say of which step they are and how well they scored: a run may be killed before the
    checkpoint that records it.
    """
    tensors = {}
    if ranks.writes or any(is_sharded(weight) for weight in embedder.model.parameters()):
        tensors = {name: whole(part) for name, part in merged_state(embedder.model).items()}
    if not ranks.writes:
        return
    best = {name: getattr(progress, name) for name in BEST} if progress else None
    description = json.dumps(embedder.description(), indent=1)
    try:
        folder.mkdir(exist_ok=True)
        paths.sweep(folder)
        paths.write_atomic(
            folder / weights.WEIGHTS,
            lambda path: save_tensors(tensors, path, best),
            durable=True,
        )
        paths.write_atomic(folder / weights.CONFIG, description, durable=True)
    except OSError as error:
        raise _cannot_write(folder, error) from error


def with_best_of(progress: Progress, folder: Path) -> Progress:
    """Return the progress of a checkpoint with the step and score that the best model's file names.

    A run that was killed after it saved its best model continues from an older checkpoint. Without
    the file there is no best model.
    """
    if not (folder / weights.WEIGHTS).exists():
        return replace(progress, **{name: getattr(Progress(), name) for name in BEST})
    try:
        paths.check_plain(folder / weights.WEIGHTS)
        with safe_open(folder / weights.WEIGHTS, "numpy") as file:
            saved = json.loads((file.metadata() or {})[ABOUT])
        best = {name: kind(saved[name]) for name, kind in BEST.items()}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):  # damaged
        return progress
    return replace(progress, **best)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest last."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def load_newest(
    folder: Path,
    model: CLIP,
    optimizer: torch.optim.Optimizer,
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> tuple[Progress | None, list[str]]:
    """Restore the newest good checkpoint. Return its progress, and what was wrong with damaged ones.

    Damaged ones are skipped, and renamed once a good one is found, so that they do not count among
    those that are kept.
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
            if cause_of(error) is not None:  # lack of memory or of a device is no damage
                raise
            damaged[path] = f"{path.name}: {first_line(error)}"
            continue
        for bad in damaged:
            with suppress(
                OSError
            ):  # Windows does not rename a folder that another program has open
                shutil.rmtree(bad.with_name(f"damaged-{bad.name}"), ignore_errors=True)
                paths.replace(bad, bad.with_name(f"damaged-{bad.name}"))
        return progress, list(damaged.values())
    return None, list(damaged.values())


def save_tensors(
    tensors: dict[str, torch.Tensor], path: Path, about: Mapping[str, Any] | None = None
) -> None:
    """Write tensors to a file, with `about` as its metadata. Raises OSError if the disk is full."""
    metadata = None
    if about:
        # A single entry: safetensors writes several in random order, and files would differ.
        metadata = {ABOUT: json.dumps(about)}
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(on_cpu, path, metadata)
    except SafetensorError as error:  # how it reports a full disk
        raise OSError(f"{error}") from error
    # safetensors makes files that only their owner can read.
    path.chmod(path.parent.stat().st_mode & 0o666)


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
    in_parts = any(is_sharded(weight) for weight in trainable_state(model).values())
    if in_parts or not (path / WEIGHTS).exists():
        _load_parts(path, model, optimizer, others)
        return Progress(**body["progress"])
    load_trainable_state(model, load_file(path / WEIGHTS))
    tensors = load_file(path / OPTIMIZER)
    for name, tensor in others.items():
        tensor.copy_(tensors.pop(name))
    restore_optimizer(model, optimizer, tensors)
    return Progress(**body["progress"])


def _load_parts(
    path: Path, model: CLIP, optimizer: torch.optim.Optimizer, others: Mapping[str, torch.Tensor]
) -> None:
    """Restore a checkpoint in parts, or into a model in parts."""
    weights = trainable_state(model)
    sizes = sizes_of_parts(path)
    state = {}
    for key in sizes.keys() - weights.keys() - others.keys():
        _, _, name = key.partition("/")
        like = weights.get(name)
        if like is not None and like.shape == sizes[key]:
            state[key] = torch.zeros_like(like, requires_grad=False)
        else:
            state[key] = torch.zeros(sizes[key])
    read_parts(path, {**weights, **others, **state})
    restore_optimizer(model, optimizer, state)


def optimizer_tensors(model: CLIP, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's state by the name of the parameter; empty before the first step."""
    return {
        f"{key}/{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(
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
        if not name:  # float16's loss scale, in a run that continues in float32
            continue
        # AdamW counts steps on the CPU; its fused form counts on the parameter's device.
        on_device = kind != "step" or fused[named[name]]
        # A copy, because the file's memory is unaligned, and results may depend on that in the last bit.
        optimizer.state[named[name]][kind] = value.to(
            named[name].device if on_device else "cpu", copy=True
        )
