"""Several ranks against one process: gradients, what ranks send each other, and how rows are divided."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lapclip.config import (
    DEFAULT_RECIPE,
    Layer,
    ModelConfig,
    TrainConfig,
    build_config,
    read_recipe,
)
from lapclip.data.batches import BatchPlan, RankRows
from lapclip.data.dataset import Pairs
from lapclip.data.tokenizers import CharacterTokenizer
from lapclip.embedder import Embedder
from lapclip.errors import (
    CheckpointError,
    ConfigError,
    LapclipError,
    LostRank,
    OutOfMemory,
    TrainingError,
)
from lapclip.machine.cpu import Cpu
from lapclip.machine.device import DTYPES
from lapclip.measure.phases import Stopwatch
from lapclip.model.clip import CLIP
from lapclip.model.freezing import freeze
from lapclip.model.shapes import SHAPES
from lapclip.runs.events import EventLog, FellBack, read_events
from lapclip.runs.folder import FORMAT, Run
from lapclip.training import loss_rows
from lapclip.training.cuda_graph import make_step
from lapclip.training.distributed import (
    ALONE,
    ERROR_FILE,
    RESTART_COUNT,
    Ranks,
    advise_rows,
    describe_stop,
    divide,
    reason_of_last_stop,
    shard_towers,
    whole,
    write_error_file,
)
from lapclip.training.loss_rows import Columns, contrastive_rows
from lapclip.training.objectives import Objectives
from lapclip.training.objectives.base import LossRows, TruePairs
from lapclip.training.objectives.contrastive import LOSSES, batch_accuracy, contrastive_loss
from lapclip.training.objectives.distillation import TeacherVectors
from lapclip.training.optimizer import make_optimizer
from lapclip.training.ranks_in_a_run import (
    halve_after_memory,
    place_of_file,
    refuse_few_rows,
    refuse_settings,
)
from lapclip.training.recovery import changes_so_far
from tests.rank_pool import RankPool

SHAPE = ModelConfig(
    name="",
    image_size=16,
    patch=8,
    image_width=16,
    image_layers=2,
    image_heads=2,
    text_width=16,
    text_layers=2,
    text_heads=2,
    embedding=8,
    vocabulary=32,
    context=8,
)
PAIRS = 13  # no number of ranks divides it


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    made = RankPool(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@dataclass(frozen=True)
class Case:
    """One way to compute gradients on several ranks."""

    ranks: int
    engine: str
    is_ring: bool = False
    micro_batch: int = 0
    loss: str = "softmax"
    smoothing: float = 0.0
    shares: tuple[int, ...] = ()
    image_tower: str = "transformer"
    train: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "-".join(f"{value}" for value in vars(self).values())


def case_table() -> list[Case]:
    cases = [
        Case(ranks, engine, is_ring, micro_batch)
        for ranks in (1, 2, 3, 4)
        for engine in ("ddp", "fsdp")
        for is_ring in (False, True)
        for micro_batch in (0, 3)
    ]
    for engine in ("ddp", "fsdp"):
        two = Case(2, engine)
        cases += [
            replace(two, loss="sigmoid"),
            replace(two, loss="sigmoid", is_ring=True),
            replace(two, smoothing=0.1),
            replace(two, smoothing=0.1, is_ring=True),
            replace(two, shares=(3, 1)),
            replace(two, shares=(3, 1), micro_batch=3),
            replace(two, image_tower="convolutions"),
            replace(two, train=(("image_blocks", 1), ("text_blocks", 0))),
            replace(two, train=(("image_blocks", 1), ("text_blocks", 0)), micro_batch=3),
            replace(two, train=(("lora_rank", 2),)),
        ]
    return cases


def make_model(case: Case) -> CLIP:
    shape = replace(SHAPE, logit_bias=case.loss == "sigmoid")
    if case.image_tower == "convolutions":
        shape = replace(shape, image_tower=case.image_tower, image_layers=4, image_size=32)
    model = CLIP(shape).to(torch.float64)
    if case.loss == "sigmoid":
        model.start_logits(10.0, -2.0)
    freeze(model, TrainConfig(**dict(case.train)))
    return model.to(torch.float64)


def draw_batch(model: CLIP) -> tuple[Tensor, Tensor, Tensor]:
    """Return pixels, tokens and positives; two pairs share a caption, and one has no positive."""
    draw = torch.Generator().manual_seed(1)
    side = model.shape.image_size
    pixels = torch.randn(PAIRS, 3, side, side, generator=draw, dtype=torch.float64)
    tokens = torch.randint(1, 30, (PAIRS, 8), generator=draw)
    tokens[:, -1] = 31
    positives = torch.eye(PAIRS, dtype=torch.bool)
    positives[2, 7] = positives[7, 2] = True
    positives[4, 4] = False
    return pixels, tokens, positives


def embed(model: CLIP, pixels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return embeddings in float64; `CLIP.encode_image` rounds to float32."""
    return F.normalize(model.image(pixels), dim=-1), F.normalize(model.text(tokens), dim=-1)


