"""Small foreign networks to build towers on: one for images, named `tiny-image`, one for text."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from lapclip.weights.pretrained_networks import PACKAGED, PackagedTower

WORDS = "a the of on in at and left right top bottom red green blue yellow small large cat dog house tree night day"


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.convolution(x)).relu()


class TinyImage(nn.Module):
    """A stem, four blocks, and a classifier that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, stride=4)
        self.stages = nn.ModuleList(Residual(12) for _ in range(4))
        self.after = nn.Conv2d(12, 20, 1)
        self.classes = nn.Linear(20, 10)

    def extract_features(self, pixels: Tensor) -> Tensor:
        x = self.stem(pixels).relu()
        for stage in self.stages:
            x = stage(x)
        return self.after(x).relu()

    def forward(self, pixels: Tensor) -> Tensor:
        return self.classes(self.extract_features(pixels).mean(dim=(2, 3)))


def tiny_image() -> TinyImage:
    """The same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return TinyImage()


PACKAGED["tiny-image"] = PackagedTower(
    "image",
    tiny_image,
    packages=("a-package-that-is-not-installed",),
    install="",
    taps="",
    facts={"image_size": 32, "pixel_mean": "0.5 0.5 0.5", "pixel_std": "0.25 0.25 0.25"},
)


def tiny_text(folder: Path) -> Path:
    """A Hugging Face folder with a BERT of three blocks and a tokenizer of a few words."""
    from transformers import BertConfig, BertModel

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS.split()]
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
    )
    with torch.random.fork_rng():
        torch.manual_seed(6)
        BertModel(config).save_pretrained(folder)
    write_tokenizer(folder, words)
    return folder


def write_tokenizer(folder: Path, words: list[str]) -> None:
    """Words as tokens, in the form of tokenizer.json."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing

    made = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = BertPreTokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    made.post_processor = TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.save(str(folder / "tokenizer.json"))
    marks = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **marks}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
