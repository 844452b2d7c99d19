"""Real processes that train one model together: what they learn is what one process learns, to the last bit.

`torchrun -m tests.training.test_ranks steps|runs FOLDER` is what the tests start. It takes steps, or trains whole runs,
as each rank does, and writes down what came out.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from lapclip.cli.doctor import doctor
from lapclip.cli.runs import runs
from lapclip.commands.choose_recipe import read_request
from lapclip.commands.resume import resume
from lapclip.config import replace_in
from lapclip.data.batches import Batch
from lapclip.data.loading import StreamedPixels
from lapclip.data.sections import deal
from lapclip.errors import ConfigError, LostRank, RankFailed, RunBusy, RunError
from lapclip.machine import ranks as ranks_module
from lapclip.machine.choose_device import device_of
from lapclip.machine.ranks import ALONE, Ranks, job, job_agent, join, leave_at_once
from lapclip.runs.folder import Run, TrainRequest, check_name, run_of_job
from lapclip.runs.heartbeat import beat_of, write_beat
from lapclip.together import MACHINES, Agreement
from lapclip.training import sharded_update
from lapclip.training import shards as shards_module
from lapclip.training.final_scores import FinalVectors, embed_final, score_embeddings
from lapclip.training.preparation import gather
from lapclip.training.ranks_in_a_run import (
    choose_shards,
    company,
    fit_ranks,
    fit_threads,
    follow,
    load_early,
    take_part,
)
from lapclip.training.recovery import half_micro_batch
from lapclip.training.request import RunRequest
from lapclip.training.resolvers import Context
from lapclip.training.shards import add_in_tree, own_shards, whole_nodes
from lapclip.training.step import DeviceMetrics, TrainStep
from lapclip.training.trainer import Trainer

from ..conftest import SMALL
from ..small_runs import events, losses, stop_after, train, train_small, write_tars
from .test_step import batch_of, off, step_of

ROWS, SHARDS = 10, 4
"""Pairs of a batch, which do not divide by its shards."""
FAILING_SHARDS, FAILING_AT = (4, 7, 0), (-2, 12, 1)
"""Shards of steps that fail, and the parameters whose gradient is the last that is found: rank 1 of four has two nodes
of the tree of seven shards."""


def request(*settings: str) -> RunRequest:
    return read_request(TrainRequest("first-run", settings))


def unit(rows: int, width: int = 64) -> np.ndarray:
    vectors = np.random.default_rng(3).standard_normal((rows, width)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def batch() -> Batch:
    """Pairs of which two share an image, so that several are positives of each other on different ranks."""
    plain = batch_of(ROWS)
    positives = np.eye(ROWS, dtype=bool)
    positives[0, 7] = positives[7, 0] = True
    return replace(plain, positives_BB=positives, lengths_B=np.arange(ROWS) // 2 + 8)


def with_words() -> Batch:
    words = np.random.default_rng(1).random((ROWS, 33)).astype(np.float32)
    return replace(batch(), extras={"words_BV": words / words.sum(1, keepdims=True)})


def with_phrases() -> Batch:
    plain, true = batch(), np.eye(ROWS, dtype=bool)
    true[5] = False
    phrases = plain.tokens_BL[::-1, 4:12].copy()
    return replace(plain, extras={"phrase_tokens_BL": phrases, "phrase_positives_BB": true})


def with_teacher() -> Batch:
    extras = {"teacher_image": unit(ROWS), "teacher_text": unit(ROWS)[::-1].copy()}
    return replace(batch(), extras=extras)


def large() -> Batch:
    """Enough captions for a shard to be cut in chunks by their length."""
    return replace(batch_of(256), lengths_B=np.sort(np.random.default_rng(2).integers(10, 16, 256)))


CASES: dict[str, tuple[Callable[[], Batch], dict[str, Any]]] = {
    "plain": (batch, {}),
    "sigmoid": (batch, {"loss": "sigmoid", "batch_size": ROWS}),
    "label smoothing": (batch, {"label_smoothing": 0.1}),
    "muon": (batch, {"optimizer": "muon"}),
    "word loss": (with_words, {"word_weight": 0.3}),
    "phrases": (with_phrases, {"phrases": 0.4}),
    "teacher": (with_teacher, {"teacher": "any", "teacher_weight": 0.7}),
    "micro-batches within shards": (batch, {"micro_batch": 2}),
    "micro-batches as large as shards": (batch, {"micro_batch": 5}),
    "crops and flips": (
        batch,
        {"crop": 0.5, "flip": 0.5, "steps": 2},
    ),
    "bfloat16": (batch, {"dtype": "bfloat16"}),
    "float16": (batch, {"dtype": "float16"}),
    "more shards than pairs": (batch, {"shards": 16}),
    "seven shards": (batch, {"shards": 7}),
    "fewer shards than ranks": (batch, {"shards": 2}),
    "captions in chunks": (large, {"shards": 2}),
    "gradients travel when all are there": (batch, {"shards": 7}),
    "gradients travel when all are there, in any order": (batch, {"shards": 0, "micro_batch": 2}),
    "gradients travel when all are there, bfloat16": (batch, {"dtype": "bfloat16"}),
    "in any order": (batch, {"shards": 0}),
    "in any order and micro-batches": (batch, {"shards": 0, "micro_batch": 2}),
    "in any order, each its own rows": (batch, {"shards": 0, "label_smoothing": 0.1}),
    "in any order, each its own rows, sigmoid": (
        batch,
        {"shards": 0, "loss": "sigmoid", "batch_size": ROWS},
    ),
    "bfloat16 between ranks": (batch, {"exchange": "bfloat16"}),
}
FEW = ["train.shards=4", "train.steps=8", "data.train_pairs=32"]
FROM = [*SMALL[1:], *FEW, "train.start=start"]
RUNS: dict[str, list[str]] = {
    "memory": [*SMALL, *FEW, "train.word_weight=0.3", "train.optimizer=muon", "data.tokenizer=bpe"],
    "frozen": [
        *FROM,
        "train.image_blocks=1",
        "train.text_blocks=1",
        "train.views=2",
        "train.phrases=0.2",
    ],
}
MORE: dict[str, list[str]] = {
    "plain": SMALL,
    "patience": [*SMALL, *FEW, "train.patience=1", "train.learning_rate=0.0", "train.steps=40"],
    "lora": [
        *FROM,
        "train.lora_rank=2",
        "train.micro_batch=3",
        "train.teacher=start",
        "train.crop=0.6",
    ],
    "unset": [*SMALL, *FEW[1:]],
}


def streamed(folder: Path) -> list[str]:
    """Images of tar files that are decoded each time. Batches do not divide by their shards, nor images by batches."""
    return [
        *SMALL,
        f"data.source={folder / 'tars'}",
        "data.stream=always",
        "train.shards=4",
        "train.batch_size=10",
    ]


def steps(case: str, ranks: Ranks = ALONE) -> dict[str, Any]:
    """What two updates give."""
    make, settings = CASES[case]
    step = step_of(**{"shards": SHARDS, **settings})
    step.ranks = ranks
    ranks.overlaps = "when all are there" not in case
    sharded_update.LARGE_BATCH = ROWS if "own rows" in case else 4096
    found = [step(make(), number, 1e-3, off())() for number in (1, 2)]
    weights = b"".join(
        parameter.detach().numpy().tobytes() for parameter in step.model.parameters()
    )
    return {
        "losses": [metrics.loss for metrics in found],
        "norms": [metrics.grad_norm for metrics in found],
        "weights": hashlib.sha256(weights).hexdigest(),
    }


def torchrun(
    count: int, *arguments: str, folder: Path, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Ranks of this computer, to their end."""
    root = str(Path(__file__).parents[2])
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    variables["PYTHONPATH"] = os.pathsep.join([root, str(Path(root) / "src")])
    variables.pop("PYTHONSAFEPATH", None)
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={count}",
        "-m",
    ]
    done = subprocess.run(
        [*start, *arguments],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks found."""
    folder = tmp_path_factory.mktemp("four")
    torchrun(4, "tests.training.test_ranks", "steps", folder=folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("case", CASES)
def test_four_ranks_take_the_steps_of_one_process(case: str, four: list[dict[str, Any]]) -> None:
    alone = steps(case)
    assert len({found[case]["weights"] for found in four}) == 1  # no rank has gone its own way
    if "between ranks" in case:
        assert four[0][case]["losses"] == pytest.approx(alone["losses"], rel=1e-2)
        assert four[0][case]["norms"] == pytest.approx(alone["norms"], rel=1e-2)
    elif "any order" in case:
        assert four[0][case]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert four[0][case]["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    else:
        assert four[0][case] == alone


def test_shards_learn_what_the_whole_batch_does() -> None:
    for case in ("plain", "sigmoid", "word loss", "phrases", "teacher"):
        make, settings = CASES[case]
        whole, cut = step_of(**settings), step_of(shards=SHARDS, **settings)
        for number in (1, 2):
            ours, theirs = (step(make(), number, 1e-3, off())() for step in (cut, whole))
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-4), case
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3), case
            assert ours.scalars["t2i_accuracy"] == theirs.scalars["t2i_accuracy"], case


def test_a_rank_that_fails_is_named_by_those_that_wait_for_it(four: list[dict[str, Any]]) -> None:
    for rank in (0, 1, 3):
        assert "rank 2" in four[rank]["lost"]
        assert "no memory" in four[rank]["lost"]


def test_a_step_that_fails_on_its_way_back_fails_on_all_ranks_and_the_next_is_that_of_one_process(
    four: list[dict[str, Any]],
) -> None:
    for at, shards in enumerate(FAILING_SHARDS):
        alone = step_of(shards=shards)(batch(), 1, 1e-3, off())().loss
        for found in four:
            assert [said for said, _ in found["failed"][at]] == ["failed"] * len(FAILING_AT)
            assert [loss for _, loss in found["failed"][at]] == pytest.approx(
                [alone] * len(FAILING_AT), rel=1e-5
            )


def test_files_travel_in_chunks(four: list[dict[str, Any]]) -> None:
    assert [found["files"] for found in four] == [[2 * 1000 + 1, 1000, 0]] * 4


def test_every_item_is_computed_once_by_whoever_is_free(four: list[dict[str, Any]]) -> None:
    assert [found["shared"][0] for found in four] == [[[at] * (at % 3) for at in range(70)]] * 4
    assert sum(found["shared"][1] for found in four) == 70


def test_a_share_that_fails_on_one_rank_fails_on_all(four: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(four):
        assert "no memory" in found["failed share"][0]
        assert found["failed share"][1] is (rank == 1)  # who knows why can say what would help


def test_all_stop_where_one_rank_is_asked_to(four: list[dict[str, Any]]) -> None:
    assert [found["agreed"] for found in four] == [[None, "SIGINT on rank 3"]] * 4


@pytest.fixture(scope="module")
def start_in_both_ways(
    tmp_path_factory: pytest.TempPathFactory, trained: Path
) -> Callable[..., Path]:
    """Makes a folder with runs of some ranks, and the same of one process."""

    def start(count: int, which: str, runs: dict[str, list[str]]) -> Path:
        folder = tmp_path_factory.mktemp(which)
        shutil.copytree(trained / "model", folder / "start")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            torchrun(count, "tests.training.test_ranks", which, folder=folder)
            patch.setenv(
                "LAPCLIP_CACHE", str(tmp_path_factory.mktemp("cache"))
            )  # no features that others have made
            for name, settings in runs.items():
                shards = ["train.shards=8"] * ("train.shards=4" not in settings)
                with out_of_memory(wanted=name == "memory"):
                    train("first-run", [*settings, *shards], name=f"{name}-alone")
        return folder

    return start


@pytest.fixture(scope="module")
def two(start_in_both_ways: Callable[..., Path]) -> Path:
    return start_in_both_ways(2, "runs", RUNS)


@contextmanager
def out_of_memory(*, wanted: bool) -> Iterator[None]:
    """The fifth step finds no memory for its first pass through the towers, once."""
    update, encode, taken, failing = TrainStep.update, TrainStep.encode, itertools.count(1), []

    def fifth_update(self: TrainStep, *arguments: Any) -> DeviceMetrics:
        if next(taken) == 5:
            failing.append(self)
        return update(self, *arguments)

    def failing_encode(self: TrainStep, *arguments: Any) -> dict[str, torch.Tensor]:
        if failing:
            failing.clear()
            raise torch.OutOfMemoryError("no memory")
        return encode(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        if wanted:
            patch.setattr(TrainStep, "update", fifth_update)
            patch.setattr(TrainStep, "encode", failing_encode)
        yield


def weights(name: str) -> bytes:
    return Path("runs", name, "model", "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_two_ranks_is_that_of_one_process(
    name: str, two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(two)
    same_runs(name)


@pytest.mark.slow
def test_runs_of_three_ranks_are_those_of_one_process(
    start_in_both_ways: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(start_in_both_ways(3, "more", MORE))
    for name in MORE:
        same_runs(name)
    assert len(losses("patience-together")) < 40


def same_runs(name: str) -> None:
    assert losses(f"{name}-together") == losses(f"{name}-alone")
    assert weights(f"{name}-together") == weights(f"{name}-alone")
    ended = [events("finished", f"{name}-{how}")[0] for how in ("together", "alone")]
    assert ended[0]["evaluation"] == ended[1]["evaluation"]
    assert ended[0]["step"] == ended[1]["step"]


@pytest.mark.parametrize("name", RUNS)
def test_all_ranks_compute_the_last_evaluation(
    name: str, two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(two)
    (ended,) = events("finished", f"{name}-alone")
    scored = json.loads((two / "other" / "cache" / f"{name}-final.json").read_text())
    assert scored["evaluation"].items() <= ended["evaluation"].items()
    assert scored["start"] is None or scored["start"].items() <= ended["start_evaluation"].items()
    assert (scored["start"] is None) == (name == "memory")


def test_only_the_rank_that_writes_leaves_files(two: Path) -> None:
    assert sorted(path.name for path in two.iterdir()) == ["other", "runs", "start"]
    assert [path.name for path in (two / "other").iterdir()] == ["cache"]


def test_memory_that_runs_out_on_one_rank_changes_all(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(two)
    for how in ("together", "alone"):
        (fell,) = events("fell_back", f"memory-{how}")
        assert (fell["step"], fell["change"]) == (4, {"micro_batch": 8})


def test_features_are_computed_in_shares(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(two)
    assert "computed once" in events("started", "frozen-together")[0]["reasons"]["train.features"]


@pytest.fixture
def unconnected() -> Iterator[list[Ranks]]:
    """Two ranks that can leave words for each other, and no more."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    ranks = [Ranks(rank, 2, store) for rank in range(2)]
    yield ranks
    for rank in ranks:
        rank.close()


def test_a_rank_that_follows_loads_the_data_while_the_writer_does(
    here: Path, unconnected: list[Ranks]
) -> None:
    made = gather(Context(request(*SMALL), unconnected[0]), None)
    loaded = load_early(unconnected[1])
    assert loaded is not None
    assert loaded.data.fingerprint == made.data.fingerprint
    assert loaded.fits(made.config)
    assert not loaded.fits(replace_in(made.config, "data", seed=1))
    assert not loaded.fits(replace_in(made.config, "model", image_size=64))


def test_a_guest_does_not_pack_its_copy_of_what_the_host_streams(
    here: Path, unconnected: list[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether images are streamed is not settled when the writer announces its settings, but a guest knows."""
    config = request(*SMALL).config
    assert config.data.stream == "auto"
    for name, value in (
        Agreement.on(config, "host", "", source=str(here / "copy")).variables().items()
    ):
        monkeypatch.setenv(name, value)
    unconnected[0].announce(asdict(config))
    assert load_early(unconnected[1]) is None


def test_a_rank_that_fails_before_all_are_connected_is_named(unconnected: list[Ranks]) -> None:
    unconnected[1].tell_failure(MemoryError("no memory"))
    with pytest.raises(LostRank, match=r"set-up of rank 1.*no memory"):
        unconnected[0].connect()


def test_the_tree_does_not_depend_on_who_adds() -> None:
    draw = torch.Generator().manual_seed(0)
    for shards in (1, 2, 3, 5, 8, 13):
        leaves = [torch.rand(1000, generator=draw) * 10.0**shard for shard in range(shards)]

        def leaf(node: tuple[int, int], leaves: list[torch.Tensor] = leaves) -> torch.Tensor | None:
            return leaves[node[0]].clone() if node[1] - node[0] == 1 else None

        alone = add_in_tree((0, shards), leaf)
        for count in range(1, shards + 2):
            owned = [own_shards(Ranks(rank, count), shards) for rank in range(count)]
            assert [shard for own in owned for shard in own] == list(range(shards))
            known = {
                node: add_in_tree(node, leaf)
                for own in owned
                for node in whole_nodes((0, shards), own)
            }
            assert torch.equal(add_in_tree((0, shards), known.get), alone)


def test_shards_cost_alike() -> None:
    dealt = deal(100, 8)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(100))
    assert {len(rows) for rows in dealt} == {12, 13}
    means = [
        rows.mean() for rows in dealt
    ]  # of rows that are sorted by length, as a batch has them
    assert max(means) - min(means) < 8


def test_one_shard_for_several_ranks_is_refused(here: Path) -> None:
    assert fit_ranks(request(*SMALL), 2, together=True).config.train.shards == 8
    assert fit_ranks(request("train.shards=4"), 2, together=True).config.train.shards == 4
    with pytest.raises(ConfigError, match=r"train\.shards"):
        fit_ranks(request("train.shards=1"), 2, together=True)


def test_shards_that_nobody_asked_for_follow_from_ranks_and_device(here: Path) -> None:
    own = request(*SMALL)
    assert fit_ranks(own, 12, together=True).config.train.shards == 12
    config = fit_ranks(own, 2, together=True).config
    for kind, count, shards in (("cpu", 2, 8), ("cpu", 1, 8), ("cuda", 2, 0), ("cuda", 1, 1)):
        settled, why = choose_shards(config, device_of(kind), Ranks(0, count), is_set=False)
        assert settled.train.shards == shards
        assert why
    settled, _ = choose_shards(config, device_of("cuda"), Ranks(0, 2), is_set=True)
    assert settled.train.shards == 8


def test_all_ranks_have_the_threads_of_the_smallest_computer(here: Path) -> None:
    unset = request("train.threads=auto")
    ranks = Ranks(0, 2)
    ranks.fewest_threads = 3
    assert fit_threads(unset, ranks).config.train.threads == 3
    assert fit_threads(unset, Ranks()).config.train.threads == "auto"
    asked = request("train.threads=2")
    assert fit_threads(asked, ranks).config.train.threads == 2


def test_memory_is_halved_from_what_a_shard_takes(here: Path) -> None:
    train = request("train.batch_size=64", "train.shards=8").config.train
    assert (
        half_micro_batch(train) == 32
    )  # from then on a shard of 8 is what goes through the towers at once
    assert half_micro_batch(replace(train, micro_batch=32)) == 4
    assert half_micro_batch(replace(train, micro_batch=32, shards=1)) == 16


def test_who_left_and_who_came_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(here / "run")
    run.path.mkdir()
    assert company(run, ALONE) == []
    assert company(run, Ranks(0, 2, hosts=["desktop", "laptop"])) == []
    together = {
        "v": 1,
        "type": "together",
        "time": 1.0,
        "step": 0,
        "worth": {"hosts": ["desktop", "laptop"]},
    }
    run.events.write_text(json.dumps(together) + "\n")
    assert company(run, Ranks(0, 1, hosts=["desktop"])) == ["goes on without laptop"]
    assert company(run, Ranks(0, 2, hosts=["desktop", "tower"])) == [
        "goes on without laptop",
        "tower joined",
    ]
    monkeypatch.setenv(MACHINES, "3")
    here_again = company(run, Ranks(0, 2, hosts=["desktop", "laptop"]))
    assert here_again[0] == "trained by desktop and laptop"
    assert "2 of 3 computers" in here_again[1]


def test_who_lists_a_run_of_several_computers_is_told_to_go_on_with_them(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_small(callbacks=stop_after(2))
    runs()
    assert "resume run\n" in capsys.readouterr().out
    Run(Path("runs/run")).record("together", {"machines": 2})
    runs()
    doctor("run")
    assert capsys.readouterr().out.count("resume run --machines 2") == 2
    with pytest.raises(RunError) as taken:
        check_name("run")
    assert "resume run --machines 2" in (taken.value.hint or "")


def test_a_run_that_its_agent_will_start_again_can_be_asked_to_stop(here: Path) -> None:
    run = Run(here / "run")
    run.path.mkdir()
    assert not run.is_between_starts
    write_beat(run.job, beat_of(os.getpid(), "a job"))
    assert run.is_between_starts
    assert run.state == "starting"
    with run.lock():
        assert not run.is_between_starts  # a process works on it
    write_beat(
        run.job, replace(beat_of(os.getpid(), "a job"), began=1.0)
    )  # of a process that is gone
    assert not run.is_between_starts


def test_nobody_else_goes_on_with_a_run_that_its_agent_will_start_again(here: Path) -> None:
    run = Run(here / "runs" / "run")
    run.path.mkdir(parents=True)
    run.settings.write_text("")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as agent:
        write_beat(run.job, beat_of(agent.pid, "a job"))
        with pytest.raises(RunBusy, match="meet again"):
            resume("run")
        agent.communicate(b"\n")
    assert not run.is_between_starts


@pytest.mark.slow
def test_a_run_goes_on_with_any_number_of_ranks(here: Path) -> None:
    settings = ["train.shards=4", "train.steps=16"]
    train_small(*settings, name="alone")
    train_small(*settings, callbacks=stop_after(3))
    for count, last in ((2, 7), (4, 11)):
        torchrun(count, "tests.training.test_ranks", "resume", str(last), folder=here)
        assert max(losses()) in (last, last + 1)
    resume(None)
    assert losses() == losses("alone")
    assert weights("run") == weights("alone")


@pytest.mark.slow
def test_streamed_runs_of_any_number_of_ranks_are_those_of_one_process(
    here: Path, empty_cache: Path
) -> None:
    write_tars(here / "tars", files=6, each=11)
    torchrun(2, "tests.training.test_ranks", "streamed", folder=here)
    train("first-run", streamed(here), name="streamed-alone")
    same_runs("streamed")
    # A rank that only follows reads for training alone. Of six files, the two last shards are in the second half.
    assert sorted(Path("read.txt").read_text().split()) == [
        f"photos-train-0000{at}.tar" for at in (3, 4, 5)
    ]

    train("first-run", streamed(here), name="stopped", callbacks=stop_after(5, "stopped"))
    torchrun(3, "tests.training.test_ranks", "resume", "100", folder=here)
    assert losses("stopped") == losses("streamed-alone")
    assert weights("stopped") == weights("streamed-alone")


@pytest.mark.slow
def test_a_streamed_run_without_shards_keeps_its_order_when_ranks_go_on(
    here: Path, empty_cache: Path
) -> None:
    write_tars(here / "tars", files=6, each=11)
    whole = [*streamed(here), "train.shards=1"]
    train("first-run", whole, name="alone")
    train("first-run", whole, name="run", callbacks=stop_after(5))
    torchrun(2, "lapclip", "resume", folder=here)
    assert losses() == pytest.approx(losses("alone"), rel=1e-3)


@pytest.mark.slow
def test_a_run_without_shards_goes_on_to_rounding_and_says_so(here: Path) -> None:
    train_small(name="alone")
    train_small(callbacks=stop_after(5))
    torchrun(2, "lapclip", "resume", folder=here)
    assert losses() == pytest.approx(losses("alone"), rel=1e-3)
    assert any("shard" in note for note in events("resumed")[0]["notes"])


@pytest.mark.slow
def test_an_error_before_the_run_ends_all_ranks_at_once(here: Path) -> None:
    done = torchrun(2, "lapclip", "train", "--recipe", "nonsense", folder=here, check=False)
    assert done.returncode == 1
    assert "Unknown recipe nonsense" in done.stderr
    assert "Try: --recipe" in done.stderr  # rank 0's own words: the others leave it time for them
    assert not Path("runs").exists()


def failed_steps(shards: int, ranks: Ranks) -> list[tuple[str, float]]:
    """What becomes of a step in which rank 1 runs out of memory while it carries gradients back, early and late, when
    some have travelled already; and the loss of the step after it."""
    found = []
    for at in FAILING_AT:
        step = step_of(shards=shards)
        step.ranks = ranks

        def fail(_: torch.Tensor) -> None:
            raise torch.OutOfMemoryError("no memory")

        hook = step.learnt_in_towers[at].register_hook(fail) if ranks.rank == 1 else None
        try:
            step(batch(), 1, 1e-3, off())()
            said = "taken"
        except RankFailed:
            said = "failed"
        if hook:
            hook.remove()
        found.append((said, step(batch(), 1, 1e-3, off())().loss))
    return found


def shared_files(ranks: Ranks) -> list[int]:
    """The sizes of files that the writer gives the others: some chunks and a byte, just one chunk, and nothing."""
    folder = Path(f"files-{ranks.rank}")
    folder.mkdir()
    sizes = {"large": 2001, "whole": 1000, "empty": 0}
    if ranks.writes:
        for name, size in sizes.items():
            (folder / name).write_bytes(bytes(range(250)) * 9 * (size > 0))
            os.truncate(folder / name, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks_module, "FILE_CHUNK", 1000)
        ranks.share_files(folder, [folder / name for name in sizes])
    same = bytes(range(250)) * 9
    assert all((folder / name).read_bytes() == same[:size] for name, size in sizes.items())
    return [(folder / name).stat().st_size for name in sizes]


def shared_items(ranks: Ranks) -> tuple[list[list[int]], int]:
    """What ranks, of which one is slow, compute of some items, and how many this one has computed."""
    own = []

    def compute(at: int) -> np.ndarray:
        own.append(at)
        time.sleep(0.02 if ranks.rank == 1 else 0.0)
        return np.full(at % 3, at)

    return [found.tolist() for found in ranks.computed_in_shares(range(70), compute)], len(own)


def failed_share(ranks: Ranks) -> tuple[str, bool]:
    """What a rank says where one has no memory for its share, and whether it knows the error itself."""

    def compute(at: int) -> np.ndarray:
        if ranks.rank == 1:
            raise torch.OutOfMemoryError("no memory")
        time.sleep(0.02)
        return np.zeros(at)

    try:
        list(ranks.computed_in_shares(range(20), compute))
    except RankFailed as error:
        return str(error), isinstance(error.__cause__, torch.OutOfMemoryError)
    return "", False


def _write(rank: Ranks, found: dict[str, Any]) -> None:
    Path(f"{rank.rank}.json").write_text(json.dumps(found))


def _steps() -> None:
    with join() as ranks:
        ranks.connect()
        found: dict[str, Any] = {case: steps(case, ranks) for case in CASES}
        with (
            pytest.MonkeyPatch.context() as patch
        ):  # so that gradients of a small model travel in several groups
            patch.setattr(shards_module, "TOGETHER", 4000)
            patch.setattr(shards_module, "LARGE_GRADIENT", 2000)
            found["failed"] = [failed_steps(shards, ranks) for shards in FAILING_SHARDS]
        found["files"] = shared_files(ranks)
        found["shared"] = shared_items(ranks)
        found["failed share"] = failed_share(ranks)
        found["agreed"] = [ranks.agreed(None), ranks.agreed("SIGINT" if ranks.rank == 3 else None)]
        _write(ranks, found)
    try:
        with join() as ranks:
            ranks.connect()
            if ranks.rank == 2:
                raise MemoryError("no memory")
            for _ in range(3):
                ranks.gathered(torch.zeros(1), [1] * 4, "embeddings")
    except MemoryError:
        pass
    except LostRank as error:
        _write(ranks, found | {"lost": str(error)})
    os._exit(
        0
    )  # as lapclip's own processes do: gloo may abort where a rank was lost while Python ends


def _runs(runs: dict[str, list[str]]) -> None:
    if os.environ["RANK"] != "0":  # as on another computer
        other = Path("other").absolute()
        other.mkdir(exist_ok=True)
        os.chdir(other)
        os.environ["LAPCLIP_CACHE"] = str(other / "cache")
    for name, settings in runs.items():
        with join() as ranks:
            if ranks.writes:
                train("first-run", settings, name=f"{name}-together", ranks=ranks)
            else:
                with (
                    out_of_memory(wanted=name == "memory"),
                    last_embeddings(Path("cache", f"{name}-final.json")),
                ):
                    follow(ranks)


@contextmanager
def last_embeddings(path: Path) -> Iterator[None]:
    """What a rank that follows has of the last evaluation, as scores in a file."""

    def embed(trainer: Trainer) -> FinalVectors:
        final, batch_size = embed_final(trainer), trainer.config.train.batch_size
        start = final.start_vectors and score_embeddings(*final.start_vectors, batch_size)
        scored = {"evaluation": score_embeddings(*final.best_vectors, batch_size), "start": start}
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(scored))
        return final

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lapclip.training.final_scores.embed_final", embed)
        yield


def _streamed() -> None:
    folder, follows = Path.cwd(), os.environ["RANK"] != "0"
    if follows:
        os.environ["LAPCLIP_CACHE"] = str(folder / "other")  # as on another computer
    decoded, found = StreamedPixels._decoded, set()

    def decoding(pixels: StreamedPixels, row: int) -> np.ndarray:
        found.add(pixels._images[row].name.partition(":")[0])
        return decoded(pixels, row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamedPixels, "_decoded", decoding)
        take_part(
            lambda ranks: train(
                "first-run", streamed(folder), name="streamed-together", ranks=ranks
            ),
            lambda run, ranks, again: resume(str(run.path), detached=again, ranks=ranks),
        )
    if follows:
        Path("read.txt").write_text("\n".join(found))


def _resume(last: int) -> None:
    callbacks = stop_after(last)
    take_part(
        lambda ranks: resume(None, callbacks, ranks=ranks),
        lambda run, ranks, again: resume(str(run.path), callbacks, detached=again, ranks=ranks),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, *arguments = sys.argv[1:]
    tasks = {
        "steps": _steps,
        "runs": lambda: _runs(RUNS),
        "more": lambda: _runs(MORE),
        "streamed": _streamed,
        "resume": lambda: _resume(int(arguments[0])),
    }
    tasks[what]()
    leave_at_once(0)


@pytest.mark.skipif(sys.platform != "linux", reason="the boot time is read from /proc")
def test_a_job_is_known_after_the_clock_was_set(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(here / "runs" / "run")
    run.path.mkdir(parents=True)
    run.settings.write_text("")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    write_beat(run.job, beat_of(os.getppid(), job()))
    boot_time = psutil._pslinux.boot_time
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_time() + 3600)
    found = run_of_job(job(), job_agent())
    assert found is not None
    assert found.name == "run"
    assert run_of_job(job(), os.getpid()) is None  # another agent's
    write_beat(
        run.job, replace(beat_of(os.getppid(), job()), began=1.0)
    )  # one that is gone had its number
    assert run_of_job(job(), job_agent()) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    assert job_agent() is None
    write_beat(run.job, replace(beat_of(os.getppid(), job()), began=1.0))
    assert run_of_job(job(), job_agent()) is not None  # a job with a name may have a new agent
