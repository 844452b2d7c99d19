"""Are published weights read and written as the libraries that made them do? Run it in the peers' environment:

    PYTHONPATH=src benchmarks/.venv/bin/python benchmarks/peers_weights.py photos
    PYTHONPATH=src benchmarks/.venv/bin/python benchmarks/peers_weights.py photos --only tiny,ViT-B-32
    PYTHONPATH=src benchmarks/.venv/bin/python benchmarks/peers_weights.py --blocks 2

For each shape: random weights, saved by OpenCLIP (safetensors and bin) and by transformers, are loaded here; embeddings
of images and captions must agree to 1e-5. Then the way back: our folders, loaded by the peers. Photos go through the peers' own preprocessing and through our
`encode_image`, to 1e-3; squashed, and resized by bilinear and cut from 256 to 224 as timm does, as well.
A line a comparison; the last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import transformers
from openclip import open_clip  # through ours, which makes the peers importable beside a CPU torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision import transforms

import lapclip
from lapclip.commands.export import export
from lapclip.embedder import Embedder

TOLERANCE, PHOTO_TOLERANCE = 1e-5, 1e-3
SHAPES = (
    "tiny",
    "ViT-B-32",
    "ViT-B-32-quickgelu",
    "ViT-B-16",
    "ViT-L-14",
    "ViT-L-14-336",
    "ViT-H-14",
)
TINY = {
    "embed_dim": 48,
    "custom_text": True,
    "vision_cfg": {
        "image_size": 64,
        "layers": 3,
        "width": 96,
        "head_width": 48,
        "patch_size": 16,
        "mlp_ratio": 3.0,
    },
    "text_cfg": {
        "context_length": 32,
        "vocab_size": 49408,
        "width": 64,
        "heads": 2,
        "layers": 2,
        "mlp_ratio": 2.5,
    },
}
CAPTIONS = [
    "a photo of a cat",
    "two dogs &amp; a red bird, in the snow",
    "Ein Häuschen am Weiher.",
    "",
]
Encoders = tuple[Callable[[Tensor], Tensor], Callable[[list[str]], Tensor]]


class Comparisons:
    """What was compared, with the largest difference of each."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def add(self, name: str, ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> None:
        difference = float(np.abs(ours - theirs).max())
        ok = bool(difference <= tolerance)
        self.rows.append({"name": name, "difference": difference, "tolerance": tolerance, "ok": ok})
        print(f"{name}: {difference:.1e} {'ok' if ok else f'MORE THAN {tolerance:g}'}", flush=True)

    def models(
        self, name: str, ours: Embedder, theirs: Encoders, captions: Sequence[str] = CAPTIONS
    ) -> None:
        side = ours.model.shape.image_size
        pixels = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            mine, own = ours.model.encode_image(pixels).numpy(), ours.encode_text(captions)
            self.add(f"{name}, images", mine, unit(theirs[0](pixels)), TOLERANCE)
            self.add(f"{name}, captions", own, unit(theirs[1](list(captions))), TOLERANCE)


def unit(rows: Tensor) -> np.ndarray:
    return nn.functional.normalize(rows.float(), dim=-1).numpy()


def openclip_model(name: str, blocks: int) -> tuple[nn.Module, dict]:
    """Random weights of a named shape, or of so many blocks of it, and its configuration."""
    config = copy.deepcopy(TINY) if name == "tiny" else open_clip.get_model_config(name)
    for tower in ("vision_cfg", "text_cfg"):
        config[tower]["layers"] = min(blocks or config[tower]["layers"], config[tower]["layers"])
    kind = open_clip.CustomTextCLIP if config.get("custom_text") else open_clip.CLIP
    torch.manual_seed(0)
    model = kind(
        **{key: value for key, value in copy.deepcopy(config).items() if key != "custom_text"}
    )
    with (
        torch.no_grad()
    ):  # norms and biases begin as ones and zeros, and would hide that they were swapped
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval(), config


def openclip_encoders(model: nn.Module, tokenizer: Callable) -> Encoders:
    return model.encode_image, lambda captions: model.encode_text(tokenizer(captions))


def huggingface_encoders(model: nn.Module, tokenize: Callable[[list[str]], Tensor]) -> Encoders:
    def text(captions: list[str]) -> Tensor:
        found = model.get_text_features(input_ids=tokenize(captions))
        return getattr(found, "pooler_output", found)

    def image(pixels: Tensor) -> Tensor:
        found = model.get_image_features(pixel_values=pixels)
        return getattr(found, "pooler_output", found)

    return image, text


def read_openclip(
    found: Comparisons, name: str, blocks: int, folder: Path
) -> tuple[nn.Module, Callable]:
    """OpenCLIP's folders, in both of their forms."""
    model, config = openclip_model(name, blocks)
    context = config["text_cfg"]["context_length"]
    tokenizer = open_clip.SimpleTokenizer(context_length=context)
    folder.mkdir()
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": config, "preprocess_cfg": {}})
    )
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    found.models(
        f"{name}, OpenCLIP's safetensors read",
        lapclip.load(folder),
        openclip_encoders(model, tokenizer),
    )
    (folder / "open_clip_model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "open_clip_pytorch_model.bin")
    found.models(
        f"{name}, OpenCLIP's bin read", lapclip.load(folder), openclip_encoders(model, tokenizer)
    )
    return model, tokenizer


def read_huggingface(
    found: Comparisons, name: str, ours: Embedder, tokenizer: Callable, folder: Path
) -> None:
    """Random weights of transformers' own, in the same shape."""
    from lapclip.weights.huggingface import config_of

    config = transformers.CLIPConfig(**config_of(ours.model.shape, ours.tokenizer.start))
    torch.manual_seed(1)
    model = transformers.CLIPModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="300MB")
    found.models(
        f"{name}, transformers' folder read",
        lapclip.load(folder),
        huggingface_encoders(model, tokenizer),
    )


