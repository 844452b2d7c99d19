"""OpenCLIP's model in DistributedDataParallel with its gathered loss: seconds of a step, as rank 0 sees them.

    torchrun ... benchmarks/peers_together.py MODEL BATCH DTYPE CAPTION_TOKENS STEPS OUT

What `together.py ddp` starts on each host, in the peers' environment. Each rank has its share of the batch, made
beforehand: nothing is loaded. The last line of OUT is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from openclip import NAME, PeerStep, open_clip  # which makes it importable beside a CPU torch
from torch.nn.parallel import DistributedDataParallel

from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES


def main() -> None:
    model, batch, dtype, caption_tokens, steps, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    precision = "float32" if dtype == "float32" else "amp_bf16"
    step = PeerStep(CLIP(SHAPES[model]), precision, torch.device("cpu"))
    step.model = DistributedDataParallel(step.plain)
    step.loss = open_clip.ClipLoss(
        local_loss=True, gather_with_grad=True, rank=rank, world_size=count
    )
    pixels, tokens = own_share(model, int(batch) // count, int(caption_tokens), rank)
    seconds = []
    for _ in range(int(steps)):
        began = time.perf_counter()
        step(pixels, tokens).item()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        Path(out).write_text(json.dumps({"peer": NAME, "seconds": seconds}))
    dist.barrier()  # where one rank left first, the other was seen to wait for ever in its own end
    dist.destroy_process_group()


def own_share(
    model: str, rows: int, caption_tokens: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pixels, and captions padded to the context, because that is what the peer does."""
    shape, draw = SHAPES[model], torch.Generator().manual_seed(rank)
    pixels = torch.randn(rows, 3, shape.image_size, shape.image_size, generator=draw)
    tokens = torch.zeros(rows, shape.context, dtype=torch.long)
    tokens[:, :caption_tokens] = torch.randint(
        1, shape.vocabulary - 2, (rows, caption_tokens), generator=draw
    )
    tokens[:, caption_tokens - 1] = shape.vocabulary - 1  # the end, which is where the model looks
    return pixels, tokens


if __name__ == "__main__":
    main()
