"""Images and models that the tests of search share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from lapclip.searching.encoder import Encoder, open_encoder
from lapclip.searching.index import Index, index_folder
from lapclip.searching.library import Library
from lapclip.searching.update_index import Indexed, bring_up_to_date

BATCH = 4


def draw(path: Path, seed: int, side: int = 40) -> Path:
    """An image of a few large fields of colour, which no other seed has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(fields).resize((side, side), Image.Resampling.NEAREST).save(path)
    return path


def draw_many(folder: Path, count: int) -> list[Path]:
    return [draw(folder / f"{at:03}.png", at) for at in range(count)]


class Watched(Encoder):
    """The real model, a few images at a time, with something that happens before each batch."""

    def __init__(self, model: Path | str, before: Callable[[int], None] = lambda batch: None) -> None:
        real = open_encoder(str(model), "cpu")
        super().__init__(real.subject, real.model, real.identity)
        self.batch, self.before = BATCH, before
        self.batches: list[int] = []
        """Images in each batch so far."""

    def encode_pixels(self, pixels_NSSC: np.ndarray, /) -> np.ndarray:
        self.before(len(self.batches))
        self.batches.append(len(pixels_NSSC))
        return super().encode_pixels(pixels_NSSC)


def index_now(folder: Path, encoder: Encoder, waiting: Callable[[str], None] | None = None) -> Library:
    index = Index(index_folder(folder))
    found: Indexed = bring_up_to_date(index, folder, encoder, None, waiting)
    return Library(folder, index, encoder, found)


def names(library: Library) -> list[str]:
    """All that can be found, in the order of their names."""
    hits = library.find("anything", 10_000)
    return sorted(str(hit.path.relative_to(library.folder)) for hit in hits)


def vector_of(library: Library, name: str) -> np.ndarray:
    """What the index holds for an image."""
    table, vectors = library._index.snapshot(library.encoder.identity)
    entry = next(entry for entry in library._index.entries() if entry.path == name)
    return np.asarray(vectors[table.rows[table.numbers == entry.number][0]], dtype=np.float32)


def vectors_of(images: Sequence[Path], encoder: Encoder) -> np.ndarray:
    return encoder.model.encode_image(images)
