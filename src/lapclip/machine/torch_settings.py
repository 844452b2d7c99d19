"""What a program has set in torch: out of the way while lapclip computes, and there again afterwards.

A notebook may compute in float64, on a default device, without gradients or in mixed precision. None of that is meant
for lapclip, which computes as the run's settings say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

PRODUCTS: tuple[Any, ...] = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul"))  # noqa: B009
"""Where torch can be told to round the factors of float32 products, which many programs do for speed."""
ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
"""Kernels of attention that a program can forbid torch, on the CPU too; another one rounds otherwise."""
AUTOCAST = ("cpu", "cuda", "mps", "xpu")
"""Devices on which torch can be told to compute in half precision by itself."""


@contextmanager
def torch_kept() -> Iterator[None]:
    """Afterwards torch has as many threads as before, and is as deterministic; its default precision is the same, that
    of float32 products too, and so is whether this thread computes gradients, and in half precision by itself."""
    threads, how = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    dtype, gradients = torch.get_default_dtype(), torch.is_grad_enabled()
    kernels = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ATTENTION}
    products, halves = (
        _product_precision(),
        {kind: torch.is_autocast_enabled(kind) for kind in AUTOCAST},
    )
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(how)
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", filled)  # noqa: B010 (unknown to its stubs)
        torch.set_default_dtype(dtype)
        _set_product_precision(*products)
        torch.set_grad_enabled(gradients)
        _allow_attention(kernels)
        for kind, enabled in halves.items():
            torch.set_autocast_enabled(kind, enabled)


def compute_in_float32() -> None:
    """New tensors are float32, products of float32 are not rounded further, and attention may take any kernel."""
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    _allow_attention(dict.fromkeys(ATTENTION, True))


def _allow_attention(kernels: dict[str, bool]) -> None:
    for name, allowed in kernels.items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(allowed)


def _product_precision() -> tuple[str | None, list[str]]:
    """Torch has two ways to set it: one word for all devices, which cannot be read once the other way was taken, and a
    word for each kind."""
    each = [found.fp32_precision for found in PRODUCTS]
    try:
        return torch.get_float32_matmul_precision(), each
    except RuntimeError:
        return None, each


def _set_product_precision(of_all: str | None, each: list[str]) -> None:
    if of_all is not None:
        torch.set_float32_matmul_precision(of_all)
    for found, precision in zip(PRODUCTS, each, strict=True):
        found.fp32_precision = precision


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
