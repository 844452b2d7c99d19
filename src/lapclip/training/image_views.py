"""The images of a batch as the image tower sees them: cropped, flipped, at the size of the step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lapclip.config import ModelConfig, TrainConfig
from lapclip.data.batches import Batch
from lapclip.data.pixels import draw_boxes, mean_and_std, normalise, view
from lapclip.machine.device import DTYPES, Device
from lapclip.model.kernels import has_triton
from lapclip.seeding import generator
from lapclip.training.inputs import Inputs


def choose_boxes(batch: Batch, config: TrainConfig, shape: ModelConfig, step: int) -> Tensor | None:
    """Return the box of each image that is seen at a step. None for whole images."""
    if batch.boxes_B5 is not None:
        return torch.from_numpy(batch.boxes_B5)
    is_whole = config.crop == 1 and not config.flip and batch.aspects_B is None
    if is_whole or batch.image_features is not None:
        return None
    return draw_crops(batch, config, shape, "boxes", step)


def draw_crops(
    batch: Batch, config: TrainConfig, shape: ModelConfig, purpose: str, step: int
) -> Tensor:
    """Draw a box for each image. Draws of another purpose or step are independent."""
    aspects, middle = batch.aspects_B, shape.crop_share
    if aspects is None:
        aspects, middle = np.ones(len(batch.sided_B)), 1.0  # the squares are as the model sees them
    draw = generator(config.seed, purpose, step)
    return draw_boxes(batch.sided_B, aspects, config.crop, config.flip, draw, middle=middle)


def view_images(
    inputs: Inputs, config: TrainConfig, shape: ModelConfig, device: Device
) -> Tensor | None:
    """Normalize the images of a batch and crop them. None if cached features take their place."""
    if inputs.image_features is not None:
        return None
    pixels, boxes = inputs.pixels_BSSC, inputs.boxes_B5
    if is_normalized_by_triton(inputs, config, shape, device):
        from lapclip.model import triton_kernels

        mean, std = mean_and_std(shape.pixel_mean, shape.pixel_std, 1, device.torch)
        return triton_kernels.normalise(pixels, mean, std, DTYPES[config.dtype])
    if device.trusted("crops"):
        return view(normalise(pixels, shape), boxes, inputs.side)
    # This device computes crops wrongly, so the CPU makes them.
    if boxes is not None:
        boxes = boxes.cpu()
    return view(normalise(pixels.cpu(), shape), boxes, inputs.side).to(device.torch)


def is_normalized_by_triton(
    inputs: Inputs, config: TrainConfig, shape: ModelConfig, device: Device
) -> bool:
    """Return whether one Triton kernel normalizes the images and rounds them to half precision.

    It can neither crop nor resize, and pretrained networks do their own rounding.
    """
    is_uncropped = inputs.boxes_B5 is None and inputs.side == inputs.pixels_BSSC.shape[1]
    is_own_network = not shape.image_from
    has_kernel = config.linear == "triton" and has_triton(device.torch, DTYPES[config.dtype])
    return is_uncropped and is_own_network and has_kernel
