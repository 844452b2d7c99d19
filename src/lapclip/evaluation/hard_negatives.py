"""Whether the right image wins against wrong ones that are easy, medium or hard to tell from it.

How hard a wrong image is does not come from the model under test: it is how alike the two images' captions are in
their words (`Wording`). Of all wrong images, from the most alike to the least:

    hard    the eleven most alike
    medium  eleven drawn from the rest of the most alike tenth; among fewer than 230 wrong ones, the next eleven
    easy    eleven drawn from the less alike half; among fewer than 44 wrong ones, from those that are left

With the right one that makes twelve candidates, as many as in a batch of the published run, whose claim was 95 %, 28 %
and 8 %. Images that share a caption word for word are not wrong for each other. In a set of fewer than 34 images
there are fewer negatives: a third of the others.

Shapes: N images, M captions, Q images asked about, W wrong images of one kind, V words.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lapclip.data.phrases import words
from lapclip.evaluation.intervals import mean_intervals
from lapclip.evaluation.ranks import best_images, blocks
from lapclip.seeding import generator

KINDS = ("easy", "medium", "hard")
NEGATIVES = 11
MOST_ASKED, MOST_OTHERS = 2_000, 10_000
"""Images asked about, and images that wrong ones are chosen from; of more, so many are drawn."""
MOST_CONFUSED, MOST_COMPARED = 8, 10_000


def negatives(
    image_NE: np.ndarray,
    text_ME: np.ndarray,
    image_M: np.ndarray,
    captions: Sequence[Sequence[str]],
) -> dict[str, Any] | None:
    """Accuracy against each kind of wrong image; None where there are fewer than four images to choose from.

    `accuracy` is the share of captions whose own image beats all wrong ones of a kind, `pairwise` the share of wrong
    ones that it beats. Both with 95 % intervals over images. A tie counts against the model.
    """
    chosen = choose_negatives(captions)
    if chosen is None:
        return None
    asked_Q, wrong = chosen["asked"], chosen["wrong"]
    question_N = np.full(len(image_NE), -1)
    question_N[asked_Q] = np.arange(len(asked_Q))
    rows = np.flatnonzero(question_N[image_M] >= 0)
    found: dict[str, Any] = {
        "negatives": wrong["hard"].shape[1],
        "pictures": len(asked_Q),
        "captions": len(rows),
    }
    found["chance"] = 1 / (1 + found["negatives"])
    for kind in KINDS:
        all_Q, part_Q, count_Q = (
            np.zeros(len(asked_Q)),
            np.zeros(len(asked_Q)),
            np.zeros(len(asked_Q)),
        )
        for at in blocks(len(rows)):
            row_b = rows[at]
            question_b = question_N[image_M[row_b]]
            # Own and wrong by one and the same sum, so that equal images tie.
            shown = np.concatenate([image_M[row_b, None], wrong[kind][question_b]], axis=1)
            scores = np.einsum("bwe,be->bw", image_NE[shown], text_ME[row_b])
            beaten_bW = scores[:, 1:] < scores[:, :1]
            np.add.at(all_Q, question_b, beaten_bW.all(axis=1))
            np.add.at(part_Q, question_b, beaten_bW.mean(axis=1))
            np.add.at(count_Q, question_b, 1)
        sure = mean_intervals(np.stack([all_Q, part_Q]), np.stack([count_Q, count_Q]))
        found[kind] = {
            "accuracy": float(all_Q.sum() / count_Q.sum()),
            "pairwise": float(part_Q.sum() / count_Q.sum()),
            "intervals": {"accuracy": sure[0], "pairwise": sure[1]},
            "similarity": chosen["similarity"][kind],
        }
    return found


def choose_negatives(captions: Sequence[Sequence[str]]) -> dict[str, Any] | None:
    """Which images are asked about, and for each the wrong ones of each kind; with their mean likeness."""
    draw = generator(0, "negatives")
    with_captions = np.array([at for at, options in enumerate(captions) if options], dtype=np.int64)
    others_O = _some(with_captions, MOST_OTHERS, draw)
    size = min(NEGATIVES, (len(others_O) - 1) // 3)
    if size < 1:
        return None
    # From here on an image is its index among those that were drawn.
    drawn = [captions[int(at)] for at in others_O]
    asked_Q = _some(np.arange(len(drawn)), MOST_ASKED, draw)
    wording, sharing = Wording(drawn), _sharing(drawn)
    likeness: dict[str, list[float]] = {kind: [] for kind in KINDS}
    wrong: dict[str, list[np.ndarray]] = {kind: [] for kind in KINDS}
    asked = []
    for image, like_O in zip(asked_Q, _likenesses(wording, asked_Q, len(drawn)), strict=True):
        left_out = list(sharing(int(image)))
        like_O[left_out] = -1.0
        order = np.argsort(-like_O, kind="stable")[: len(drawn) - len(left_out)]
        if len(order) < 3 * size:  # nearly all share its captions
            continue
        asked.append(others_O[image])
        tenth = max(2 * size, len(order) // 10)
        half = max(tenth, len(order) // 2)  # no image is of two kinds
        pools = {"hard": order[:size], "medium": order[size:tenth], "easy": order[half:]}
        for kind, pool in pools.items():
            taken = pool if len(pool) == size else draw.choice(pool, size, replace=False)
            wrong[kind].append(others_O[taken])
            likeness[kind].append(float(like_O[taken].mean()))
    if not asked:
        return None
    return {
        "asked": np.array(asked),
        "wrong": {kind: np.stack(rows) for kind, rows in wrong.items()},
        "similarity": {kind: float(np.mean(values)) for kind, values in likeness.items()},
    }


def most_confused(
    image_NE: np.ndarray,
    text_ME: np.ndarray,
    image_M: np.ndarray,
    captions: Sequence[Sequence[str]],
) -> list[dict[str, Any]]:
    """Captions that prefer a wrong image by most, each image once: the caption's image and the preferred one."""
    texts = [caption for options in captions for caption in options]
    rows = _some(np.arange(len(texts)), MOST_COMPARED, generator(0, "confused"))
    found_m, score_m = (part[:, 0] for part in best_images(image_NE, text_ME[rows], 1))
    own_m = np.einsum("me,me->m", image_NE[image_M[rows]], text_ME[rows])
    confused: list[dict[str, Any]] = []
    seen: set[int] = set()
    for at in np.argsort(own_m - score_m, kind="stable"):
        own, preferred = int(image_M[rows[at]]), int(found_m[at])
        if len(confused) == MOST_CONFUSED or not score_m[at] > own_m[at]:
            break
        if (
            own in seen
            or preferred in seen
            or own == preferred
            or texts[rows[at]] in captions[preferred]
        ):
            continue
        seen |= {own, preferred}
        confused.append({
            "caption": texts[rows[at]],
            "own": own,
            "own_score": float(own_m[at]),
            "preferred": preferred,
            "preferred_score": float(score_m[at]),
            "preferred_caption": captions[preferred][0] if captions[preferred] else "",
        })  # fmt: skip
    return confused


