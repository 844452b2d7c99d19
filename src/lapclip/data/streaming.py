"""Images decoded each time they are asked for, where packed ones would not fit the disk.

Before a run each image is decoded once, so that those that cannot be are left out together with their captions. What
fails later has changed since or cannot be read any more; the run then ends and names it. It is never replaced by
another image, because that would be learnt with the wrong captions, and a resumed run would not see the same pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np

from lapclip.data.packed_index import digest_of
from lapclip.data.packed_store import WHOLE, prepare
from lapclip.data.pixels import View, as_view
from lapclip.data.table import StoredImage
from lapclip.errors import DataError, first_line
from lapclip.machine.facts import logical_cores


class StreamedPixels:
    """Images of one size, made squares as in a packed store, by row. Each must have the bytes it had before, whose
    digest begins as the one given."""

    def __init__(
        self, images: Sequence[StoredImage], digests: Sequence[str], view: View | int, fit: str = WHOLE
    ) -> None:
        self._images, self._digests, self._view, self._fit = images, digests, as_view(view), fit
        self.shape = (len(images), self._view.side, self._view.side, 3)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, rows: Any, /) -> np.ndarray:
        if isinstance(rows, (int, np.integer)):
            return self._decoded(range(len(self))[rows])
        asked = np.arange(len(self))[rows]
        squares = np.empty((len(asked), *self.shape[1:]), np.uint8)
        # In the order of the table, because neighbours are often in one file.
        order = np.argsort(asked, kind="stable")
        for at, square in zip(order, self._pool.map(self._decoded, asked[order]), strict=True):
            squares[at] = square
        return squares

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(logical_cores(), thread_name_prefix="lapclip-decoding")

    def _decoded(self, row: int) -> np.ndarray:
        image = self._images[row]
        try:
            data = image.read()
            if not digest_of(data).startswith(self._digests[row]):
                raise DataError("it has changed since")
            return prepare(data, self._view, self._fit)[0]
        except (OSError, ValueError) as error:
            why = f"it cannot be read ({first_line(error)})"
        except DataError as error:
            why = error.message
        raise DataError(
            f"{image.name} was an image when the run began, and now {why}.",
            hint="bring it back as it was and lapclip resume, or lapclip train for a run without it",
        )