def learning(model: CLIP) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@cache
def expected(case: Case) -> tuple[float, float, float, dict[str, Tensor]]:
    """Return loss, accuracies and gradients of one process."""
    model = make_model(case)
    pixels, tokens, positives = draw_batch(model)
    loss, logits = contrastive_loss(
        *embed(model, pixels, tokens),
        model.logit_scale.exp(),
        positives,
        model.logit_bias,
        LOSSES[case.loss],
        case.smoothing,
    )
    loss.backward()
    gradients = {name: p.grad for name, p in learning(model).items() if p.grad is not None}
    t2i, i2t = batch_accuracy(logits, positives)
    return loss.item(), t2i.item(), i2t.item(), gradients


def take_step(ranks: Ranks, case: Case, model: CLIP, *, sums: bool = True) -> Tensor:
    """Compute gradients as a rank does. Return loss and accuracies, summed over ranks."""
    pixels, tokens, positives = draw_batch(model)
    rows = divide(PAIRS, case.shares or [1] * ranks.count)
    dealt = RankRows.deal(rows, ranks.rank).rows
    order = torch.from_numpy(np.concatenate(dealt))
    own = torch.from_numpy(dealt[ranks.rank])
    pixels, tokens = pixels[own], tokens[own]
    by_image, by_text = positives[own][:, order], positives.T[own][:, order]
    columns = Columns(ranks, rows, case.is_ring)

    def loss_of(image: Tensor, text: Tensor) -> loss_rows.ContrastiveRows:
        embeddings = {"image": image, "text": text}
        gathered = embeddings if case.is_ring else ranks.gather(embeddings, rows)
        pairs = {"positives": TruePairs(by_image, by_text)}
        given = LossRows(model, embeddings, gathered, pairs, {}, PAIRS, columns)
        scale, bias = model.logit_scale.exp(), model.logit_bias
        return contrastive_rows(given, "text", "positives", case.loss, scale, bias, case.smoothing)

    if case.micro_batch:
        parts = ranks.cut_micro_batches(rows[ranks.rank], rows, case.micro_batch)
        with torch.no_grad():
            embedded = [embed(model, pixels[part], tokens[part]) for part in parts]
        leaves = [torch.cat(side).requires_grad_() for side in zip(*embedded, strict=True)]
        found = loss_of(*leaves)
        found.loss.backward()
        for part in parts:
            ranks.will_sum(model, is_last=part is parts[-1])
            gradients = [leaf.grad[part] for leaf in leaves if leaf.grad is not None]
            torch.autograd.backward(embed(model, pixels[part], tokens[part]), gradients)
    else:
        found = loss_of(*embed(model, pixels, tokens))
        found.loss.backward()
    if sums:
        ranks.sum_gradients(list(learning(model).values()), torch.float64)
    return ranks.sum(torch.stack([part.detach().double() for part in found]))


def gradient_errors(ranks: Ranks, case: Case, sums: bool) -> tuple[list[float], dict[str, float]]:
    """Return the figures of a step beside those of one process, and how far each gradient is off."""
    torch.manual_seed(0)
    model = make_model(case)
    if case.engine == "fsdp":
        shard_towers(model, ranks, None, torch.float64)
    figures = take_step(ranks, case, model, sums=sums).tolist()
    *expected_figures, expected_gradients = expected(case)
    off = [abs(one - other) for one, other in zip(figures, expected_figures, strict=True)]
    errors = {}
    for name, parameter in learning(model).items():
        gradient = whole(parameter.grad) if parameter.grad is not None else None
        wanted = expected_gradients[name]
        assert gradient is not None, name
        errors[name] = ((gradient - wanted).norm() / wanted.norm().clamp(min=1e-12)).item()
    return off, errors


