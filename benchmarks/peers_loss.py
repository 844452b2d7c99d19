"""Is our sigmoid loss OpenCLIP's? Run it in the peers' environment:

    PYTHONPATH=src benchmarks/.venv/bin/python benchmarks/peers_loss.py

Losses and gradients (of both embeddings, the scale and the bias) are compared in float32 and float64, over sizes of
batch. The last line is JSON.
"""

from __future__ import annotations

import json
import math
from importlib.metadata import version

import openclip  # noqa: F401  (makes the peer importable beside a CPU torch)
import torch
import torch.nn.functional as F
from open_clip.loss import SigLipLoss

from lapclip.training.objectives.contrastive import LOSSES, contrastive_loss

BATCHES, WIDTH = (2, 12, 64, 256, 1024), 128


def inputs(batch: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(batch)
    rows = torch.randn(2, batch, WIDTH, generator=draw, dtype=torch.float64)
    image, text = F.normalize(rows, dim=2).to(dtype)
    bias = LOSSES["sigmoid"].initial_bias(batch)
    scalars = (torch.tensor(value, dtype=dtype) for value in (10.0, bias))
    return tuple(tensor.clone().requires_grad_() for tensor in (image, text, *scalars))


def furthest(batch: int, dtype: torch.dtype) -> tuple[float, float]:
    """The difference of the losses, and of the gradients as a share of their length, where that is largest."""
    ours, theirs = inputs(batch, dtype), inputs(batch, dtype)
    positives = torch.eye(batch, dtype=torch.bool)
    loss, _ = contrastive_loss(*ours[:3], positives, ours[3], LOSSES["sigmoid"])
    peer = SigLipLoss()(*theirs)
    loss.backward()
    peer.backward()
    apart = [
        ((one.grad - other.grad).norm() / other.grad.norm()).item()
        for one, other in zip(ours, theirs, strict=True)
    ]
    return abs(loss.item() - peer.item()) / max(1.0, math.fabs(peer.item())), max(apart)


def main() -> None:
    found = {}
    for dtype in (torch.float64, torch.float32):
        name = str(dtype).removeprefix("torch.")
        rows = [furthest(batch, dtype) for batch in BATCHES]
        found[name] = {
            "loss": max(row[0] for row in rows),
            "gradients": max(row[1] for row in rows),
        }
        print(f"sigmoid loss, {name}, batches of {BATCHES}: {found[name]['loss']:.1e} from OpenCLIP's, gradients "
              f"{found[name]['gradients']:.1e}")  # fmt: skip
    print(
        json.dumps({"open_clip": version("open_clip_torch"), "torch": torch.__version__, **found})
    )


if __name__ == "__main__":
    main()