def _likenesses(wording: Wording, asked_Q: np.ndarray, others: int) -> Iterator[np.ndarray]:
    """For each image asked about, how alike it is to each of the others: a row at a time, in blocks."""
    for asked in blocks(len(asked_Q)):
        rows = wording.rows(asked_Q[asked])
        every = np.arange(others)
        yield from np.concatenate(
            [rows @ wording.rows(every[at]).T for at in blocks(others)], axis=1
        )


def _sharing(captions: Sequence[Sequence[str]]) -> Callable[[int], set[int]]:
    """Which images have a caption in common with one, itself among them."""
    having: dict[str, set[int]] = defaultdict(set)
    for at, options in enumerate(captions):
        for caption in options:
            having[caption].add(at)
    return lambda image: {image}.union(*(having[caption] for caption in captions[image]))


def _some(rows: np.ndarray, most: int, draw: np.random.Generator) -> np.ndarray:
    """At most so many of the rows, drawn, in their order."""
    return rows if len(rows) <= most else np.sort(draw.choice(rows, most, replace=False))


MOST_WORDS = 20_000
"""Words that are kept, the most common: rarer ones are in so few captions that they say little about likeness."""


class Wording:
    """The words of some images, of which no model under test has a say: how alike are captions by their words alone?

    tf-idf: a word counts for more the fewer images have it. Two images are as alike as the directions of their words,
    all captions of each taken together: 0 for no word in common, 1 for the same words equally often.
    """

    def __init__(self, captions: Sequence[Sequence[str]]) -> None:
        self._words = [
            Counter(word for caption in options for word in words(caption)) for options in captions
        ]
        images = Counter(word for bag in self._words for word in bag)
        self._index = {word: at for at, (word, _) in enumerate(images.most_common(MOST_WORDS))}
        # Smoothed as in Salton and Buckley 1988: a word that all have still counts a little.
        self._weights = {
            word: np.log((1 + len(captions)) / (1 + images[word])) + 1 for word in self._index
        }

    def rows(self, images: Sequence[int] | np.ndarray) -> np.ndarray:
        """The words of some images as unit-length rows."""
        rows_NV = np.zeros((len(images), len(self._index)), dtype=np.float32)
        for row, image in zip(rows_NV, images, strict=True):
            for word, count in self._words[image].items():
                if word in self._index:
                    row[self._index[word]] = count * self._weights[word]
        return rows_NV / np.maximum(np.linalg.norm(rows_NV, axis=1, keepdims=True), 1e-12)