@pytest.mark.parametrize("case", case_table(), ids=str)
def test_gradients_of_ranks_are_those_of_one_process(pool: RankPool, case: Case) -> None:
    # Weights of convolutions are standardized in float32.
    tolerance = 1e-10 if case.image_tower == "transformer" else 1e-5
    for off, errors in pool.run(case.ranks, gradient_errors, case, True):
        assert max(off) < tolerance
        name = max(errors, key=lambda name: errors[name])
        assert errors[name] < tolerance, name


def test_gradients_that_are_not_summed_differ(pool: RankPool) -> None:
    for _, errors in pool.run(2, gradient_errors, Case(2, "ddp"), False):
        assert min(errors.values()) > 1e-3


def weights_after_steps(ranks: Ranks, case: Case, optimizer: str) -> dict[str, Tensor]:
    """Return the weights after three steps; `ranks.count` 1 without a group is one process."""
    train = TrainConfig(optimizer=optimizer, learning_rate=0.01, steps=3)
    model = make_model(case)
    if case.engine == "fsdp":
        shard_towers(model, ranks, None, torch.float64)
    updates = make_optimizer(model, train, Cpu())
    for _ in range(train.steps):
        take_step(ranks, case, model)
        updates.step()
        updates.zero_grad(set_to_none=True)
    return {name: whole(parameter.detach()).clone() for name, parameter in learning(model).items()}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_weights_of_ranks_are_those_of_one_process(
    pool: RankPool, engine: str, optimizer: str
) -> None:
    expected_weights = weights_after_steps(ALONE, Case(1, "none"), optimizer)
    for weights in pool.run(3, weights_after_steps, Case(3, engine), optimizer):
        for name, weight in expected_weights.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    ("reason", "changed", "half"),
    [
        ("Rank 1 on b ended: Out of memory at step 3", {}, 4),
        ("Rank 1 on b ended: Out of memory at step 3", {"micro_batch": 4}, 2),
        ("Rank 1 on b ended: Out of memory at step 3", {"micro_batch": 1}, None),
        ("Ended without a message, so killed or cut off: rank 1 on b.", {}, None),
    ],
)
def test_memory_that_ran_out_on_a_rank_halves_the_micro_batch_of_all(
    tmp_path: Path, reason: str, changed: dict[str, int], half: int | None
) -> None:
    run = Run(tmp_path / "runs" / "run")
    run.path.mkdir(parents=True)
    run.write_settings({"run": {"format": FORMAT}, "train": {"batch_size": 16}})
    with closing(EventLog(run.events)) as log:
        log.append(FellBack(step=1, cause="", change=changed, devices={}, text=""))
    ranks = Ranks()
    ranks.count, ranks.node_numbers, ranks.last_stop = 2, [0, 1], reason
    halve_after_memory(run, ranks)
    expected = {**changed, "micro_batch": half} if half else changed
    assert changes_so_far(read_events(run.events)) == expected


def messages(ranks: Ranks) -> dict[str, Any]:
    """Return what each kind of message gives on this rank."""
    ranks.writer = 1
    own = np.full((ranks.rank + 1, 2), ranks.rank, np.float32)
    reason = "SIGTERM" if ranks.rank == 2 else None
    weights = [torch.full((2,), float(ranks.rank)), torch.tensor(ranks.rank)]
    ranks.broadcast(weights)
    return {
        "from the writer": ranks.broadcast_json({"steps": ranks.rank, "name": "Zoë"}),
        "of all": ranks.gather_json(ranks.rank),
        "array": ranks.broadcast_array(own, source=2).tolist(),
        "weights": [weight.tolist() for weight in weights],
        "reason": ranks.first_reason(reason),
        "no reason": ranks.first_reason(None),
        "due": ranks.agree_on_stop(None, is_save_due=ranks.writes),
        "not due": ranks.agree_on_stop(None, is_save_due=not ranks.writes),
        "shares": [part.tolist() for part in ranks.compute_in_shares(np.atleast_1d, range(4))],
        "rows": ranks.gather_rows(torch.from_numpy(own), [1, 2, 3])[:, 0].tolist(),
    }


