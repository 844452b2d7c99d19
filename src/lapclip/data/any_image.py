"""Images as programs have them: a path, bytes, a PIL image, an array or a tensor; one of them, or many."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from PIL import Image

from lapclip.errors import DataError, first_line

if TYPE_CHECKING:
    import torch

    OneImage: TypeAlias = (
        str
        | os.PathLike[str]
        | bytes
        | bytearray
        | memoryview
        | Image.Image
        | np.ndarray
        | torch.Tensor
    )
    """An image: its path, the bytes of its file, a PIL image, an array (height, width, colours) or a tensor (colours,
    height, width), with values from 0 to 255, or from 0 to 1 where they are floating-point numbers."""
    ManyImages: TypeAlias = Iterable[OneImage] | np.ndarray | torch.Tensor
    """A list of images, or an array or a tensor with one more dimension in front."""

BYTES = (bytes, bytearray, memoryview)
CHANNELS = (1, 3, 4)
"""Grey, colours, and colours with transparency."""


def is_array(value: Any) -> bool:
    """Whether a value is an array or a tensor of numbers, of whatever library."""
    return hasattr(value, "__array__") and hasattr(value, "shape") and hasattr(value, "dtype")


def is_one_image(value: Any) -> bool:
    """Whether a value is a single image, not many."""
    if isinstance(value, (str, os.PathLike, *BYTES, Image.Image)):
        return True
    return is_array(value) and str(value.dtype) != "object" and len(value.shape) in (2, 3)


def as_list(images: Any) -> list[Any]:
    """The images that were given, of which there may be one."""
    if is_one_image(images):
        return [images]
    if is_array(images) and str(images.dtype) != "object" and len(images.shape) not in (1, 4):
        raise DataError(f"An array of shape {tuple(images.shape)} is neither an image nor images.")
    try:
        return list(images)
    except TypeError:
        raise DataError(
            f"A {type(images).__name__} is no image.", hint="a path, a PIL image, an array"
        ) from None


def as_image(value: Any) -> str | os.PathLike[str] | bytes | Image.Image:
    """An image as the rest of lapclip takes it: a path, the bytes of a file, or a PIL image."""
    if isinstance(value, (str, os.PathLike, Image.Image)):
        return value
    if isinstance(value, BYTES):
        return bytes(
            value
        )  # opened where files are: with the readers and the limits that those have
    if is_array(value):
        return Image.fromarray(_pixels(value))
    raise DataError(
        f"A {type(value).__name__} is no image.", hint="a path, a PIL image, an array or a tensor"
    )


def _pixels(value: Any) -> np.ndarray:
    """An array or a tensor as uint8 with the colours last."""
    is_tensor = hasattr(value, "detach")
    array = _array(value)
    if array.ndim == 3:
        first, last = array.shape[0] in CHANNELS, array.shape[2] in CHANNELS
        if first and (
            is_tensor or not last
        ):  # tensors have colours first, arrays last, where both could be meant
            array = array.transpose(1, 2, 0)
        if array.shape[2] == 1:
            array = array[:, :, 0]
    if (
        0 in array.shape
        or array.ndim not in (2, 3)
        or (array.ndim == 3 and array.shape[2] not in CHANNELS)
    ):
        raise DataError(
            f"An array of shape {tuple(value.shape)} is no image.", hint="(height, width, 3)"
        )
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    low, high = (
        (float(array.min()), float(array.max())) if array.dtype.kind in "fiub" else (np.nan, np.nan)
    )
    most = 1 if array.dtype.kind in "fb" else 255
    if not 0 <= low <= high <= most:
        raise DataError(
            f"An image of {array.dtype} has values from {low:.3g} to {high:.3g}; they have to be from 0 to {most}.",
            hint="the image before it was normalised: lapclip does that as the model needs it",
        )
    return np.ascontiguousarray(np.rint(array * (255.0 if most == 1 else 1.0)).astype(np.uint8))


def _array(value: Any) -> np.ndarray:
    if not hasattr(value, "detach"):
        return np.asarray(value)
    try:
        there = value.detach().cpu().to_dense()
        unknown = str(there.dtype).startswith(("torch.bfloat16", "torch.float8"))  # to numpy
        return (there.float() if unknown else there).numpy()
    except (
        RuntimeError,
        TypeError,
        NotImplementedError,
    ) as error:  # one without numbers, or of numbers that few know
        raise DataError(f"A tensor of {value.dtype} cannot be read: {first_line(error)}.") from None
