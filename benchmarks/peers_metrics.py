"""Do our scores agree with CLIP_benchmark's on the same embeddings? Run in the peers' environment (`make bench-peers`):

    benchmarks/.venv/bin/python benchmarks/peers_metrics.py
    benchmarks/.venv/bin/python benchmarks/peers_metrics.py --run runs/mine --data flickr8k --split val

Retrieval with one and with several captions an image, both ways; zero-shot classification with templates. Embeddings
are random ones, and those of a real model on real images where they are named. CLIP_benchmark's own `evaluate` is
called, with a model that looks its embeddings up. Prints the figures and the largest difference; over 1e-6 it fails.

The peer multiplies in float32, where a right answer and a rival closer than rounding (some 1e-8) may change places;
ours does not round. So the definitions are compared on float64 embeddings, where there must be no difference, and
float32 is shown beside them: it may differ by the questions with a rival within 2e-7 alone, which are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import torch
from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval
from torch import Tensor

from lapclip.evaluation.retrieval import RANKS, retrieval
from lapclip.evaluation.zeroshot import class_answers, zeroshot_of
from lapclip.prompts import class_embeddings

TOLERANCE = 1e-6
NEAR = 2e-7
Embeddings = tuple[np.ndarray, np.ndarray, np.ndarray]


class LookUp:
    """A model for the peer: its images and captions are numbers of rows."""

    def __init__(self, image_NE: np.ndarray, text_ME: np.ndarray) -> None:
        self._images, self._texts = torch.from_numpy(image_NE), torch.from_numpy(text_ME)

    def encode_image(self, rows: Tensor) -> Tensor:
        return self._images[rows]

    def encode_text(self, rows: Tensor) -> Tensor:
        return self._texts[rows]


class Batches(list):
    """A loader for the peer, which asks it for its classes."""

    dataset: SimpleNamespace


def random_pairs(
    pictures: int, captions_each: int, noise: float, seed: int, width: int = 512
) -> Embeddings:
    """Captions near their images, as far as the noise leaves them."""
    draw = np.random.default_rng(seed)
    images = _unit(draw.normal(size=(pictures, width)))
    owner = np.repeat(np.arange(pictures), captions_each)
    return images, _unit(images[owner] + noise * draw.normal(size=(len(owner), width))), owner


def peer_retrieval(
    image_NE: np.ndarray, text_ME: np.ndarray, owner: np.ndarray, batch: int = 128
) -> dict[str, float]:
    """CLIP_benchmark's retrieval, batch by batch as it wants its data."""

    def batches() -> Iterator[tuple[Tensor, list[list[int]]]]:
        captions = [np.flatnonzero(owner == image).tolist() for image in range(len(image_NE))]
        for first in range(0, len(image_NE), batch):
            rows = torch.arange(first, min(first + batch, len(image_NE)))
            yield rows, [captions[row] for row in rows]

    # The peer groups captions by image; ours may come in any order.
    order = np.argsort(owner, kind="stable")
    assert (order == np.arange(len(order))).all()
    model = LookUp(image_NE, text_ME)
    with quiet():
        found = zeroshot_retrieval.evaluate(
            model, batches(), torch.tensor, "cpu", amp=False, recall_k_list=[*RANKS]
        )
    named = {"t2i": "image_retrieval", "i2t": "text_retrieval"}
    return {
        f"{way}_r{k}": found[f"{name}_recall@{k}"] for way, name in named.items() for k in RANKS
    }


