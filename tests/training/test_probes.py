from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from PIL import Image

from lapclip.data.dataset import Pairs
from lapclip.training.probes import ProbeCaptions, own_captions

from ..conftest import SMALL
from ..small_runs import train


def pairs(count: int = 30) -> Pairs:
    pixels = np.zeros((count, 16, 16, 3), dtype=np.uint8)
    pixels[:, :, :, 0] = np.arange(count)[:, None, None]
    return Pairs(pixels, [[f"caption {at}", f"other {at}"] for at in range(count)])


class Told:
    """Gives back fixed embeddings for the user's captions."""

    def encode_text(self, captions: list[str]) -> np.ndarray:
        return np.eye(30)[: len(captions)]


def test_a_perfect_model_ranks_every_right_image_first(tmp_path: Path) -> None:
    probes = ProbeCaptions(pairs(), ["mine"], tmp_path / "pictures")
    images, texts = np.eye(30), np.repeat(np.eye(30), 2, axis=0)
    *fixed, own = probes.answers(Told(), images, texts)  # type: ignore[arg-type]
    assert len(fixed) == 6
    for answer in fixed:
        assert answer["rank"] == 1
        assert answer["top"][0]["picture"] == answer["right"]
        assert answer["caption"] == f"caption {answer['right']}"
        assert len(answer["top"]) == 5
    assert own["own"]
    assert own["rank"] is own["right"] is None
    assert own["top"][0] == {"picture": 0, "score": 1.0}
    assert os.name == "nt" or (tmp_path / "pictures").stat().st_mode & 0o077 == 0
    for answer in (*fixed, own):
        for entry in answer["top"]:
            with Image.open(tmp_path / "pictures" / f"{entry['picture']}.png") as image:
                assert image.convert("RGB").getpixel((0, 0)) == (entry["picture"], 0, 0)


def test_the_rank_counts_the_images_that_are_nearer(tmp_path: Path) -> None:
    images = np.array([[3.0], [2.0], [1.0]])
    answers = ProbeCaptions(pairs(3), [], tmp_path).answers(Told(), images, np.ones((6, 1)))  # type: ignore[arg-type]
    assert [answer["rank"] for answer in answers] == [1, 2, 3]


def test_captions_of_ones_own_are_separated_by_bars() -> None:
    assert own_captions(" a red cat | two dogs||") == ["a red cat", "two dogs"]
    assert own_captions("") == []


def test_a_run_asks_the_probe_captions_at_every_evaluation(here: Path) -> None:
    train("first-run", [*SMALL, "work.ask=a red cat|<b>bold</b>"], name="run")
    events = [
        json.loads(line) for line in (here / "runs/run/events.jsonl").read_text().splitlines()
    ]
    probed = [event for event in events if event["type"] == "looked"]
    assert [event["step"] for event in probed] == [
        event["step"] for event in events if event["type"] == "evaluation"
    ]
    assert [answer["caption"] for answer in probed[-1]["answers"][-2:]] == [
        "a red cat",
        "<b>bold</b>",
    ]
    pictures = {
        entry["picture"]
        for event in probed
        for answer in event["answers"]
        for entry in answer["top"]
    }
    assert all((here / "runs/run/pictures" / f"{image}.png").is_file() for image in pictures)
