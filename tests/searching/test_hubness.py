"""Search with what was measured of a model's scores: the order of answers, the index, and what is said."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lapclip.embedder import load
from lapclip.evaluation.calibration import Calibration, save_calibration
from lapclip.evaluation.hubness import hubness_of
from lapclip.searching.index import Entry, Index
from lapclip.searching.library import Library
from lapclip.searching.query import nearest, parse, vector_of

from .made import Watched, draw, draw_many, index_now, vectors_of

BANK = [
    "a red cat",
    "two blue dogs at night",
    "a house in the snow",
    "a green snail",
    "three boats at sunset",
]


@pytest.fixture
def model(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "mine"))


def calibrate(model: Path, share: float = 0.7, captions: int = len(BANK)) -> Calibration:
    """Make as if this had been measured."""
    embedder = load(model)
    found = Calibration(
        model=embedder.fingerprint(),
        bank=embedder.encode_text(BANK[:captions]).astype(np.float16),
        share=share,
        usual_hubness=0.1,
        min_words=4,
        recall_before=0.21,
        recall_after=0.235,
    )
    save_calibration(found, model / "calibration.safetensors")
    return found


def expected(
    library: Library, found: Calibration, query: str, images: list[Path]
) -> list[tuple[str, float]]:
    """The order that plain numbers give."""
    vectors = vectors_of(images, library.model).astype(np.float16).astype(np.float32)
    parsed = parse(query)
    scores = vectors @ vector_of(parsed, library.model.encode_text)
    if found.corrects(parsed.wanted):
        hubness = hubness_of(vectors, found.bank)
        scores = scores - np.float32(found.share) * (hubness - np.float32(0.1))
    return [(images[at].name, float(scores[at])) for at in np.argsort(-scores, kind="stable")]


@pytest.mark.parametrize("query", ["a red cat", "two red cats on the left, at night"])
def test_answers_come_in_the_order_of_the_corrected_scores(
    photos: Path, model: Path, query: str
) -> None:
    images, found = draw_many(photos, 12), calibrate(model)
    library = index_now(photos, Watched(model))
    hits = library.find(query, 12)
    plain = expected(library, found, query, images)
    assert [hit.path.name for hit in hits] == [name for name, _ in plain]
    assert [hit.score for hit in hits] == pytest.approx([score for _, score in plain], abs=1e-5)
    some = library.find(query, 5, 2, exclude=("000.png",))
    assert [hit.path.name for hit in some] == [name for name, _ in plain if name != "000.png"][2:7]


def test_an_image_as_the_question_gets_no_correction(photos: Path, model: Path) -> None:
    images = draw_many(photos, 8)
    library = index_now(photos, Watched(model))
    before, before_minus = library.like_image(images[3], 8), library.find("-snow", 8)
    calibrate(model)
    library = index_now(photos, Watched(model))
    assert library.like_image(images[3], 8) == before
    assert library.find("-snow", 8) == before_minus


def test_an_index_made_before_gets_it_without_reading_an_image_again(
    photos: Path, model: Path
) -> None:
    draw_many(photos, 9)
    index_now(photos, Watched(model))
    found = calibrate(model)
    again = Watched(model)
    library = index_now(photos, again)
    assert again.batches == []
    table, vectors = library._index.snapshot(again.identity, found.digest)
    assert np.array_equal(table.hubness, hubness_of(vectors, found.bank)[table.rows])
    draw(photos / "new.png", 77)
    draw(photos / "000.png", 78)  # other content under the same name
    (photos / "001.png").rename(photos / "moved.png")
    (photos / "002.png").unlink()
    table, vectors = index_now(photos, again)._index.snapshot(again.identity, found.digest)
    assert np.array_equal(table.hubness, hubness_of(vectors, found.bank)[table.rows])
    assert len(again.batches) == 1


def test_an_index_knows_the_hubness_by_the_last_bank_only(photos: Path, model: Path) -> None:
    """Two models may share an image tower, and with it an index."""
    draw_many(photos, 4)
    libraries = []
    for captions in (5, 3):
        calibrate(model, 0.2, captions)
        libraries.append(index_now(photos, Watched(model)))
    first, second = (library.current() for library in libraries)
    query = parse("a red cat at night")
    assert (first.ask(query).correction, second.ask(query).correction) == (None, 0.2)


def test_what_was_measured_of_another_model_is_not_used(photos: Path, model: Path) -> None:
    draw_many(photos, 4)
    found = calibrate(model)
    save_calibration(replace(found, model="another"), model / "calibration.safetensors")
    answer = index_now(photos, Watched(model)).ask(parse("a red cat in the snow"), 4)
    assert answer.correction is None


def test_a_long_query_is_corrected_and_a_short_one_and_one_with_a_minus_are_not(
    photos: Path, model: Path
) -> None:
    draw_many(photos, 6)
    calibrate(model)
    library = index_now(photos, Watched(model))
    assert library.ask(parse("a red cat at night"), 6).correction == 0.7
    assert library.ask(parse("a cat"), 6).correction is None
    assert library.ask(parse("a red cat at night -snow"), 6).correction is None
    assert any("23.5%" in note for note in library.model_notes())


def test_bars_run_from_an_average_image_to_the_best_one(photos: Path, model: Path) -> None:
    images, found = draw_many(photos, 12), calibrate(model)
    library = index_now(photos, Watched(model))
    scores = np.array([score for _, score in expected(library, found, "a cat", images)])
    bars = np.clip((scores - scores.mean()) / (scores[0] - scores.mean()), 0, 1)
    hits = library.find("a cat", 12)
    assert [hit.bar for hit in hits] == pytest.approx(bars.tolist(), abs=1e-3)
    assert hits[0].bar == 1.0
    assert hits[-1].bar == 0.0
    assert [hit.bar for hit in library.find("a cat", 4, 5)] == [
        hit.bar for hit in hits[5:9]
    ]  # also on a later page
    assert library.like_image(images[3], 3)[0].bar == 1.0
    assert {hit.bar for hit in library.newest(3)} == {None}


def test_a_single_image_and_an_empty_answer_have_bars_too(photos: Path, model: Path) -> None:
    draw_many(photos, 1)
    library = index_now(photos, Watched(model))
    (hit,) = library.find("a cat", 5)
    assert hit.bar is not None
    assert 0 <= hit.bar <= 1
    assert library.find("a cat", 5, exclude=("*",)) == []


def test_notes_say_that_nothing_shows_whether_an_image_fits(photos: Path, model: Path) -> None:
    draw_many(photos, 3)
    library = index_now(photos, Watched(model))
    notes = library.notes_on(library.ask(parse("a cat"), 3))
    assert (
        notes.count(
            "Results are ranked by similarity; nothing here shows whether any of them fits."
        )
        == 1
    )


def test_corrected_scores_of_many_images_against_plain_numpy() -> None:
    draw, count, width = np.random.default_rng(0), 20_000, 64
    vectors = draw.standard_normal((count, width), dtype=np.float32)
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)
    less = draw.uniform(-0.1, 0.1, count).astype(np.float32)
    rows = np.flatnonzero(draw.uniform(size=count) < 0.9)
    question = vectors[7].astype(np.float32)
    exact = vectors[rows].astype(np.float64) @ question.astype(np.float64) - less[rows]
    for limit in (1, 20, 500):
        places, scores = nearest(vectors, rows, rows, question, limit, less[rows])
        assert np.abs(np.sort(exact)[::-1][:limit] - scores).max() < 1e-6
        assert np.abs(exact[places] - scores).max() < 1e-6


def test_hubness_follows_its_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapclip.searching.index.SPARE_ROWS", 1)
    index = Index(tmp_path / "index")
    index.open()
    index.begin("synthetic", 4)
    close = np.arange(10, dtype=np.float32)
    rows = index.append(np.eye(10, 4, dtype=np.float16))
    index.put(Entry(0, f"{row}.jpg", 1, 1, f"{row:x}", None, 1, 1, row) for row in rows)
    numbers, unknown = index.without_hubness("bank")
    assert unknown.tolist() == rows
    index.save_hubness(numbers[:8], close[:8])
    assert index.without_hubness("bank")[1].tolist() == [8, 9]
    table, _ = index.snapshot("synthetic", "bank")
    assert np.array_equal(table.hubness[:8], close[:8])
    assert np.isnan(table.hubness[8:]).all()
    assert np.isnan(index.snapshot("synthetic", "another")[0].hubness).all()
    index.mark_gone(range(1, 7))  # the first six rows
    index.forget_gone()
    table, _ = index.snapshot("synthetic", "bank")
    assert table.rows.tolist() == [0, 1, 2, 3]
    assert np.array_equal(table.hubness[:2], close[6:8])
    entry = index.entries("row = 0")[0]
    index.put([entry._replace(digest="new", row=index.append(np.eye(1, 4))[0])])
    assert sorted(index.without_hubness("bank")[0].tolist()) == sorted([entry.number, 9, 10])
    assert len(index.without_hubness("another")[0]) == 4
