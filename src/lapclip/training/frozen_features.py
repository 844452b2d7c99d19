"""Features of the frozen part of each tower, computed once for all pairs and cached.

Training continues from them with the same result, up to rounding.

Shapes: N images or captions, B those of a batch, L tokens, S image side, C color channels.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from lapclip.config import NEVER, Config
from lapclip.data.batches import BatchPlan
from lapclip.data.dataset import DataSet, Pixels
from lapclip.data.pixels import normalise, view
from lapclip.data.ragged import Ragged
from lapclip.data.tokenizers import pad
from lapclip.embedder import Embedder, distinct_captions
from lapclip.fingerprint import frozen_fingerprint
from lapclip.model.clip import CLIP
from lapclip.model.pretrained_towers import PretrainedTower
from lapclip.progress import DataProgress, ignore_progress
from lapclip.text import duration
from lapclip.text import size as size_text
from lapclip.training.array_cache import array_path, has_room, read_array, write_array
from lapclip.training.distributed import ALONE, Ranks
from lapclip.training.held_out_features import FeatureEmbedder, HeldOutFeatures, slices
from lapclip.training.step import TrainStep

IMAGE_BATCH, TEXT_BATCH = 32, 64  # for one forward pass
TEXTS_SORTED_TOGETHER = 4096  # by length, to save padding
MAX_HALF_FEATURE = 1e4  # larger features are not stored in half precision


class NotCacheable(Exception):
    """Features that cannot be cached: the disk has no room, or half precision cannot hold them."""


@dataclass(frozen=True)
class CachedFeatures:
    """Features of the training pairs, as batches take them, and of the held-out pairs."""

    images: np.ndarray | None
    """(views, N, ...)"""
    captions: Ragged | None
    held_out: HeldOutFeatures
    notes: list[str]
    """Reasons why a tower is not cached."""
    texts: dict[str, Ragged] = field(default_factory=dict)
    """Features of further texts, by name."""
    summary: str = ""
    """What was computed, how long it took and how large it is. Empty if nothing is cached."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is cached, so that each step computes the frozen parts."""
        return self.images is None and self.captions is None

    def of_images(self, rows: np.ndarray, views: np.ndarray) -> np.ndarray | None:
        if self.images is None:
            return None
        return self.images[views, rows]

    def of_captions(self, captions: np.ndarray, length: int) -> np.ndarray | None:
        if self.captions is None:
            return None
        return self.captions.padded(captions, length)

    def of_texts(self, name: str, numbers: np.ndarray, length: int) -> np.ndarray | None:
        if name not in self.texts:
            return None
        return self.texts[name].padded(numbers, length)


def with_features(embedder: Embedder, features: CachedFeatures | None, step: TrainStep) -> Embedder:
    """Return an embedder that uses cached features if there are any."""
    if features is None:
        return embedder
    return FeatureEmbedder(embedder, features.held_out, step.boundaries)


def cache_features(
    step: TrainStep,
    embedder: Embedder,
    plan: BatchPlan,
    data: DataSet,
    config: Config,
    progress: DataProgress | None,
    ranks: Ranks = ALONE,
) -> CachedFeatures | None:
    """Compute the features of frozen parts, or read them from the cache.

    Ranks share the work, and each gets all features. Returns None if nothing is frozen, or if the
    settings turn the cache off.
    """
    towers, notes = towers_to_cache(step.model, step.boundaries, config)
    uncached = CachedFeatures(None, None, HeldOutFeatures(data.held_out, None, None), notes)
    if not towers:
        return uncached if notes else None
    began = time.perf_counter()
    source = _FeatureSource(step, plan, data, config, progress or ignore_progress, ranks)
    images = captions = held_out_images = held_out_captions = None
    texts = {}
    contents = []
    try:
        if "image" in towers:
            images = source.train_images()
            held_out_images = source.held_out_images()
            views = f" in {len(images)} views" if len(images) > 1 else ""
            contents.append(f"{len(data.train):,} images{views}")
        if "text" in towers:
            captions = source.train_texts(plan.captions, "captions")
            contents.append(f"{len(plan.captions):,} captions")
            for name, tokens in plan.texts.items():
                texts[name] = source.train_texts(tokens, f"{name}s")
                contents.append(f"{len(tokens):,} {name}s of them")
            held_out_captions = source.held_out_captions(embedder)
    except NotCacheable as error:
        notes.append(f"what is frozen is computed at each step: {error}")
        return uncached
    origin = "found in the cache"
    if source.has_computed:
        origin = f"computed once in {duration(time.perf_counter() - began)}"
    summary = f"features of {', '.join(contents)}: {origin} ({size_text(source.bytes)})"
    held_out = HeldOutFeatures(data.held_out, held_out_images, held_out_captions)
    return CachedFeatures(images, captions, held_out, notes, texts, summary)


