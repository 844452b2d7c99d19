"""Checkpoints in parts: what FSDP ranks write, any number of ranks and either engine read, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lapclip.config import TrainConfig
from lapclip.machine.cpu import Cpu
from lapclip.model.clip import CLIP
from lapclip.training.checkpoint import (
    Progress,
    load_newest,
    optimizer_tensors,
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


def test_nothing_in_a_checkpoint_of_parts_is_a_pickle(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, train_and_save, "fsdp", tmp_path)
    names = sorted(path.name for path in tmp_path.glob("step-*/*"))
    assert [name.rpartition(".")[2] for name in names] == ["safetensors", "safetensors", "json"]