def test_messages_reach_all_ranks(pool: RankPool) -> None:
    for found in pool.run(3, messages):
        assert found.pop("reason").startswith("SIGTERM (rank 2 on ")
        assert found == {
            "from the writer": {"steps": 1, "name": "Zoë"},
            "of all": [0, 1, 2],
            "array": [[2, 2], [2, 2], [2, 2]],
            "weights": [[1, 1], 1],
            "no reason": None,
            "due": (None, True),
            "not due": (None, False),
            "shares": [[0], [1], [2], [3]],
            "rows": [0, 1, 1, 2, 2, 2],
        }


def wait_for_a_rank_that_sleeps(ranks: Ranks) -> float:
    """Return how long a message of rank 1 was waited for before the others gave up."""
    ranks.start_steps(Cpu(), 0.5)
    began = time.monotonic()
    if ranks.rank == 1:
        time.sleep(2.0)
        return 0.0
    with pytest.raises(RuntimeError):
        ranks.broadcast_json(None, source=1)
    return time.monotonic() - began


def test_messages_between_steps_have_the_time_limit_of_steps(pool: RankPool) -> None:
    assert max(pool.run(4, wait_for_a_rank_that_sleeps)) < 2.0


def repeated_sums(ranks: Ranks, dtype: torch.dtype) -> list[Tensor]:
    """Return sums of the same gradients, made twice."""
    results = []
    for _ in range(2):
        draw = torch.Generator().manual_seed(ranks.rank)
        parameters = [torch.zeros(size, requires_grad=True) for size in ((300, 7), (), (5,))]
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        ranks.sum_gradients(parameters, dtype)
        grads = [
            parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None
        ]
        results.append(torch.cat(grads).clone())
    return results


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_sums_are_the_same_bits_on_all_ranks_and_each_time(
    pool: RankPool, dtype: torch.dtype, rtol: float
) -> None:
    draws = [torch.Generator().manual_seed(rank) for rank in range(3)]
    parts = [torch.cat([torch.randn(n, generator=draw) for n in (2100, 1, 5)]) for draw in draws]
    sums = [each for found in pool.run(3, repeated_sums, dtype) for each in found]
    for each in sums:
        assert torch.equal(each, sums[0])
        torch.testing.assert_close(each, torch.stack(parts).sum(0), rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    ("total", "shares", "rows"),
    [(13, [1, 1], [6, 7]), (8, [3, 1], [6, 2]), (5, [1], [5]), (2, [1, 1, 1], [0, 1, 1])],
)
def test_rows_are_divided_by_shares(total: int, shares: list[int], rows: list[int]) -> None:
    assert divide(total, shares) == rows


@pytest.mark.parametrize(
    ("batch_size", "weights", "rows"),
    [(8, "", [4, 4]), (8, "3,1", [6, 2]), (8, "2,1,1", [4, 4]), (24, "1,100", None), (1, "", None)],
)
def test_each_rank_has_a_row(batch_size: int, weights: str, rows: list[int] | None) -> None:
    ranks = Ranks()
    ranks.count, ranks.node_numbers, ranks.hosts = 2, [0, 1], ["a", "b"]
    if rows is None:
        with pytest.raises(ConfigError, match="Rank 0 on a would have no row"):
            ranks.divide_rows(batch_size, weights)
    else:
        assert ranks.divide_rows(batch_size, weights) == rows


def test_fsdp_needs_a_row_for_each_micro_batch() -> None:
    refuse_few_rows([22, 2], 11)
    with pytest.raises(ConfigError, match="2 rows of a rank are too few"):
        refuse_few_rows([22, 2], 2)


def test_several_ranks_refuse_to_pause() -> None:
    ranks = Ranks()
    config = build_config(
        [read_recipe(DEFAULT_RECIPE), Layer("", {"work": {"polite": True}})], SHAPES
    )
    refuse_settings(config, ranks)
    ranks.count = 2
    with pytest.raises(ConfigError, match="--polite"):
        refuse_settings(config, ranks)


def test_each_rank_has_short_and_long_captions() -> None:
    dealt = RankRows.deal([6, 2], 1)
    assert sorted(np.concatenate(dealt.rows).tolist()) == list(range(8))
    assert dealt.own.tolist() == [2, 6]
    assert [part.tolist() for part in RankRows.deal([3, 3], 0).rows] == [[0, 2, 4], [1, 3, 5]]


def micro_batches(ranks: Ranks) -> list[slice]:
    rows = [6, 2]
    return ranks.cut_micro_batches(rows[ranks.rank], rows, 4)


