"""OpenCLIP's training step, as its trainer does it, with our weights in it. Imported only in the peers' environment."""

from __future__ import annotations

import math
import sys

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:
    # The registry's torchvision does not import beside a CPU torch until operators that its own library would bring
    # are declared.
    for _name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[_name]
    _LIBRARY = torch.library.Library("torchvision", "DEF")
    for _operator in ("nms", "qnms"):
        _LIBRARY.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import open_clip
from open_clip.model import CLIP as PeerCLIP
from open_clip.model import CLIPTextCfg, CLIPVisionCfg

from lapclip.model.clip import CLIP
from lapclip.weights.openai import LAYOUT

NAME = f"openclip-{open_clip.__version__}"


def peer_model(ours: CLIP) -> PeerCLIP:
    """OpenCLIP's model of the same shape with the same weights."""
    shape = ours.shape
    vision = CLIPVisionCfg(
        layers=shape.image_layers,
        width=shape.image_width,
        head_width=shape.image_width // shape.image_heads,
        patch_size=shape.patch,
        image_size=shape.image_size,
    )
    text = CLIPTextCfg(
        context_length=shape.context,
        vocab_size=shape.vocabulary,
        width=shape.text_width,
        heads=shape.text_heads,
        layers=shape.text_layers,
    )
    peer = PeerCLIP(shape.embedding, vision, text)
    missing, unexpected = peer.load_state_dict(LAYOUT.to_theirs(ours.state_dict()), strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"attn_mask"}, missing
    return peer


class PeerStep:
    """A step of OpenCLIP's trainer: autocast or pure bf16, its loss, fused AdamW, the clamp of its logit scale."""

    def __init__(
        self, ours: CLIP, precision: str, device: torch.device, *, compiled: bool = False
    ) -> None:
        self.precision, self.device = precision, device
        model = peer_model(ours).to(device)
        if precision == "pure_bf16":
            model = model.to(torch.bfloat16)
        self.plain = model
        self.model = torch.compile(model) if compiled else model
        self.loss = open_clip.ClipLoss()
        decayed = [p for n, p in model.named_parameters() if p.ndim >= 2 and "ln" not in n]
        spared = [p for n, p in model.named_parameters() if not (p.ndim >= 2 and "ln" not in n)]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.2}, {"params": spared, "weight_decay": 0.0}],
            lr=5e-4,
            betas=(0.9, 0.98),
            eps=1e-6,
            fused=True,
        )

    def __call__(self, pixels: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if self.precision == "pure_bf16":
            pixels = pixels.to(torch.bfloat16)
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "amp_bf16"):
            image, text, scale = self.model(pixels, tokens)[:3]
            loss = self.loss(image, text, scale)
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            self.plain.logit_scale.clamp_(0, math.log(100))
        return loss.detach()