def towers_to_cache(
    model: CLIP, boundaries: dict[str, int], config: Config
) -> tuple[list[str], list[str]]:
    """Return the towers whose frozen part is worth caching, and why others are not cached."""
    if config.train.features == NEVER:
        return [], []
    towers, notes = [], []
    for tower, inputs in (("image", "images"), ("text", "captions")):
        network, boundary = getattr(model, tower), boundaries[tower]
        if boundary == 0 and network.depth > 0:
            continue  # at most the input embedding is frozen, and that costs little
        obstacle = _why_inputs_vary(tower, config)
        if (
            obstacle is None
            and isinstance(network, PretrainedTower)
            and not network.divides(boundary)
        ):
            obstacle = "it cannot be run in two parts"
        if obstacle:
            notes.append(f"{inputs} go through the frozen tower at each step, because {obstacle}")
        else:
            towers.append(tower)
    return towers, notes


def _why_inputs_vary(tower: str, config: Config) -> str | None:
    """Return why a tower never sees the same input twice. None if it does."""
    train = config.train
    if tower == "image" and not train.views:
        return "each has new crops; with --set train.views=4 four of each are cached"
    if tower == "image" and train.cheap_size:
        return "it sees them in several sizes"
    if tower == "text" and train.symbol_dropout:
        return "each has other tokens left out"
    return None


@dataclass(frozen=True)
class _ImageChunk:
    """Images for one forward pass."""

    rows: slice
    boxes_B5: np.ndarray | None
    """Crop of each image. None for whole images."""


