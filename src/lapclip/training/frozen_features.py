"""Features of the frozen part of each tower, computed once for all images and captions and cached: training goes on
from there. The result is the same, up to rounding.

Shapes: N images or captions, T tokens of all captions together.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lapclip.config import NEVER, Config
from lapclip.data.batches import BatchPlan
from lapclip.data.dataset import DataSet, Pairs
from lapclip.data.packed_store import room_left
from lapclip.data.pixels import normalise, view
from lapclip.data.ragged import Ragged
from lapclip.data.tokenizers import pad
from lapclip.embedder import Embedder, distinct_captions
from lapclip.errors import DataError
from lapclip.evaluation.closed_form import fit_cca, normed
from lapclip.fingerprint import frozen_fingerprint
from lapclip.machine.desktop import ends_in_order
from lapclip.model.clip import CLIP
from lapclip.model.pretrained_towers import PretrainedTower
from lapclip.paths import cache_folder, sweep, write_atomic
from lapclip.progress import DataProgress, Progress
from lapclip.text import duration
from lapclip.text import size as size_text
from lapclip.together import name_here
from lapclip.training.distributed import ALONE, Ranks
from lapclip.training.step import TrainStep

IMAGES, CAPTIONS = 32, 64
"""How many go through a tower at once."""
LARGE_FEATURE = 1e4
"""Features beyond which half precision is not trusted."""
TOGETHER = 4096
"""Captions that are sorted by their length before they go through."""


class NotCacheable(Exception):
    """Features that cannot be kept: the disk has no room, or half precision cannot hold them."""


@dataclass(frozen=True)
class CachedFeatures:
    """The features of a run: of its training pairs, which a plan takes, and of its held-out pairs."""

    images: np.ndarray | None
    """(views, N, ...)"""
    captions: Ragged | None
    held_out: HeldOutFeatures
    notes: list[str]
    """What the user should know."""
    texts: dict[str, Ragged] = field(default_factory=dict)
    """Features of further texts, by name."""
    summary: str = ""
    """What was computed, how long that took and how large it is; empty where nothing is cached."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is cached, and what is frozen is computed at each step."""
        return self.images is None and self.captions is None

    def of_images(self, rows: np.ndarray, views: np.ndarray) -> np.ndarray | None:
        return None if self.images is None else self.images[views, rows]

    def of_captions(self, captions: np.ndarray, length: int) -> np.ndarray | None:
        return None if self.captions is None else self.captions.padded(captions, length)

    def of_texts(self, name: str, numbers: np.ndarray, length: int) -> np.ndarray | None:
        return self.texts[name].padded(numbers, length) if name in self.texts else None


@dataclass(frozen=True)
class HeldOutFeatures:
    """Features of pairs that are scored again and again."""

    pairs: Pairs
    image: np.ndarray | None
    text: Ragged | None


