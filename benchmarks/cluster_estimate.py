"""How large and how fast would runs on 8 to 4,096 GPUs be? Arithmetic from what one GPU was measured to do.

    python benchmarks/cluster_estimate.py              # the table of docs/clusters.md
    python benchmarks/cluster_estimate.py --measure    # the measured parts, on the GPU of this computer

The model is `vit-b-16` in bfloat16 under DDP, compiled and as a CUDA graph. A step is the towers, the rows of the loss
and three exchanges, none of which overlaps: embeddings, their gradients, and the gradients of weights. Rates of links
are assumed, and latency is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lapclip.machine.choose_device import choose_device, default_threads, prepare_device
from lapclip.machine.device import Device
from lapclip.measure.phases import Stopwatch
from lapclip.measure.timing import Timer
from lapclip.model.clip import CLIP
from lapclip.model.shapes import SHAPES
from lapclip.model.sizes import count_weights
from lapclip.training.distributed import ALONE
from lapclip.training.loss_rows import Columns, contrastive_rows
from lapclip.training.objectives.base import LossRows, TruePairs

MODEL = "vit-b-16"
SHAPE = SHAPES[MODEL]
CAPTION_TOKENS = 24
WEIGHTS = count_weights(SHAPE)[0]
NUMBER_BYTES = 4  # float32
PAIR_BYTES = 2 * SHAPE.embedding * NUMBER_BYTES  # embeddings of an image and its caption
NODE_GPUS = 8
NODE_RATE, NETWORK_RATE = 300e9, 50e9  # bytes a second for each GPU: NVLink, InfiniBand

# One H200, torch 2.11, by pairs of a GPU and, for the loss, pairs of the whole batch.
TOWER_SECONDS = {1024: 0.2443, 512: 0.1187, 256: 0.0600, 64: 0.0187}
LOSS_SECONDS = {(1024, 8192): 0.0067, (512, 32_768): 0.0147, (256, 131_072): 0.0385}
LOSS_SECONDS[64, 262_144] = 0.0247
ACTIVATION_BYTES = 59.3e6  # of a pair: from the peaks at 1,024 and 64 pairs, 63.86 and 6.93 GB


@dataclass(frozen=True)
class Cluster:
    """A number of GPUs that share a batch."""

    gpus: int
    rows: int
    """Pairs of each GPU."""

    @property
    def batch(self) -> int:
        return self.gpus * self.rows

    def memory(self) -> dict[str, float]:
        """Return the bytes of a GPU by purpose."""
        return {
            "weights, and rounded copies": 6 * WEIGHTS,
            "gradients, their copies and the buffer they are summed in": 10 * WEIGHTS,
            "AdamW": 8 * WEIGHTS,
            "activations": self.rows * ACTIVATION_BYTES,
            "embeddings of the batch, with gradients": 2 * self.batch * PAIR_BYTES,
            "positives of own rows": 2 * self.rows * self.batch,
        }

    def exchanged(self) -> dict[str, float]:
        """Return the bytes that each GPU sends in a step, by purpose."""
        others = (self.gpus - 1) / self.gpus
        embeddings = others * self.batch * PAIR_BYTES
        return {
            "embeddings": embeddings,
            "gradients of embeddings": 2 * embeddings,
            "gradients of weights": 2 * others * WEIGHTS * NUMBER_BYTES,
        }

    def seconds(self) -> dict[str, float]:
        """Return the seconds of a step by purpose."""
        rate = NODE_RATE if self.gpus <= NODE_GPUS else NETWORK_RATE
        return {
            "towers and update": TOWER_SECONDS[self.rows],
            "rows of the loss": LOSS_SECONDS[self.rows, self.batch],
            "exchanges": sum(self.exchanged().values()) / rate,
        }

    @property
    def pairs_per_second(self) -> float:
        return self.batch / sum(self.seconds().values())

    @property
    def efficiency(self) -> float:
        """Pairs a second, as a share of what as many GPUs do that know nothing of each other."""
        best_rows = max(TOWER_SECONDS)
        return self.pairs_per_second / self.gpus / (best_rows / TOWER_SECONDS[best_rows])


CLUSTERS = [Cluster(8, 1024), Cluster(64, 512), Cluster(512, 256), Cluster(4096, 64)]


def table() -> list[str]:
    """Return the lines of the table in docs/clusters.md."""
    rows = [
        ["GPUs", *(f"{cluster.gpus:,}" for cluster in CLUSTERS)],
        ["---"] * (len(CLUSTERS) + 1),
        ["pairs of a batch", *(f"{cluster.batch:,}" for cluster in CLUSTERS)],
        ["pairs of a GPU", *(f"{cluster.rows:,}" for cluster in CLUSTERS)],
    ]
    parts = [
        ("memory", "GB", 1e-9, [cluster.memory() for cluster in CLUSTERS]),
        ("sent by a GPU", "GB", 1e-9, [cluster.exchanged() for cluster in CLUSTERS]),
        ("a step", "ms", 1e3, [cluster.seconds() for cluster in CLUSTERS]),
    ]
    for what, unit, scale, columns in parts:
        for name in columns[0]:
            cells = [f"{column[name] * scale:,.2f} {unit}" for column in columns]
            rows.append([f"{what}: {name}", *cells])
        totals = [f"{sum(column.values()) * scale:,.1f} {unit}" for column in columns]
        rows.append([f"**{what}**", *totals])
    rows.append(["pairs a second", *(f"{cluster.pairs_per_second:,.0f}" for cluster in CLUSTERS)])
    rows.append(["predicted efficiency", *(f"{cluster.efficiency:.0%}" for cluster in CLUSTERS)])
    return [f"| {' | '.join(cells)} |" for cells in rows]


def measure() -> None:
    """Print the seconds and the memory of the measured parts."""
    device, _ = choose_device("cuda")
    prepare_device(device, default_threads())
    timer = Timer(device.synchronise, rounds=9, max_seconds=6.0, warm_up_rounds=5)
    for cluster in CLUSTERS:
        loss = timer.time_one(loss_of_rows(cluster)).median
        print(cluster, f"loss {loss:.5f} s", flush=True)
    for cluster in CLUSTERS:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step = timer.time_one(towers_and_update(cluster, device)).median
        peak = torch.cuda.max_memory_allocated()
        print(cluster, f"towers and update {step:.5f} s, {peak / 1e9:.2f} GB", flush=True)


def towers_and_update(cluster: Cluster, device: Device) -> Callable[[], object]:
    """Return a function that takes a step with the pairs of one GPU."""
    from steps import Row, our_step, random_batch, sending

    row = Row(MODEL, "bfloat16", cluster.rows, CAPTION_TOKENS)
    off = Stopwatch(device.synchronise, on=False)
    take_step = sending(our_step(row, device), random_batch(row), off)
    return lambda: take_step()()


def loss_of_rows(cluster: Cluster) -> Callable[[], object]:
    """Return a function that computes the rows of the loss of one GPU, forward and backward."""

    def embeddings(count: int) -> torch.Tensor:
        drawn = torch.randn(count, SHAPE.embedding, device="cuda")
        return torch.nn.functional.normalize(drawn, dim=1).requires_grad_()

    positives = torch.eye(cluster.rows, cluster.batch, dtype=torch.bool, device="cuda")
    rows = LossRows(
        model=CLIP(SHAPE),
        own={name: embeddings(cluster.rows) for name in ("image", "text")},
        gathered={name: embeddings(cluster.batch) for name in ("image", "text")},
        pairs={"positives_BB": TruePairs(positives, positives)},
        extras={},
        size=cluster.batch,
        columns=Columns(ALONE, [cluster.batch], is_ring=False),
    )
    scale = torch.tensor(100.0, device="cuda", requires_grad=True)

    def compute() -> None:
        contrastive_rows(rows, "text", "positives_BB", "softmax", scale).loss.backward()

    return compute


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true")
    if parser.parse_args().measure:
        measure()
    else:
        print("\n".join(table()))
