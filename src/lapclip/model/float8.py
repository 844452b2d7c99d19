"""Products of the blocks in float8, for GPUs that multiply it twice as fast as half precision.

A linear layer multiplies three times. Forward, and backward to its input, both factors are rounded to float8: e4m3,
with three bits of precision, for activations and weights; e5m2, with a wider range and two bits, for gradients. The
gradient of the weights stays in half precision: it is what is learnt from, and its factors would have to be transposed
first.

Float8 has few exponents, so each tensor is multiplied by a scale before it is rounded and the result divided by it. The
scale follows from the largest number of the steps before, so that one pass over memory rounds a tensor and finds what
the next scale depends on. Weights are there before the step, so theirs follows from themselves. What is too large
nevertheless becomes the largest number there is. The first step of a run, or of a resumed one, has nothing to go by,
and is taken in half precision.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lapclip.machine.choose_device import runs_triton

scaled_product = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
"""Of two factors: their scales, a bias, the scale and the precision of the result, and whether sums are kept in fewer
bits, which is faster."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HEADROOM = 2.0
"""How many times larger than before a number may be without being cut off."""
FORGET = 0.95
"""The largest number of earlier steps counts this much less with every step."""
SMALLEST = 1e-30
"""Stands for a largest number of zero."""
MULTIPLE = 16
"""What `torch._scaled_mm` wants inputs and outputs to be a multiple of."""

ACTIVATIONS, GRADIENTS, WEIGHTS = range(3)
"""What each layer has scales for."""

_LAYERS: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()
"""By number. Operations of torch take numbers, not objects, and a compiler that sees them take a tensor of scales and
change it in the backward pass would not compile it."""
_numbers = iter(range(1 << 62))


class Layer:
    """What a linear layer needs for products in float8."""

    def __init__(self, layer: nn.Linear, seen: Tensor, scale: Tensor, inverse: Tensor) -> None:
        """`seen`, `scale` and `inverse` are of activations, gradients and weights, (3,), parts of those of `Float8`."""
        self.number = next(_numbers)
        self.seen, self.scale, self.inverse = seen, scale, inverse
        weight_OI = layer.weight
        self.weight_OI = torch.empty_like(weight_OI, dtype=E4M3)
        self.weight_IO = torch.empty(
            *reversed(weight_OI.shape), dtype=E4M3, device=weight_OI.device
        )
        self.noted, self.ready = [False, False], [False, False]
        """Whether the largest of its activations and of its gradients has been seen, and whether a scale follows from
        it. Known without asking the device, which must not be asked while a step is recorded."""
        _LAYERS[self.number] = self

    def round_weight(self, weight_OI: Tensor) -> None:
        """Both ways round: each product wants its factors with the numbers that are added up side by side."""
        scaled_OI = (weight_OI.float() * self.scale[WEIGHTS]).to(E4M3)
        self.weight_OI.copy_(scaled_OI)
        self.weight_IO.copy_(scaled_OI.T)


class Float8:
    """The layers of a model that multiply in float8, and what their scales follow from."""

    def __init__(self, model: nn.Module) -> None:
        """Those are the linear layers in its blocks that know of it: they have an attribute that says which one each
        is."""
        self._layers = layers = [
            module
            for module in model.modules()
            if isinstance(module, nn.Linear) and hasattr(module, "float8") and fits(module)
        ]
        device = next(model.parameters()).device
        largest = [torch.finfo(kind).max for kind in (E4M3, E5M2, E4M3)]
        self._most = torch.tensor(largest, device=device) / torch.tensor(
            [HEADROOM, HEADROOM, 1.0], device=device
        )
        self._seen = torch.zeros(len(layers), 3, device=device)
        """The largest number of this step."""
        self._before = torch.zeros(len(layers), 3, device=device)
        """The largest number of the steps before."""
        self._scale = torch.ones_like(self._seen)
        # cuBLAS reads each at a multiple of 16 bytes.
        self._inverse = torch.ones(len(layers), 3, 4, device=device)[..., 0]
        self._of = [
            Layer(layer, *own)
            for layer, own in zip(
                layers, zip(self._seen, self._scale, self._inverse, strict=True), strict=True
            )
        ]
        for layer, own in zip(layers, self._of, strict=True):
            setattr(layer, "float8", own.number)  # noqa: B010 (attributes of a Module are unknown to pyright)

    @torch.no_grad()
    def refresh(self) -> None:
        """Before a step, take over what the last one has seen, and round the weights as they are now."""
        if not self._layers:
            return
        weights = [layer.weight for layer in self._layers]
        largest = torch._foreach_norm(weights, torch.inf)  # pyright: ignore[reportPrivateImportUsage]
        torch.maximum(self._seen, self._before * FORGET, out=self._before)
        self._before[:, WEIGHTS] = torch.stack(largest).float()
        self._scale.copy_(self._most / self._before.clamp(min=SMALLEST))
        torch.reciprocal(self._scale, out=self._inverse)
        self._seen.zero_()
        for own, weight in zip(self._of, weights, strict=True):
            own.round_weight(weight)
            own.ready = list(own.noted)


