"""The kinds of GPU, and what differs between them: CUDA (NVIDIA's, and AMD's in builds for ROCm), MPS and XPU.

MPS and XPU are written from documentation; they were not run on such hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

from lapclip.machine import canary, facts, system_memory
from lapclip.machine.device import Accelerator, Compute, GraphRecorder, register
from lapclip.machine.transfer import RECORDING

Result = TypeVar("Result")

CHECKS_AT_ONCE = 6

_streams: dict[str, torch.cuda.Stream] = {}


@register
class Cuda(Accelerator):
    """A GPU of NVIDIA or AMD, with streams, and with graphs that are recorded once and replayed."""

    kind = "cuda"
    collectives = "nccl"
    records_graphs = True
    pins_memory = True
    runs_triton = find_spec("triton") is not None  # it comes with torch's builds for CUDA on Linux

    def _consult(self, precisions: list[str]) -> dict[str, list[canary.Result]]:
        """Several checks at once: where nothing is known yet, most of the time goes into libraries that choose and
        build kernels, on one core each."""
        index = torch.cuda.current_device()

        def begin() -> None:
            torch.cuda.set_device(index)  # which every thread has to be told

        with ThreadPoolExecutor(CHECKS_AT_ONCE, initializer=begin) as threads:
            return {p: canary.consult(self.torch, self.label, p, threads.map) for p in precisions}

    def read_later(self, values: torch.Tensor) -> Callable[[], list[float]]:
        arrived = torch.empty_like(values, device="cpu", pin_memory=True)
        arrived.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def read() -> list[float]:
            copied.synchronize()
            return arrived.tolist()

        return read

    def side_by_side(
        self, *, at_once: bool
    ) -> Callable[[Compute, Compute], tuple[torch.Tensor, torch.Tensor]]:
        """Two at once, because small computations leave most of the chip idle.

        Their backward passes run at once too: torch sends each to the stream that its forward pass ran on.
        """
        return _side_by_side if at_once else super().side_by_side(at_once=at_once)

    def graph_recorder(self) -> GraphRecorder:
        return CudaGraphs()

    def abandon(self, *holding: object) -> None:
        """A failed context answers every question with its error and cannot be reset (pytorch issue 2300).

        torch does ask, even for tensors on the CPU: each optimiser step asks whether a recording is under way.
        """
        super().abandon(*holding)
        torch.cuda.is_available = lambda: False  # what releases before torch 2.13 ask


class CudaGraphs:
    """Records CUDA graphs in one shared pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], Result]) -> Result:
        """On another stream than the recording's (the rule of torch.cuda.graph)."""
        stream = _own_stream("warm-up")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = run()
        torch.cuda.current_stream().wait_stream(stream)
        return result

    def record(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        graph = torch.cuda.CUDAGraph()
        with RECORDING, torch.cuda.graph(graph, pool=self._pool):
            result = run()
        return graph.replay, result


def _side_by_side(first: Compute, second: Compute) -> tuple[torch.Tensor, torch.Tensor]:
    here, stream = torch.cuda.current_stream(), _own_stream("beside")
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        aside = second()
    result = first()
    here.wait_stream(stream)
    aside.record_stream(here)  # its memory may not be given to others while it is read here
    return result, aside


def _own_stream(name: str) -> torch.cuda.Stream:
    """A queue of work beside the usual one, the same for everyone who asks by this name.

    One is enough: cuBLAS keeps tens of megabytes for each stream it has ever seen.
    """
    if name not in _streams:
        _streams[name] = torch.cuda.Stream()
    return _streams[name]


@register
class Mps(Accelerator):
    """A GPU of Apple, by Metal Performance Shaders, that works in the machine's own memory."""

    kind = "mps"
    half = "float16"  # M1 and M2 emulate bfloat16
    shares_memory = True
    # Attention has been silently wrong for permuted inputs (pytorch issues 163597, 181133), and `is_causal` has let
    # half-precision queries see later keys (195910).
    untrusted = frozenset({"permuted attention", "causal attention"})
    # The fused optimiser ignored found_inf (pytorch issue 186360).
    trusted_once_seen = frozenset({"fused adamw with an overflow"})

    @property
    def label(self) -> str:
        return facts.machine_facts()["chip"]

    def free_bytes(self) -> int:
        # Memory is shared with the rest of the system; beyond the recommended size it would swap.
        unused = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return max(0, min(unused, system_memory.available_bytes()))

    def peak_memory_bytes(self) -> int:
        return (
            torch.mps.driver_allocated_memory()
        )  # MPS keeps no peak; the driver rarely gives memory back

    def forget_peak(self) -> None:
        """There is none to forget."""

    def release_memory(self) -> None:
        with suppress(RuntimeError):
            torch.mps.empty_cache()

    def limit_memory(self) -> None:
        # By default the allocator takes 1.7 times the recommended size, and the system swaps instead of refusing.
        torch.mps.set_per_process_memory_fraction(1.0)

    def listed(self) -> list[dict[str, Any]]:
        return [
            facts.accelerator(
                self.kind, "Apple GPU", torch.mps.recommended_max_memory(), shares_memory=True
            )
        ]


@register
class Xpu(Accelerator):
    """A GPU of Intel, which does as `torch.accelerator` says."""

    kind = "xpu"
    pins_memory = True