def peer_zeroshot(
    image_NE: np.ndarray, text_SE: np.ndarray, label_N: np.ndarray, templates: int
) -> dict[str, float]:
    """CLIP_benchmark's classification; sentence s of class c is row c * templates + s."""
    model = LookUp(image_NE, text_SE)
    names = [str(at) for at in range(len(text_SE) // templates)]
    sentences = {name: [int(name) * templates + at for at in range(templates)] for name in names}
    data = Batches([(torch.arange(len(image_NE)), torch.from_numpy(label_N))])
    data.dataset = SimpleNamespace(classes=names)
    with quiet():
        found = zeroshot_classification.evaluate(
            model, data, torch.tensor, names, sentences, "cpu", amp=False
        )
    return {
        "top1": found["acc1"],
        "top5": found["acc5"],
        "mean_per_class": found["mean_per_class_recall"],
    }


def compare_retrieval(name: str, embeddings: Embeddings) -> tuple[float, float]:
    """The largest differences of recall, in float64 and in float32."""
    images, texts, owner = embeddings
    single = _compare(
        f"retrieval, {name}, float32", retrieval(*embeddings), peer_retrieval(*embeddings)
    )
    images, texts = (_unit(rows.astype(np.float64), np.float64) for rows in (images, texts))
    near = near_ties(images, texts, owner)
    print(
        f"  questions with a rival within {NEAR:g}: {near['t2i']} of captions, {near['i2t']} of images"
    )
    if single > TOLERANCE + max(near["t2i"] / len(texts), near["i2t"] / len(images)):
        raise SystemExit("float32 differs by more than near ties explain")
    double = images, texts, owner
    return _compare(
        f"retrieval, {name}, float64", retrieval(*double), peer_retrieval(*double)
    ), single


def near_ties(image_NE: np.ndarray, text_ME: np.ndarray, owner: np.ndarray) -> dict[str, int]:
    """How many questions have a wrong answer that float32 can take for as good as the right one."""
    scores_MN = text_ME @ image_NE.T
    rows = np.arange(len(text_ME))
    own_M = scores_MN[rows, owner]
    best_N = np.full(len(image_NE), -np.inf)
    np.maximum.at(best_N, owner, own_M)
    wrong_MN = np.ones(scores_MN.shape, dtype=bool)
    wrong_MN[rows, owner] = False
    t2i = ((np.abs(scores_MN - own_M[:, None]) < NEAR) & wrong_MN).any(axis=1)
    i2t = ((np.abs(scores_MN - best_N[None]) < NEAR) & wrong_MN).any(axis=0)
    return {"t2i": int(t2i.sum()), "i2t": int(i2t.sum())}


def compare_zeroshot(classes: int, templates: int, seed: int) -> tuple[float, float]:
    """The largest difference of the shares of right classes, which float32 makes as well."""
    draw = np.random.default_rng(seed)
    sentences = _unit(
        np.repeat(draw.normal(size=(classes, 64)), templates, axis=0)
        + draw.normal(size=(classes * templates, 64))
    )
    labels = np.concatenate([np.arange(classes), draw.integers(classes, size=3000)])
    images = _unit(sentences[labels * templates] + 1.5 * draw.normal(size=(len(labels), 64)))
    rows = class_embeddings(
        lambda _: sentences, [str(at) for at in range(classes)], ["{}"] * templates
    )
    ours = zeroshot_of(
        class_answers(images, rows, labels), labels, [str(at) for at in range(classes)]
    )
    theirs = peer_zeroshot(images, sentences, labels, templates)
    worst = _compare(f"zero-shot, {classes} classes, {templates} templates", ours, theirs)
    return worst, worst


def real_pairs(run: str, source: str, split: str) -> Embeddings:
    """Embeddings of a trained model."""
    from lapclip.config import DataConfig
    from lapclip.data.loading import load_data
    from lapclip.embedder import load

    model = load(run)
    return model.encode_pairs(
        load_data(DataConfig(source=source), model.model.shape.image_size).splits[split]
    )


def _compare(name: str, ours: dict, theirs: dict[str, float]) -> float:
    worst = max(abs(ours[figure] - value) for figure, value in theirs.items())
    shown = ", ".join(f"{figure} {value:.4f}" for figure, value in theirs.items())
    print(f"{name}: largest difference {worst:.1e} ({shown})", flush=True)
    return worst


def _unit(rows: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(dtype)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the peer's progress bars."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", help="a run or a model to embed real images with")
    parser.add_argument("--data", default="flickr8k")
    parser.add_argument("--split", default="val")
    asked = parser.parse_args()
    worst = [
        compare_retrieval("1,000 images, one caption each", random_pairs(1000, 1, 0.3, 0)),
        compare_retrieval("1,000 images, five captions each", random_pairs(1000, 5, 0.4, 1)),
        compare_retrieval("300 images, nothing learnt", random_pairs(300, 5, 1e6, 2)),
        compare_zeroshot(10, 1, 3),
        compare_zeroshot(50, 7, 4),
    ]
    if asked.run:
        name = f"{asked.run} on {asked.data}, {asked.split}"
        worst.append(compare_retrieval(name, real_pairs(asked.run, asked.data, asked.split)))
    versions = {
        name: importlib.metadata.version(name) for name in ("clip_benchmark", "torch", "numpy")
    }
    double, single = (max(pair[at] for pair in worst) for at in (0, 1))
    found = {
        "largest_difference": double,
        "largest_difference_in_float32": single,
        "tolerance": TOLERANCE,
    }
    print(json.dumps({**found, "versions": versions}))
    return int(double > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
