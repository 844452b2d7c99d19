"""A stand-in for Apple's GPU where there is none: the CPU, refusing what MPS refuses or has got wrong.

It cannot find what nobody knows of yet; it keeps what is known from coming back. Inside `apple(monkeypatch)`:

    float64 anywhere                              MPS has none
    two floating dtypes in one operation          products refuse them, and not every operation promotes
    attention of inputs that are not contiguous   silently wrong (pytorch issues 163597, 181133)
    `is_causal` in half precision                 let queries see later keys (195910)
    captions of other lengths than multiples of 8 up to the context: memory grows with each new shape (132596, 164299)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lapclip.data.tokenizers import LENGTH_STEP
from lapclip.machine.cpu import Cpu
from lapclip.machine.device import UNTRUSTED
from lapclip.machine.gpus import Mps

MAY_MIX = (
    "copy_",
    "_to_copy",
    "_foreach_copy_",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
"""Operations whose business is to change the dtype, and a kernel of the CPU's own that keeps its sums in float32."""


class RefusedError(AssertionError):
    """What MPS would not do, or would do wrongly."""


class AppleDevice(Mps):
    """Takes every decision that is taken for MPS, and computes on the CPU."""

    @property
    def torch(self) -> torch.device:
        return torch.device("cpu")

    def synchronise(self) -> None:
        pass

    def peak_memory_bytes(self) -> int:
        return 0


class Operations(TorchDispatchMode):
    """Looks at every operation, forward and backward."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.context, self.seen = context, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        self.seen += 1
        name = func.overloadpacket.__name__
        dtypes = {part.dtype for part in _tensors((args, kwargs)) if part.is_floating_point()}
        if len(dtypes) > 1 and name not in MAY_MIX:
            raise RefusedError(f"{func} of {' and '.join(sorted(map(str, dtypes)))}")
        if name == "embedding":
            self._check_length(args[1])
        result = func(*args, **(kwargs or {}))
        if any(part.dtype == torch.float64 for part in _tensors((args, kwargs, result))):
            raise RefusedError(f"float64 in {func}")
        return result

    def _check_length(self, tokens: Tensor) -> None:
        length = tokens.shape[-1]
        if length > self.context or (length % LENGTH_STEP and length != self.context):
            raise RefusedError(f"captions of {length} tokens")


class Attention(TorchFunctionMode):
    """Looks at attention before it is taken apart."""

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "scaled_dot_product_attention":
            query, key, value = args[:3]
            if not all(part.is_contiguous() for part in (query, key, value)):
                raise RefusedError("attention of inputs that are not contiguous")
            if kwargs.get("is_causal") and query.dtype != torch.float32:
                raise RefusedError(f"is_causal in {query.dtype}")
        return func(*args, **kwargs)


@contextmanager
def apple(monkeypatch: pytest.MonkeyPatch, context: int = 77) -> Iterator[Operations]:
    """Everything inside computes as on MPS, as far as the CPU can play it."""
    taken_for_mps = {("cpu", operation) for operation in Mps.untrusted}
    with monkeypatch.context() as patch, Attention(), Operations(context) as operations:
        patch.setattr(Cpu, "norms_mixed_dtypes", Mps.norms_mixed_dtypes)
        UNTRUSTED.update(taken_for_mps)
        try:
            yield operations
        finally:
            UNTRUSTED.difference_update(taken_for_mps)


def _tensors(nested: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor))