class FeatureEmbedder(Embedder):
    """An embedder that goes on from cached features where it is asked for those pairs."""

    def __init__(
        self, embedder: Embedder, frozen: HeldOutFeatures, boundaries: dict[str, int]
    ) -> None:
        super().__init__(embedder.model, embedder.tokenizer, embedder.device)
        self.batch, self._frozen, self._boundaries = embedder.batch, frozen, boundaries

    def encode_pairs(
        self, pairs: Pairs, progress: Progress | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if pairs is not self._frozen.pairs:
            return super().encode_pairs(pairs, progress)
        captions, which, owner = distinct_captions(pairs)
        images = self._images(pairs)
        texts = self._texts(captions)
        return images, texts[which], owner

    @torch.inference_mode()
    def _images(self, pairs: Pairs) -> np.ndarray:
        cached = self._frozen.image
        if cached is None:
            return self.encode_pixels(pairs.pixels)
        blocks = []
        for rows in _slices(len(cached), self.batch):
            features = torch.from_numpy(np.array(cached[rows])).to(self.device.torch)
            embeddings = self.model.finish_image(features, self._boundaries["image"])
            blocks.append(embeddings.cpu().numpy())
        return np.concatenate(blocks)

    @torch.inference_mode()
    def _texts(self, captions: Sequence[str]) -> np.ndarray:
        cached = self._frozen.text
        if cached is None:
            return self.encode_text(captions)
        blocks = []
        for rows in _slices(len(captions), self.batch):
            tokens_BL = self.tokenizer.batch(captions[rows], self.model.shape.context)
            padded = cached.padded(np.arange(rows.start, rows.stop), tokens_BL.shape[1])
            features = torch.from_numpy(padded).to(self.device.torch)
            tokens = torch.from_numpy(tokens_BL).to(self.device.torch)
            embeddings = self.model.finish_text(features, tokens, self._boundaries["text"])
            blocks.append(embeddings.cpu().numpy())
        return np.concatenate(blocks)


def cache_features(
    step: TrainStep,
    embedder: Embedder,
    plan: BatchPlan,
    data: DataSet,
    config: Config,
    progress: DataProgress | None,
    ranks: Ranks = ALONE,
) -> CachedFeatures | None:
    """Compute what is frozen, or find it in the cache.

    Returns None if nothing is frozen or to be cached. Several ranks compute it in shares; each gets all of it.
    """
    towers, notes = towers_to_cache(step.model, step.boundaries, config)
    uncached = CachedFeatures(None, None, HeldOutFeatures(data.held_out, None, None), notes)
    if not towers:
        return uncached if notes else None
    report = progress or (lambda done, total, what="": None)
    began = time.perf_counter()
    maker = _FeatureMaker(step, plan, data, config, report, ranks)
    image = captions = held_out_image = held_out_text = None
    texts, covered = {}, []
    try:
        if "image" in towers:
            image, held_out_image = maker.images(), maker.held_out_images()
            views = f" in {len(image)} views" if len(image) > 1 else ""
            covered.append(f"{len(data.train):,} images{views}")
        if "text" in towers:
            captions = maker.captions(plan.captions, "captions")
            covered.append(f"{len(plan.captions):,} captions")
            for name, tokens in plan.texts.items():
                texts[name] = maker.captions(tokens, f"{name}s")
                covered.append(f"{len(tokens):,} {name}s of them")
            held_out_text = maker.held_out_captions(embedder)
    except NotCacheable as error:
        notes.append(f"what is frozen is computed at each step: {error}")
        return uncached
    how = "found in the cache"
    if not maker.found:
        how = f"computed once in {duration(time.perf_counter() - began)}"
    summary = f"features of {', '.join(covered)}: {how} ({size_text(maker.bytes)})"
    frozen = HeldOutFeatures(data.held_out, held_out_image, held_out_text)
    return CachedFeatures(image, captions, frozen, notes, texts, summary)


MOST_FITTED = 10_000
"""Images that heads are fitted to at the start; more would cost memory and change little."""
START_POWER = 0.5
"""How a direction counts at the start of heads, by its correlation. Measured: 0 and 1 are a little worse."""
LEAST_CORRELATED = 1e-2
"""Directions shorter than this share of the longest say nothing: few images have few."""
REST = 0.1
"""How long the other directions are, which start at random, as a share of what they would be without a closed form."""


@torch.no_grad()
def start_heads(model: CLIP, features: CachedFeatures | None, data: DataSet) -> bool:
    """Give new heads the linear maps that canonical correlation analysis finds, in the place of random ones; their
    hidden layers start at zero as ever. False where more learns than the heads of both towers."""
    pairs = None if features is None else _fitted_pairs(features, data)
    if (
        pairs is None
        or not isinstance(model.image, PretrainedTower)
        or not isinstance(model.text, PretrainedTower)
    ):
        return False
    maps = fit_cca(*pairs, width=model.shape.embedding, power=START_POWER)
    found = [maps.image_FE, maps.text_GE]
    lengths = torch.stack([map_FE.norm(dim=0) for map_FE in found])
    known_E = (lengths > LEAST_CORRELATED * lengths.amax(1, keepdim=True)).all(0)
    for head, map_FE in zip((model.image.head, model.text.head), found, strict=True):
        map_FE = map_FE[:, known_E]
        # As long as random values are, so that the learning rate fits.
        map_FE = map_FE * (map_FE.shape[1] ** 0.5 / map_FE.norm())
        head.projection.mul_(REST)
        head.projection[:, : map_FE.shape[1]] = map_FE.to(head.projection)
    return True


def _fitted_pairs(features: CachedFeatures, data: DataSet) -> tuple[Tensor, Tensor] | None:
    """Normed features of training images, and the mean of those of their captions; None where more learns than the
    heads of both towers."""
    if features.images is None or features.captions is None:
        return None
    if features.images.ndim != 3 or features.captions.first_N is not None:
        return None
    first_N = np.cumsum([0, *(len(options) for options in data.train.captions)])
    step = -(-len(data.train) // MOST_FITTED)
    rows = [row for row in range(0, len(data.train), step) if first_N[row] < first_N[row + 1]]
    captions = torch.stack(
        [normed(features.captions.values[first_N[row] : first_N[row + 1]]).mean(0) for row in rows]
    )
    return normed(features.images[0][rows]), captions


def with_features(embedder: Embedder, features: CachedFeatures | None, step: TrainStep) -> Embedder:
    """The embedder, which takes cached features where there are some."""
    return (
        embedder
        if features is None
        else FeatureEmbedder(embedder, features.held_out, step.boundaries)
    )


def towers_to_cache(
    model: CLIP, boundaries: dict[str, int], config: Config
) -> tuple[list[str], list[str]]:
    """Return the towers whose frozen part is worth caching, and why another's is not."""
    train = config.train
    if train.features == NEVER:
        return [], []
    chosen, notes = [], []
    for tower, has in (("image", "images go"), ("text", "captions go")):
        network, first = getattr(model, tower), boundaries[tower]
        if first == 0 and network.depth > 0:  # at most the embedding is frozen, which costs nothing
            continue
        reason = None
        if tower == "image" and not train.views:
            reason = "each has new crops; with --set train.views=4 four of each are cached"
        elif tower == "image" and train.cheap_size:
            reason = "it sees them in several sizes"
        elif tower == "text" and train.symbol_dropout:
            reason = "each has other tokens left out"
        elif isinstance(network, PretrainedTower) and not network.divides(first):
            reason = "it cannot be run in two parts"
        if reason:
            notes.append(f"{has} through the frozen tower at each step, because {reason}")
        else:
            chosen.append(tower)
    return chosen, notes


class _FeatureMaker:
    """Computes features with the model that the step computes with, or reads them."""

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
        self.found = True
        """Whether all of it was in the cache."""
        self.bytes = 0
        """Size of all features so far."""

    def images(self) -> np.ndarray:
        """Return features of the training images, (views, N, ...)."""
        train, boxes = self._config.train, self._plan.boxes
        views, count = boxes.shape[:2]
        chunks = [(at, rows) for at in range(views) for rows in _slices(count, IMAGES)]

        def compute(chunk: tuple[int, slice]) -> np.ndarray:
            at, rows = chunk
            pixels = self._data.train.pixels[rows]
            return self._image_features(self._step.worker, pixels, boxes[at, rows])

        def blocks() -> Iterator[np.ndarray]:
            made = self._ranks.compute_in_shares(compute, chunks)
            for (at, rows), block in zip(chunks, made, strict=True):
                done = at * count + rows.stop
                self._report(done, views * count, "the pretrained network reads images")
                yield block

        about = ("train", train.views, train.crop, train.flip, train.seed)
        return self._array("image", about, (views, count), blocks)

    def held_out_images(self) -> np.ndarray:
        """Return features of the images that are scored, as they are scored."""
        pixels = self._data.held_out.pixels
        chunks = list(_slices(len(pixels), IMAGES))

        def compute(rows: slice) -> np.ndarray:
            return self._image_features(self._step.model, pixels[rows], None)

        def blocks() -> Iterator[np.ndarray]:
            made = self._ranks.compute_in_shares(compute, chunks)
            for rows, block in zip(chunks, made, strict=True):
                self._report(rows.stop, len(pixels), "the pretrained network reads held-out images")
                yield block

        return self._array("image", ("val",), (len(pixels),), blocks)

    def captions(self, token_lists: Sequence[np.ndarray], kind: str) -> Ragged:
        """Return features of all training captions, or of all further texts of one kind."""
        return self._caption_features(self._step.worker, token_lists, "train", kind)

    def held_out_captions(self, embedder: Embedder) -> Ragged:
        """Return features of the different captions that are scored."""
        captions, _, _ = distinct_captions(self._data.held_out)
        token_lists = embedder.tokenizer.encode_all(captions, self._config.model.context)
        return self._caption_features(self._step.model, token_lists, "val", "held-out captions")

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
    def _caption_features(
        self, model: CLIP, token_lists: Sequence[np.ndarray], split: str, kind: str
    ) -> Ragged:
        block = self._boundaries["text"]
        is_pooled = block == model.text.depth
        lengths = [len(caption) for caption in token_lists]
        first_N = None if is_pooled else np.cumsum([0, *lengths])

        def compute(chosen: list[int]) -> np.ndarray:
            chosen_lists = [token_lists[at] for at in chosen]
            context, padding = self._config.model.context, self._plan.tokenizer.padding
            tokens = torch.from_numpy(pad(chosen_lists, context, padding)).to(self._device)
            return model.text.begin(tokens, block).float().cpu().numpy()

        def blocks() -> Iterator[np.ndarray]:
            done = 0
            for rows in _slices(len(token_lists), TOGETHER):
                numbers = range(rows.start, rows.stop)
                order = sorted(numbers, key=lengths.__getitem__)
                chunks = [order[some] for some in _slices(len(order), CAPTIONS)]
                made = self._ranks.compute_in_shares(compute, chunks)
                by_number: dict[int, np.ndarray] = {}
                for chosen, features in zip(chunks, made, strict=True):
                    for at, row in zip(chosen, features, strict=True):
                        by_number[at] = row[None] if is_pooled else row[: lengths[at]]
                    done += len(chosen)
                    self._report(done, len(token_lists), f"the pretrained network reads {kind}")
                yield np.concatenate([by_number[at] for at in numbers])

        rows = len(token_lists) if first_N is None else int(first_N[-1])
        digest = hashlib.sha256()
        for caption in token_lists:
            digest.update(caption.tobytes() + b"|")
        about = (split, digest.hexdigest())
        return Ragged(self._array("text", about, (rows,), blocks), first_N)

    def _array(
        self,
        tower: str,
        about: tuple,
        rows: tuple[int, ...],
        blocks: Callable[[], Iterator[np.ndarray]],
    ) -> np.ndarray:
        """Return an array from the cache, or compute it and write it there."""
        dtype = self._config.train.dtype
        about = (*about, self._fingerprints[tower], self._boundaries[tower])
        path = array_path(tower, about, self._data.fingerprint, dtype)
        array = read_array(path)
        fits = array is not None and array.shape[: len(rows)] == rows
        if self._ranks.first_reason(None if fits else "not cached"):
            self.found = False
            array = self._compute(
                path, rows, blocks(), halve=dtype != "float32" and about[0] == "train"
            )
        assert array is not None
        self.bytes += array.nbytes
        return array

    def _compute(
        self, path: Path, rows: tuple[int, ...], blocks: Iterator[np.ndarray], *, halve: bool
    ) -> np.ndarray:
        """Write features as they come, in half the room where half the digits were computed."""
        first = next(blocks)
        halve = halve and _fits_half(first)
        kind, shape = np.dtype(np.float16 if halve else np.float32), (*rows, *first.shape[1:])

        def checked() -> Iterator[np.ndarray]:
            for block in itertools.chain([first], blocks):
                if halve and not _fits_half(block):
                    raise NotCacheable("half precision cannot hold all features")
                yield block

        needed = math.prod(shape) * kind.itemsize
        if self._ranks.first_reason(None if has_room(path, needed) else "no room"):
            size = f"{needed / 1e9:,.1f} GB"
            raise NotCacheable(
                f"features find no room, they would take {size}, more than half of what the disk has left"
            )
        return write_array(path, checked(), shape, kind)


def _fits_half(block: np.ndarray) -> bool:
    """Return whether half precision holds all numbers of a block; it does not if one is not a number."""
    return not block.size or bool(np.abs(block).max() < LARGE_FEATURE)


def _slices(count: int, size: int) -> Iterator[slice]:
    for at in range(0, count, size):
        yield slice(at, min(count, at + size))


ROOM = 0.5
"""Share of the free disk that an array may take."""


def array_path(*about: object) -> Path:
    """The file of an array that depends on all that is given."""
    key = hashlib.sha256(repr(about).encode()).hexdigest()[:24]
    return cache_folder() / name_here(f"features-{key}.npy")


def has_room(path: Path, needed: int) -> bool:
    """Whether the disk has room for so many bytes."""
    return path.exists() or needed <= ROOM * room_left(path.parent)


def read_array(path: Path) -> np.ndarray | None:
    """The array, memory-mapped, or None where it has to be made."""
    try:
        found = np.load(path, mmap_mode="r")
    except (OSError, ValueError):
        return None
    with suppress(OSError):  # of a cache that can only be read
        os.utime(path)  # its date is that of the last use
    return found


def write_array(
    path: Path, blocks: Iterable[np.ndarray], shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """Write rows as they come, then give the file its name, and read it."""

    def write(partial: Path) -> None:
        # In sequence, not through a memory map: there a full disk would be a signal instead of an error.
        # Others may not read what was made of private photos.
        with open(partial, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            header = {
                "descr": np.lib.format.dtype_to_descr(dtype),
                "fortran_order": False,
                "shape": shape,
            }
            np.lib.format.write_array_header_1_0(file, header)
            for rows in blocks:
                file.write(np.ascontiguousarray(rows, dtype=dtype).tobytes())

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        with ends_in_order():
            write_atomic(path, write)
    except OSError as error:
        # Windows replaces no file that is mapped: another process was first with the same array, and works with it.
        found = read_array(path)
        if found is not None and found.shape == shape and found.dtype == dtype:
            return found
        raise DataError(
            f"Cannot write features to {path}: {error.strerror or error}.",
            hint="LAPCLIP_CACHE=FOLDER with a folder that has room, or --set train.features=never",
        ) from error
    found = read_array(path)
    assert found is not None
    return found


UNUSED_SECONDS = 30 * 86_400


def _sweep(folder: Path) -> None:
    """Remove what nobody used for a month, and what killed processes left half-written."""
    sweep(folder)
    for path in folder.glob("features-*.npy"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > UNUSED_SECONDS:
                path.unlink()
