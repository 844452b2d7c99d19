"""What callers send to be embedded: texts and images, and how an image is written in JSON."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lapclip.data.decode import TemporaryFault, decode
from lapclip.data.pixels import fit_image
from lapclip.data.tokenizers import pad
from lapclip.embedder import Encoder
from lapclip.errors import DataError
from lapclip.serving.refusals import BadItem, TooLarge, Unavailable

LONGEST_TEXT = 20_000
"""Characters of a text that is taken: far above what any context holds, and short enough to be encoded at once."""
LARGEST_IMAGE = 20_000_000
"""Bytes of an image file."""
LONGEST_HEAD = 1000
"""Characters of a data URI before its data."""
_DATA_URI = re.compile(
    r"data:([\w.+/-]*)((?:;[\w.+-]+=[^;,]*)*)(;base64)?,", re.ASCII | re.IGNORECASE
)


@dataclass(frozen=True)
class Text:
    """A text to embed."""

    text: str

    tower = "text"

    @cached_property
    def digest(self) -> bytes:
        """Equal for equal texts."""
        text = self.text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(b"t" + text, digest_size=16).digest()

    def row(self, encoder: Encoder) -> np.ndarray:
        """Its tokens, padded to a multiple of 8 so that shapes repeat."""
        if len(self.text) > LONGEST_TEXT:
            raise BadItem(
                f"the text has {len(self.text):,} characters; at most {LONGEST_TEXT:,} are taken.",
                hint="an image as a data URI (data:image/jpeg;base64,...), if it is one",
            )
        tokens = self.tokens(encoder)
        return pad([tokens], encoder.context, encoder.tokenizer.padding)[0]

    def tokens(self, encoder: Encoder) -> list[int]:
        """What the model reads of it. Kept, because some dialects count them once more."""
        if "_tokens" not in self.__dict__:
            self.__dict__["_tokens"] = encoder.tokenizer.encode(self.text, encoder.context)
        return self.__dict__["_tokens"]


@dataclass(frozen=True)
class ImageFile:
    """The bytes of an image file to embed."""

    data: bytes

    tower = "image"

    @cached_property
    def digest(self) -> bytes:
        """Equal for equal files."""
        return hashlib.blake2b(b"i" + self.data, digest_size=16).digest()

    def row(self, encoder: Encoder) -> np.ndarray:
        """The square that the model sees. At full size, as `encode_image` does, so that vectors are the same."""
        if len(self.data) > LARGEST_IMAGE:
            raise TooLarge(f"the image has more than {LARGEST_IMAGE // 10**6} MB.")
        try:
            decoded = decode(self.data, defer_profile=True)
            return encoder.view.finish(decoded, fit_image(decoded.image, encoder.view))
        except TemporaryFault as error:
            raise Unavailable(f"An image could not be read: {error.message}.") from None
        except DataError as error:
            raise BadItem(f"it cannot be read as an image: {error.message}.") from None


@dataclass(frozen=True)
class ImageText:
    """An image file in base64, as JSON holds it. Decoded with the image, in a thread: it may have many megabytes."""

    written: str

    tower = "image"

    @cached_property
    def digest(self) -> bytes:
        """Equal for equal files, written alike."""
        return hashlib.blake2b(
            b"b" + self.written.encode("utf-8", "surrogatepass"), digest_size=16
        ).digest()

    def row(self, encoder: Encoder) -> np.ndarray:
        """The square that the model sees."""
        try:
            data = base64.b64decode(self.written, validate=True)
        except (binascii.Error, ValueError):
            try:  # line breaks, the alphabet for addresses, and without the padding at the end
                plain = (
                    "".join(self.written.split()).rstrip("=").replace("-", "+").replace("_", "/")
                )
                plain += "=" * (-len(plain) % 4)
                data = base64.b64decode(plain, validate=True)
            except (binascii.Error, ValueError):
                raise BadItem("it is no image in base64.") from None
        return ImageFile(data).row(encoder)


@dataclass(frozen=True)
class ImageAddress:
    """An image that is to be fetched. `Service.embed` does that, or refuses; what it fetches is an `ImageFile`."""

    url: str


Loaded = Text | ImageFile | ImageText
"""What is here, and can become a row for the engine."""
Item = Loaded | ImageAddress
"""What callers send."""


def image_from_text(written: str, *, position: int | None = None) -> ImageText | ImageAddress:
    """An image as JSON holds it: a data URI (`data:image/jpeg;base64,...`), base64 alone, or an address."""
    if match := _DATA_URI.match(written, 0, LONGEST_HEAD):
        if not match[3]:
            raise BadItem(
                "a data URI of an image has to be in base64 (data:image/jpeg;base64,...).",
                position=position,
            )
        written = written[match.end() :]
    elif written[:6].lower().startswith(("http:", "https:")):
        return ImageAddress(written)
    if len(written) > LARGEST_IMAGE * 4 // 3 + 4:
        raise TooLarge(f"the image has more than {LARGEST_IMAGE // 10**6} MB.", position=position)
    return ImageText(written)


def is_image_text(written: str) -> bool:
    """Whether a string is an image written as a data URI, as opposed to a text about one."""
    match = _DATA_URI.match(written, 0, LONGEST_HEAD)
    return bool(match) and match[1].lower().startswith("image/")
