from __future__ import annotations

import pytest

from lapclip.config import DataConfig
from lapclip.data.batches import BatchPlan, prefetch
from lapclip.data.scenes.dataset import load_scenes
from lapclip.data.tokenizers import CharacterTokenizer
from lapclip.tuning import loader_threads as loading
from lapclip.tuning.loader_threads import choose_loader_threads


@pytest.fixture(scope="module")
def plan(cache) -> BatchPlan:
    data = load_scenes(DataConfig(train_pairs=64), 32)
    assert data.alphabet is not None
    return BatchPlan(data.train, CharacterTokenizer(data.alphabet), 77, 16, seed=0)


def test_many_threads_give_the_batches_of_one_in_order(plan: BatchPlan) -> None:
    one, four = (list(prefetch(plan, 1, 12, threads=threads)) for threads in (1, 4))
    assert len(one) == len(four) == 12
    for a, b in zip(one, four, strict=True):
        assert (a.pixels_BSSC == b.pixels_BSSC).all()
        assert (a.tokens_BL == b.tokens_BL).all()


def test_one_thread_is_enough_where_it_keeps_up(plan: BatchPlan) -> None:
    threads, reason = choose_loader_threads("auto", plan, seconds_a_step=1e3)
    assert threads == 1
    assert "a step takes 1000000.0 ms" in reason


def test_more_are_taken_only_where_they_are_faster(plan: BatchPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "logical_cores", lambda: 4)
    monkeypatch.setattr(loading, "time_batches", lambda plan, threads: 0.008 / threads)
    assert choose_loader_threads("auto", plan, seconds_a_step=0.005)[0] == 4
    monkeypatch.setattr(loading, "time_batches", lambda plan, threads: 0.008)
    assert choose_loader_threads("auto", plan, seconds_a_step=0.005)[0] == 1


def test_what_is_asked_for_is_kept(plan: BatchPlan) -> None:
    assert choose_loader_threads(3, plan, 1.0) == (3, "asked for")
    assert choose_loader_threads("auto", plan, None)[0] == 1
