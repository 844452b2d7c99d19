"""Checkpoints in parts: what FSDP ranks write, any number of ranks and either engine read, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lapclip.config import TrainConfig
from lapclip.errors import CheckpointError
from lapclip.machine.cpu import Cpu
from lapclip.model.clip import CLIP
from lapclip.training.checkpoint import (
    Progress,
    load_newest,
    optimizer_tensors,
    refuse_missing_parts,
    save_checkpoint,
)
from lapclip.training.distributed import Ranks, local_part, own_part, shard_towers, whole
from lapclip.training.optimizer import make_optimizer
from tests.rank_pool import RankPool
from tests.training.test_distributed import SHAPE

TRAIN = TrainConfig(optimizer="muon", learning_rate=0.01, steps=3)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    made = RankPool(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


def make_training(ranks: Ranks, engine: str, seed: int) -> tuple[CLIP, torch.optim.Optimizer]:
    model = CLIP(SHAPE, seed=seed)
    if engine == "fsdp":
        shard_towers(model, ranks, None, torch.float32)
    return model, make_optimizer(model, TRAIN, Cpu())


def whole_state(model: CLIP, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {**dict(model.named_parameters()), **optimizer_tensors(model, optimizer)}
    return {name: whole(tensor.detach()).clone() for name, tensor in tensors.items()}


def train_and_save(ranks: Ranks, engine: str, folder: Path) -> dict[str, Tensor]:
    """Take two steps with drawn gradients, save, and return all tensors."""
    model, optimizer = make_training(ranks, engine, seed=0)
    draw = torch.Generator().manual_seed(0)
    for _ in range(2):
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=draw)
            parameter.grad = torch.zeros_like(parameter)
            local_part(parameter.grad).copy_(own_part(gradient, parameter))
        optimizer.step()
    progress = Progress(step=2)
    scale = {"loss_scale": torch.tensor([2.0, 5.0])}
    save_checkpoint(folder, model, optimizer, progress, scale, ranks)
    return whole_state(model, optimizer)


def load(ranks: Ranks, engine: str, folder: Path) -> tuple[Any, list[str], dict[str, Tensor]]:
    """Return the progress, what was damaged, and all tensors of the newest checkpoint."""
    model, optimizer = make_training(ranks, engine, seed=1)
    scale = {"loss_scale": torch.zeros(2)}
    progress, damaged = load_newest(folder, model, optimizer, scale)
    assert scale["loss_scale"].tolist() == [2.0, 5.0], damaged
    return progress, damaged, whole_state(model, optimizer)


@pytest.mark.parametrize(
    ("saving", "ranks_saving", "loading", "ranks_loading"),
    [
        ("fsdp", 2, "fsdp", 1),
        ("fsdp", 2, "fsdp", 2),
        ("fsdp", 2, "fsdp", 3),
        ("fsdp", 3, "ddp", 1),
        ("ddp", 1, "fsdp", 2),
    ],
)
def test_any_ranks_read_a_checkpoint_to_the_bit(
    pool: RankPool,
    tmp_path: Path,
    saving: str,
    ranks_saving: int,
    loading: str,
    ranks_loading: int,
) -> None:
    saved = pool.run(ranks_saving, train_and_save, saving, tmp_path)[0]
    assert not list(tmp_path.glob(".*"))
    for progress, damaged, loaded in pool.run(ranks_loading, load, loading, tmp_path):
        assert progress == Progress(step=2)
        assert not damaged
        assert loaded.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(loaded[name], tensor), name


def test_damaged_parts_are_skipped(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, train_and_save, "fsdp", tmp_path)
    part = max(tmp_path.glob("step-*/shard-*.safetensors"))
    part.write_bytes(part.read_bytes()[:-4])
    model = CLIP(SHAPE)
    optimizer = make_optimizer(model, TRAIN, Cpu())
    progress, damaged = load_newest(tmp_path, model, optimizer, {"loss_scale": torch.zeros(2)})
    assert progress is None
    assert damaged == [f"step-00000002: {part.name} is truncated or was altered"]


def full_disk(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def save_on_a_full_disk(ranks: Ranks, folder: Path) -> str:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HuggingFaceStorageWriter, "write_data", full_disk)
        try:
            train_and_save(ranks, "fsdp", folder)
        except CheckpointError as error:
            return error.message
    return ""


def test_a_full_disk_is_said_on_each_rank(pool: RankPool, tmp_path: Path) -> None:
    for message in pool.run(2, save_on_a_full_disk, tmp_path):
        assert "No space left on device (rank 0 on " in message
    assert not list(tmp_path.iterdir())


def test_parts_on_other_disks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "shard-00001-").touch()
    refuse_missing_parts(tmp_path, {"shard-00001-": ""})
    with pytest.raises(CheckpointError, match="disk of another computer"):
        refuse_missing_parts(tmp_path, {"shard-00001-": "", "shard-00002-": ""})


def test_nothing_in_a_checkpoint_of_parts_is_a_pickle(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, train_and_save, "fsdp", tmp_path)
    names = sorted(path.name for path in tmp_path.glob("step-*/*"))
    assert [name.rpartition(".")[2] for name in names] == ["safetensors", "safetensors", "json"]