def test_ranks_make_equally_many_micro_batches(pool: RankPool) -> None:
    cuts = pool.run(2, micro_batches)
    assert cuts == [[slice(0, 3), slice(3, 6)], [slice(0, 1), slice(1, 2)]]
    assert ALONE.cut_micro_batches(6, (), 4) == [slice(0, 4), slice(4, 6)]


def error(message: str, time: int = 0, lost_others: bool = False) -> dict[str, Any]:
    return {"message": message, "time": time, "lost_others": lost_others}


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        ([None, None], None),
        ([error("no room", 2), error("lost", 1, True)], "Rank 0 on a ended: no room"),
        ([error("lost", 1, True), error("no room", 1)], "Rank 1 on b ended: no room"),
        ([error("late", 2), error("early", 1)], "Rank 1 on b ended: early"),
        ([error("lost", 1, True), error("")], "Ended without a message, so killed or cut off: rank 1 on b."),
        ([error("lost", 1, True), None], "Did not answer, so paused or cut off: rank 1 on b."),
        ([error("no room"), None], "Rank 0 on a ended: no room"),
    ],
)  # fmt: skip
def test_a_stop_is_explained_in_one_sentence(
    errors: list[dict[str, Any] | None], reason: str | None
) -> None:
    assert describe_stop(errors, ["a", "b"]) == reason


@pytest.mark.parametrize(
    ("raised", "changes"),
    [
        (LostRank("gone"), True),
        (CheckpointError("no room"), True),
        (OutOfMemory("Out of memory at step 3"), True),
        (TrainingError("Rank 1 has other batches"), False),
    ],
)
def test_an_error_is_told_once_and_says_whether_a_restart_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: LapclipError, changes: bool
) -> None:
    first, second = (tmp_path / f"attempt_{number}" / "0" / "error.json" for number in range(2))
    first.parent.mkdir(parents=True)
    monkeypatch.setenv(ERROR_FILE, str(first))
    write_error_file(raised)
    details = json.loads(first.read_text())["message"]["extraInfo"]
    assert details["is_worth_a_restart"] is changes
    monkeypatch.setenv(ERROR_FILE, str(second))
    monkeypatch.setenv(RESTART_COUNT, "1")
    ranks = Ranks()
    assert reason_of_last_stop(ranks) == f"Rank 0 on {ranks.hosts[0]} ended: {raised.message}"
    # Torch starts ranks again with the same number when another computer joins.
    assert reason_of_last_stop(ranks) is None
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "no folder" / "error.json"))
    write_error_file(raised)


def test_what_other_ranks_say_is_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RESTART_COUNT, "0")
    ranks = Ranks()
    ranks.hosts = ["a", "b"]
    said = [{"message": "no\x1b[2J\nroom" + "!" * 999, "time": "now"}, ["?"]]
    monkeypatch.setattr(ranks, "gather_json", lambda own: said)
    reason = reason_of_last_stop(ranks)
    assert reason is not None
    assert reason.isprintable()
    assert len(reason) < 400


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("run/start/model.safetensors", "run/start/model.safetensors"),
        ("cache/features-1.npy", "cache/features-1.npy"),
        ("run/..\\..\\x.bat", None),
        ("run/C:\\x.bat", None),
        ("run/x:stream", None),
        ("run/a\nb", None),
        ("run/../x", None),
        ("run//x", None),
        ("run/", None),
        ("run/.", None),
        ("other/x", None),
        ("cache/features-x/../../y.npy", None),
        ("cache/features-x\\..\\y.npy", None),
        ("cache/other.npy", None),
    ],
)
def test_files_of_the_writer_stay_in_their_folders(
    tmp_path: Path, name: str, place: str | None
) -> None:
    folder = tmp_path.resolve()
    folders = {"run": folder / "run", "cache": folder / "cache"}
    if place is None:
        with pytest.raises(TrainingError, match="another folder"):
            place_of_file(name, folders)
    else:
        assert place_of_file(name, folders) == folder / place


def test_advice_divides_rows_so_that_hosts_finish_together() -> None:
    advice = advise_rows(["desktop", "laptop"], [64, 64], [1.0, 3.0])
    assert (advice.slowest, advice.best_rows) == ("laptop", [96, 32])
    assert advice.step_seconds == 3.0
    assert advice.best_step_seconds == pytest.approx(1.5)
    assert advice.without_slowest_seconds == pytest.approx(2.0)
    assert advise_rows(["desktop", "laptop"], [12, 12], [0.01, 10.0]).best_rows == [23, 1]


