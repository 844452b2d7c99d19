"""What a program has set in torch: out of the way while lapclip computes, and there again afterwards.

A notebook may compute in float64, on a default device, without gradients or in mixed precision. None of that is meant
for lapclip, which computes as the run's settings say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

AUTOCAST = ("cpu", "cuda", "mps", "xpu")
"""Devices on which torch can be told to compute in half precision by itself."""


@contextmanager
def torch_kept() -> Iterator[None]:
    """Afterwards torch has as many threads as before, and is as deterministic; its default precision is the same, and
    so is whether this thread computes gradients."""
    threads, how = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    dtype, gradients = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(how)
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", filled)  # noqa: B010 (unknown to its stubs)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)


@contextmanager
def plain_thread() -> Iterator[None]:
    """What torch has for each thread, as a new thread has it: gradients, the CPU as default, and no autocast."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in AUTOCAST:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
