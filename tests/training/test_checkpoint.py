from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lapclip import paths, weights
from lapclip.config import TrainConfig
from lapclip.data.dataset import count_seen
from lapclip.data.tokenizers import CharacterTokenizer
from lapclip.embedder import Embedder, load
from lapclip.errors import CheckpointError, LapclipError
from lapclip.machine.cpu import Cpu
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.training import checkpoint
from lapclip.training.checkpoint import (
    Progress,
    list_checkpoints,
    load_newest,
    save_checkpoint,
    save_model,
    with_best_of,
)
from lapclip.training.optimizer import make_optimizer


def trained(seed: int = 0) -> tuple[CLIP, torch.optim.Optimizer]:
    """A model and an optimiser with a step behind them."""
    model = CLIP(SHAPES["tiny"], seed=seed)
    optimizer = make_optimizer(model, TrainConfig(), Cpu())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1 + seed)
    optimizer.step()
    return model, optimizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def test_what_is_saved_comes_back_to_the_bit(folder: Path) -> None:
    model, optimizer = trained()
    progress = Progress(step=7, training_seconds=1.5, best_score=0.25, best_step=5)
    save_checkpoint(folder, model, optimizer, progress)
    other, other_optimizer = trained(seed=1)
    assert load_newest(folder, other, other_optimizer) == (progress, [])
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        saved, loaded = optimizer.state[mine], other_optimizer.state[theirs]
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(saved[key], loaded[key]) for key in saved)