def fits(layer: nn.Linear) -> bool:
    """Whether a layer's products can be had in float8."""
    return layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, number: int) -> Tensor:
    """x times the transposed weight, plus the bias."""
    return Float8Linear.apply(x, weight_OI, bias_O, number)  # pyright: ignore[reportReturnType]


class Float8Linear(torch.autograd.Function):
    """A linear layer, forward and backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, number: int) -> Tensor:
        x_NI = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.number, ctx.x_shape = number, x.shape
        return forward_product(x_NI, weight_OI, bias_O, number).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_NI, weight_OI = ctx.saved_tensors
        grad_NO = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = backward_product(grad_NO, weight_OI, ctx.number).view(ctx.x_shape)
        if ctx.needs_input_grad[1]:
            grad_weight = grad_NO.T @ x_NI
        if ctx.needs_input_grad[2]:
            grad_bias = grad_NO.sum(0)
        return grad_x, grad_weight, grad_bias, None


@torch.library.custom_op("lapclip::float8_forward", mutates_args=())
def forward_product(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, number: int) -> Tensor:
    """(N, O)."""
    own = _LAYERS[number]
    x8_NI = rounded(x_NI.contiguous(), own, ACTIVATIONS, E4M3)
    if not own.ready[ACTIVATIONS]:
        return F.linear(x_NI, weight_OI, bias_O)
    scales = own.inverse[ACTIVATIONS], own.inverse[WEIGHTS]
    return scaled_product(x8_NI, own.weight_OI.T, *scales, bias_O, None, x_NI.dtype, True)


@forward_product.register_fake
def _(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, number: int) -> Tensor:
    return x_NI.new_empty(x_NI.shape[0], weight_OI.shape[0])


@torch.library.custom_op("lapclip::float8_backward", mutates_args=())
def backward_product(grad_NO: Tensor, weight_OI: Tensor, number: int) -> Tensor:
    """(N, I). Sums are kept in full precision: gradients are small differences."""
    own = _LAYERS[number]
    grad8_NO = rounded(grad_NO.contiguous(), own, GRADIENTS, E5M2)
    if not own.ready[GRADIENTS]:
        return grad_NO @ weight_OI
    scales = own.inverse[GRADIENTS], own.inverse[WEIGHTS]
    return scaled_product(grad8_NO, own.weight_IO.T, *scales, None, None, grad_NO.dtype, False)


@backward_product.register_fake
def _(grad_NO: Tensor, weight_OI: Tensor, number: int) -> Tensor:
    return grad_NO.new_empty(grad_NO.shape[0], weight_OI.shape[1])


def rounded(x: Tensor, own: Layer, which: int, kind: torch.dtype) -> Tensor:
    """x in float8, times its scale. The largest number of x is noted."""
    own.noted[which] = True
    if runs_triton(x.device):
        from lapclip.model.triton_kernels import round_to_float8

        return round_to_float8(x, own.scale[which : which + 1], own.seen[which : which + 1], kind)
    seen, most = own.seen[which], torch.finfo(kind).max
    torch.maximum(seen, x.abs().amax().float(), out=seen)
    return (x.float() * own.scale[which]).clamp(-most, most).to(kind)
