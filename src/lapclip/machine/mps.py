"""Apple's GPUs, by Metal Performance Shaders. Written from documentation; not run on such hardware."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from lapclip.machine import facts, system_memory
from lapclip.machine.accelerators import accelerator
from lapclip.machine.device import Accelerator, register


@register
class Mps(Accelerator):
    """A GPU that works in the machine's own memory."""

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
        return torch.mps.driver_allocated_memory()  # MPS keeps no peak; the driver rarely gives memory back

    def forget_peak(self) -> None:
        """There is none to forget."""

    def release_memory(self) -> None:
        with suppress(RuntimeError):
            torch.mps.empty_cache()

    def limit_memory(self) -> None:
        # By default the allocator takes 1.7 times the recommended size, and the system swaps instead of refusing.
        torch.mps.set_per_process_memory_fraction(1.0)

    def listed(self) -> list[dict[str, Any]]:
        return [accelerator(self.kind, "Apple GPU", torch.mps.recommended_max_memory(), shares_memory=True)]