def test_the_last_two_are_kept(folder: Path) -> None:
    for step in (0, 5, 10):
        save_checkpoint(folder, *trained(), Progress(step=step))
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000005", "step-00000010"]
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000005", "step-00000010"]


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncated", "altered", "missing"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(
    folder: Path, name: str, damage: str
) -> None:
    for step in (5, 10):
        save_checkpoint(folder, *trained(), Progress(step=step))
    victim = folder / "step-00000010" / name
    contents = bytearray(victim.read_bytes())
    if damage == "truncated":
        victim.write_bytes(contents[: len(contents) // 2])
    elif damage == "altered":
        contents[len(contents) // 2] ^= 1
        victim.write_bytes(contents)
    else:
        victim.unlink()
    progress, skipped = load_newest(folder, *trained())
    assert progress is not None
    assert progress.step == 5
    assert len(skipped) == 1
    assert skipped[0].startswith("step-00000010")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names there")
def test_pipes_in_a_run_are_refused_and_not_waited_for(folder: Path) -> None:
    model = folder.parent / "model"
    for step in (5, 10, 15, 20):
        save_checkpoint(folder, *trained(), Progress(step=step))
        shutil.copytree(folder / f"step-{step:08d}", folder.parent / f"step-{step:08d}")
    shutil.rmtree(folder)
    for name, step in (
        ("weights.safetensors", 10),
        ("optimizer.safetensors", 15),
        ("state.json", 20),
    ):
        become_pipe(folder.parent / f"step-{step:08d}" / name)
    progress, skipped = soon(lambda: load_newest(folder.parent, *trained()))
    assert progress.step == 5
    assert [(text[:13], "no plain file" in text) for text in skipped] == [
        (f"step-{step:08d}", True) for step in (20, 15, 10)
    ]
    embedder = Embedder(trained()[0], CharacterTokenizer("ab"), Cpu())
    for name in (weights.WEIGHTS, weights.CONFIG):
        save_model(embedder, model, Progress(best_step=3))
        become_pipe(model / name)
        with pytest.raises(LapclipError, match="no plain file"):
            soon(lambda: load(model))
        assert soon(lambda: with_best_of(Progress(), model)).best_step == (
            3 if name == weights.CONFIG else 0
        )
        (model / name).unlink()
    become_pipe(folder.parent / "seen.npy")
    assert soon(lambda: count_seen(np.zeros(1), folder.parent / "seen.npy")) is None


def become_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def soon(call: Callable[[], Any]) -> Any:
    """What a call gives; one that waits for a pipe does not end."""
    answer: Future[Any] = Future()

    def answered() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=answered, daemon=True).start()
    return answer.result(timeout=30)


def test_a_checkpoint_there_is_no_memory_for_is_not_called_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (5, 10):
        save_checkpoint(folder, *trained(), Progress(step=step))
    monkeypatch.setattr(checkpoint, "load_file", lambda path: torch.empty(1 << 50))
    with pytest.raises(RuntimeError, match="allocate"):
        load_newest(folder, *trained())
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000005", "step-00000010"]


def test_altered_progress_is_noticed(folder: Path) -> None:
    save_checkpoint(folder, *trained(), Progress(step=5))
    state = folder / "step-00000005" / "state.json"
    saved = json.loads(state.read_text())
    saved["body"]["progress"]["step"] = 6
    state.write_text(json.dumps(saved))
    assert load_newest(folder, *trained()) == (None, ["step-00000005: state.json was altered"])


def test_a_full_disk_leaves_the_old_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(folder, *trained(), Progress(step=5))

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(paths, "flush", full)
    with pytest.raises(
        CheckpointError, match=r"No space left on device.*kept.*\n.*lapclip resume run"
    ):
        save_checkpoint(folder, *trained(), Progress(step=10))
    monkeypatch.undo()
    assert [path.name for path in folder.iterdir()] == ["step-00000005"]
    assert load_newest(folder, *trained())[0] == Progress(step=5)


def test_all_of_a_checkpoint_is_on_disk_before_it_has_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a folder of that name would else hold files without their content."""
    done: list[tuple[str, Path]] = []
    really_flush, really_replace = paths.flush, paths.replace

    def flush(path: Path) -> None:
        really_flush(path)
        done.append(("flush", path))

    def replace(source: Path, target: Path) -> None:
        files = sorted(source.iterdir())
        assert sorted(path for what, path in done if path.parent == source) == files
        assert done[-1] == ("flush", source)  # the names in it, once all files are there
        really_replace(source, target)
        done.append(("replace", target))

    monkeypatch.setattr(paths, "flush", flush)
    monkeypatch.setattr(paths, "replace", replace)
    final = save_checkpoint(folder, *trained(), Progress(step=5))
    assert final is not None
    assert len(list(final.iterdir())) == 3
    assert done[-2:] == [("replace", final), ("flush", folder)]


def test_checkpoints_hold_no_pickles_and_half_written_ones_do_not_count(folder: Path) -> None:
    path = save_checkpoint(folder, *trained(), Progress(step=5))
    assert path is not None
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    (folder / ".step-00000010.partial").mkdir()
    assert list_checkpoints(folder) == [path]


def test_a_step_saved_twice_is_there_once_and_is_the_later_one(folder: Path) -> None:
    save_checkpoint(folder, *trained(), Progress(step=5))
    save_checkpoint(folder, *trained(), Progress(step=10, best_score=0.1))
    (folder / ".step-00000010.partial").mkdir()  # of a process killed by an earlier release
    (folder / ".step-00000010.partial" / "weights.safetensors").write_text("half")
    save_checkpoint(folder, *trained(), Progress(step=10, best_score=0.2))
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000005", "step-00000010"]
    assert load_newest(folder, *trained()) == (Progress(step=10, best_score=0.2), [])


@pytest.mark.parametrize("moment", range(4))
def test_a_second_save_that_is_killed_anywhere_leaves_a_whole_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """A run may have one checkpoint only: that of the step that is saved again."""
    save_checkpoint(folder, *trained(), Progress(step=10))
    replace, renames = paths.replace, []

    def dying(source: Path, target: Path) -> None:
        if len(renames) == moment:
            raise KeyboardInterrupt
        renames.append(source)
        replace(source, target)
        assert list_checkpoints(folder)

    monkeypatch.setattr(paths, "replace", dying)
    with contextlib.suppress(KeyboardInterrupt):
        save_checkpoint(folder, *trained(), Progress(step=10))
    monkeypatch.undo()
    assert load_newest(folder, *trained()) == (Progress(step=10), [])
    save_checkpoint(folder, *trained(), Progress(step=10))
    assert [path.name for path in folder.iterdir()] == ["step-00000010"]


def test_a_second_save_that_cannot_take_its_name_leaves_the_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(folder, *trained(), Progress(step=10))
    replace = paths.replace

    def refused(source: Path, target: Path) -> None:
        if source.suffix == ".partial":
            raise PermissionError(13, "Permission denied")
        replace(source, target)

    monkeypatch.setattr(paths, "replace", refused)
    with pytest.raises(CheckpointError):
        save_checkpoint(folder, *trained(), Progress(step=10))
    assert [path.name for path in folder.iterdir()] == ["step-00000010"]