def way_back(found: Comparisons, name: str, ours: Embedder, source: Path, folder: Path) -> None:
    """Our folders, loaded by the peers with their own tokenizers."""
    export(str(source), "openclip", folder / "openclip")
    there = f"local-dir:{folder / 'openclip'}"
    model, _, _ = open_clip.create_model_and_transforms(there)
    tokenizer = open_clip.get_tokenizer(there)
    found.models(
        f"{name}, ours written for OpenCLIP", ours, openclip_encoders(model.eval(), tokenizer)
    )
    del model
    export(str(source), "huggingface", folder / "huggingface")
    model = transformers.CLIPModel.from_pretrained(folder / "huggingface").eval()
    fast = transformers.AutoTokenizer.from_pretrained(folder / "huggingface")
    plain = [
        caption.replace("&amp;", "&") for caption in CAPTIONS
    ]  # what their tokenizer does not mend

    def tokenize(captions: list[str]) -> Tensor:
        padded = fast(plain, padding="max_length", truncation=True, return_tensors="pt")
        return padded["input_ids"]

    found.models(
        f"{name}, ours written for transformers", ours, huggingface_encoders(model, tokenize)
    )


def photos(
    found: Comparisons, name: str, model: nn.Module, source: Path, images: list[Path]
) -> None:
    """Real photos through the peers' preprocessing and through ours."""
    ours = lapclip.load(source)
    side = ours.model.shape.image_size
    opened = [Image.open(path).convert("RGB") for path in images]

    def compare(what: str, seen: Embedder, transform: Callable) -> None:
        with torch.inference_mode():
            theirs = unit(model.encode_image(torch.stack([transform(image) for image in opened])))
        found.add(
            f"{name}, {len(images)} photos, {what}",
            seen.encode_image(images),
            theirs,
            PHOTO_TOLERANCE,
        )

    for mode in ("shortest", "squash"):
        seen = seeing(ours, resize=mode)
        compare(
            f"OpenCLIP's {mode}",
            seen,
            open_clip.image_transform(side, is_train=False, resize_mode=mode),
        )
    mean, std = (
        [float(number) for number in text.split()]
        for text in ("0.485 0.456 0.406", "0.229 0.224 0.225")
    )
    share = 0.875
    like_timm = transforms.Compose(
        [
            transforms.Resize(int(side / share), transforms.InterpolationMode.BILINEAR),
            transforms.CenterCrop(side),
            transforms.ToTensor(),
            transforms.Normalize(mean, std),
        ]
    )
    colours = {"pixel_mean": "0.485 0.456 0.406", "pixel_std": "0.229 0.224 0.225"}
    seen = seeing(ours, interpolation="bilinear", crop_share=share, **colours)
    compare("bilinear, cut to 0.875", seen, like_timm)
    processor = transformers.CLIPImageProcessor(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}, do_convert_rgb=True
    )
    # Of an odd margin torchvision, as OpenAI and OpenCLIP use it, cuts off half of it, rounded to even; transformers
    # rounds down. So of some photos it sees the next pixel, and they are left out here.
    agreed = [
        at
        for at, image in enumerate(opened)
        if (int(side * max(image.size) / min(image.size)) - side) % 4 != 3
    ]
    opened, images = [opened[at] for at in agreed], [images[at] for at in agreed]
    compare(
        "transformers' processor",
        ours,
        lambda image: processor(image, return_tensors="pt")["pixel_values"][0],
    )


def seeing(ours: Embedder, **changes) -> Embedder:
    """The same model with other eyes."""
    model = copy.copy(ours.model)
    model.shape = replace(ours.model.shape, **changes)
    return Embedder(model, ours.tokenizer, ours.device)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", type=Path, nargs="?", help="a folder of photos")
    parser.add_argument("--only", default=",".join(SHAPES), help="shapes, separated by commas")
    parser.add_argument(
        "--blocks", type=int, default=0, help="take so many blocks of each tower, to save memory"
    )
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = Comparisons()
    for name in asked.only.split(","):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            model, tokenizer = read_openclip(found, name, asked.blocks, folder / "saved")
            ours = lapclip.load(folder / "saved")
            if asked.photos and name in ("ViT-B-32", "ViT-B-16", "ViT-L-14"):
                photos(found, name, model, folder / "saved", sorted(asked.photos.glob("*.jpg")))
            del model
            gc.collect()
            way_back(found, name, ours, folder / "saved", folder)
            read_huggingface(found, name, ours, tokenizer, folder / "transformers")
    versions = {
        package: version(package)
        for package in ("open_clip_torch", "transformers", "torchvision", "torch")
    }
    worst = max(row["difference"] / row["tolerance"] for row in found.rows)
    ok = all(row["ok"] for row in found.rows)
    print(
        json.dumps(
            {
                "ok": ok,
                "blocks": asked.blocks or "all",
                "worst_share_of_tolerance": worst,
                "versions": versions,
                "comparisons": found.rows,
            }
        )
    )
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