class _FeatureSource:
    """Features of a run: read from the cache, or computed with the model that the step trains."""

    def __init__(
        self,
        step: TrainStep,
        plan: BatchPlan,
        data: DataSet,
        config: Config,
        report: DataProgress,
        ranks: Ranks,
    ) -> None:
        self._step, self._plan, self._data = step, plan, data
        self._config, self._report, self._ranks = config, report, ranks
        self._device, self._boundaries = step.device.torch, step.boundaries
        self._fingerprints = {
            tower: frozen_fingerprint(step.model, tower) for tower in ("image", "text")
        }
        self.has_computed = False
        """Whether some features were not in the cache."""
        self.bytes = 0
        """Size of all features so far."""

    def train_images(self) -> np.ndarray:
        """Return features of the training images, (views, N, ...)."""
        train, boxes = self._config.train, self._plan.boxes
        views, count = boxes.shape[:2]
        chunks = [
            _ImageChunk(rows, boxes[number, rows])
            for number, rows in itertools.product(range(views), slices(count, IMAGE_BATCH))
        ]
        model, pixels = self._step.worker, self._data.train.pixels
        blocks = self._compute_images(model, pixels, chunks, views * count, "images")
        key = ("train", train.views, train.crop, train.flip, train.seed)
        return self._read_or_store("image", key, (views, count), blocks)

    def held_out_images(self) -> np.ndarray:
        """Return features of the held-out images, seen as in an evaluation."""
        pixels = self._data.held_out.pixels
        chunks = [_ImageChunk(rows, None) for rows in slices(len(pixels), IMAGE_BATCH)]
        blocks = self._compute_images(
            self._step.model, pixels, chunks, len(pixels), "held-out images"
        )
        return self._read_or_store("image", ("val",), (len(pixels),), blocks)

    def train_texts(self, tokens: Sequence[np.ndarray], kind: str) -> Ragged:
        """Return features of the training captions, or of all further texts of one kind."""
        return self._texts(self._step.worker, tokens, "train", kind)

    def held_out_captions(self, embedder: Embedder) -> Ragged:
        """Return features of the distinct held-out captions."""
        captions, _, _ = distinct_captions(self._data.held_out)
        tokens = embedder.tokenizer.encode_all(captions, self._config.model.context)
        return self._texts(self._step.model, tokens, "val", "held-out captions")

    def _texts(self, model: CLIP, tokens: Sequence[np.ndarray], split: str, kind: str) -> Ragged:
        digest = hashlib.sha256()
        for text in tokens:
            digest.update(text.tobytes() + b"|")
        first_N = None
        count = len(tokens)
        if not self._is_pooled(model):
            first_N = np.cumsum([0, *map(len, tokens)])
            count = int(first_N[-1])
        blocks = self._compute_texts(model, tokens, kind)
        features = self._read_or_store("text", (split, digest.hexdigest()), (count,), blocks)
        return Ragged(features, first_N)

    def _is_pooled(self, model: CLIP) -> bool:
        """Return whether the whole text tower is frozen, so that a text has one vector of
        features."""
        return self._boundaries["text"] == model.text.depth

    def _compute_images(
        self, model: CLIP, pixels: Pixels, chunks: Sequence[_ImageChunk], total: int, kind: str
    ) -> Iterator[np.ndarray]:
        """Yield features of images, chunk by chunk."""

        def compute(chunk: _ImageChunk) -> np.ndarray:
            return self._image_features(model, pixels[chunk.rows], chunk.boxes_B5)

        done = 0
        for features in self._ranks.compute_in_shares(compute, chunks):
            done += len(features)
            self._report(done, total, f"the pretrained network reads {kind}")
            yield features

    def _compute_texts(
        self, model: CLIP, tokens: Sequence[np.ndarray], kind: str
    ) -> Iterator[np.ndarray]:
        """Yield features of texts in order. Texts of similar length share a forward pass."""

        def compute(chunk: list[int]) -> np.ndarray:
            return self._text_features(model, [tokens[number] for number in chunk])

        is_pooled = self._is_pooled(model)
        lengths = [len(text) for text in tokens]
        done = 0
        for group in slices(len(tokens), TEXTS_SORTED_TOGETHER):
            numbers = range(group.start, group.stop)
            by_length = sorted(numbers, key=lengths.__getitem__)
            chunks = [by_length[rows] for rows in slices(len(by_length), TEXT_BATCH)]
            computed = self._ranks.compute_in_shares(compute, chunks)
            features_of: dict[int, np.ndarray] = {}
            for chunk, features in zip(chunks, computed, strict=True):
                for number, row in zip(chunk, features, strict=True):
                    features_of[number] = row[None] if is_pooled else row[: lengths[number]]
                done += len(chunk)
                self._report(done, len(tokens), f"the pretrained network reads {kind}")
            yield np.concatenate([features_of[number] for number in numbers])

    @torch.inference_mode()
    def _image_features(
        self, model: CLIP, pixels_BSSC: np.ndarray, boxes_B5: np.ndarray | None
    ) -> np.ndarray:
        shape = self._config.model
        pixels = normalise(torch.from_numpy(np.array(pixels_BSSC)).to(self._device), shape)
        if boxes_B5 is not None:
            pixels = view(pixels, torch.from_numpy(boxes_B5).to(self._device), shape.image_size)
        return model.image.begin(pixels, self._boundaries["image"]).float().cpu().numpy()

    @torch.inference_mode()
    def _text_features(self, model: CLIP, tokens: Sequence[np.ndarray]) -> np.ndarray:
        tokens_BL = pad(tokens, self._config.model.context, self._plan.tokenizer.padding)
        inputs = torch.from_numpy(tokens_BL).to(self._device)
        return model.text.begin(inputs, self._boundaries["text"]).float().cpu().numpy()

    def _read_or_store(
        self, tower: str, key: tuple, rows: tuple[int, ...], blocks: Iterator[np.ndarray]
    ) -> np.ndarray:
        """Return features from the cache, or take them from `blocks` and store them.

        `rows` are the first dimensions of the array. The key names what the features depend on
        beside the frozen weights, the data and the precision.
        """
        dtype = self._config.train.dtype
        key = (*key, self._fingerprints[tower], self._boundaries[tower])
        path = array_path(tower, key, self._data.fingerprint, dtype)
        features = read_array(path)
        is_cached = features is not None and features.shape[: len(rows)] == rows
        # All ranks compute if one of them has to.
        if self._ranks.first_reason(None if is_cached else "not cached"):
            self.has_computed = True
            allow_half = dtype != "float32" and key[0] == "train"
            features = _store(path, rows, blocks, self._ranks, allow_half=allow_half)
        assert features is not None
        self.bytes += features.nbytes
        return features


def _store(
    path: Path,
    rows: tuple[int, ...],
    blocks: Iterator[np.ndarray],
    ranks: Ranks,
    *,
    allow_half: bool,
) -> np.ndarray:
    """Write features to the cache. Raise NotCacheable if that cannot be done.

    Uses half precision if that is allowed and the first block fits.
    """
    first = next(blocks)
    dtype = np.dtype(np.float32)
    checked = itertools.chain([first], blocks)
    if allow_half and _fits_half(first):
        dtype = np.dtype(np.float16)
        checked = _check_half(checked)
    shape = (*rows, *first.shape[1:])
    size = math.prod(shape) * dtype.itemsize
    if ranks.first_reason(None if has_room(path, size) else "no room"):
        raise NotCacheable(
            f"features find no room, they would take {size / 1e9:,.1f} GB, "
            "more than half of what the disk has left"
        )
    return write_array(path, checked, shape, dtype)


def _check_half(blocks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield blocks of features. Raise NotCacheable for one that half precision cannot hold."""
    for block in blocks:
        if not _fits_half(block):
            raise NotCacheable("half precision cannot hold all features")
        yield block


def _fits_half(block: np.ndarray) -> bool:
    """Return whether half precision can hold a block. A block with NaN does not fit."""
    return not block.size or bool(np.abs(block).max() < MAX_HALF_FEATURE)