STEP_CASES: list[dict[str, Any]] = [
    {},
    {"micro_batch": 3},
    {"loss_ring": True},
    {"loss": "sigmoid"},
    {"rows": "3,1"},
    {"rows": "11,2", "micro_batch": 2},
    {"optimizer": "muon"},
    {"lora_rank": 2},
    {"image_blocks": 1, "text_blocks": 0},
    {"phrases": 0.4},
    {"phrases": 0.4, "loss_ring": True, "micro_batch": 3},
    {"word_weight": 0.5},
    {"teacher": "vectors.npy"},
    {"consistency": 0.5},
    {"consistency": 0.5, "loss_ring": True},
    {"label_smoothing": 0.1, "symbol_dropout": 0.2},
    {"parallel": "fsdp", "micro_batch": 3},
    {"parallel": "fsdp", "dtype": "bfloat16"},
    {"parallel": "fsdp", "phrases": 0.4, "consistency": 0.5, "optimizer": "muon"},
]


def train_steps(ranks: Ranks, settings: dict[str, Any]) -> tuple[list[dict], dict[str, Tensor]]:
    """Return the metrics of three real steps and the weights after them."""
    batch_size = 13
    captions = [[f"a {word} cat", f"{word} snow"] for word in ("red", "big", "old", "wet", "shy")]
    captions = [captions[at % 5] for at in range(30)]
    draw = np.random.default_rng(1)
    pairs = Pairs(draw.integers(0, 256, (30, 32, 32, 3), dtype=np.uint8), captions)
    tokenizer = CharacterTokenizer.learn([text for texts in captions for text in texts])
    config = TrainConfig(
        **{
            "dtype": "float32",
            "batch_size": batch_size,
            "steps": 3,
            "crop": 0.6,
            "flip": 0.5,
            **settings,
        }
    )
    shape = replace(SHAPES["tiny"], vocabulary=tokenizer.vocabulary, context=32)
    vectors = np.ones((60, shape.embedding), np.float32) / math.sqrt(shape.embedding)
    prepared = {"teacher": TeacherVectors(vectors[:30], vectors)} if config.teacher else {}
    extras = Objectives(config, **prepared)
    plan = BatchPlan(pairs, tokenizer, 32, batch_size, 0, config.symbol_dropout, None, extras)
    model = CLIP(shape, seed=1)
    extras.start(model, is_new=True)
    freeze(model, config)
    if config.parallel == "fsdp" and ranks.is_distributed:
        half = None if config.dtype == "float32" else DTYPES[config.dtype]
        shard_towers(model, ranks, half, torch.float32)
    step = make_step(model, config, Cpu())
    if ranks.is_distributed:
        shares = [int(share) for share in config.rows.split(",")] if config.rows else [1, 1]
        plan = plan.for_rank(divide(batch_size, shares), ranks.rank)
        step.ranks = ranks
    metrics = []
    for number in range(1, 4):
        watch = Stopwatch(Cpu().synchronise, on=False)
        found = step(plan.batch(number), number, 1e-3, watch)()
        metrics.append({**found.scalars, **found.part_norms})
    vectors_BE = Embedder(model, tokenizer, Cpu()).encode_text(["a red cat"])
    assert vectors_BE.dtype == np.float32
    weights = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    return metrics, weights


@pytest.mark.parametrize("settings", STEP_CASES, ids=str)
def test_real_steps_of_two_ranks_are_those_of_one_process(
    pool: RankPool, settings: dict[str, Any]
) -> None:
    alone_metrics, alone_weights = train_steps(ALONE, settings)
    results = pool.run(2, train_steps, settings)
    # FSDP rounds norms and embeddings to half precision too.
    metric_rtol, metric_atol, atol = 2e-4, 1e-5, 2e-4
    if "dtype" in settings:
        metric_rtol, metric_atol, atol = 5e-2, 5e-3, 5e-3
    for metrics, weights in results:
        for one, other in zip(metrics, alone_metrics, strict=True):
            assert one == pytest.approx(other, rel=metric_rtol, abs=metric_atol)
        for name, weight in alone_weights.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=atol, msg=name)
