"""Intel's GPUs. Written from documentation; not run on such hardware."""

from __future__ import annotations

from lapclip.machine.device import Accelerator, register


@register
class Xpu(Accelerator):
    """A GPU that does as `torch.accelerator` says."""

    kind = "xpu"
    pins_memory = True
