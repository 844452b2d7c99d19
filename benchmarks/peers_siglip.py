"""Are SigLIPs read and written as the libraries that publish them do? Run it in the peers' environment, with the
packages sentencepiece and protobuf beside it:

    PYTHONPATH=src benchmarks/.venv/bin/python benchmarks/peers_siglip.py --blocks 2
    PYTHONPATH=src benchmarks/.venv/bin/python benchmarks/peers_siglip.py --only ViT-B-16-SigLIP,siglip
    PYTHONPATH=src benchmarks/.venv/bin/python benchmarks/peers_siglip.py --only tokens --texts 100000

For each of OpenCLIP's shapes, and for transformers' SiglipModel and Siglip2Model (at the one size that its positions
are for): random weights, saved by them, are loaded here; embeddings of images and captions must agree to 1e-5. Then the
way back: our folders, loaded by the peers, with their tokenizers. Vocabularies are learnt here, because the published
ones are not at hand: one of a unigram model with all of NFKC, one of byte pairs as Gemma's. `tokens` compares ids with
SentencePiece's own, with transformers' SiglipTokenizer and with OpenCLIP's tokenizer, for texts of all sorts.
A line a comparison; the last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import random
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import sentencepiece
import torch
import transformers
from openclip import open_clip  # through ours, which makes the peers importable beside a CPU torch
from peers_weights import Comparisons, huggingface_encoders, openclip_encoders
from safetensors.torch import save_file
from sentencepiece import sentencepiece_model_pb2
from tokenizers.normalizers import Lowercase
from torch import Tensor, nn

from lapclip.data.dataset import Pairs
from lapclip.embedder import Embedder, load_torch
from lapclip.exporting import CheckPairs, Job, find_format
from lapclip.weights import huggingface, openclip
from lapclip.weights.read_model import end_with, siglip_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixtures" / "siglip"))
import make

CAPTIONS = [
    "a photo of a cat",
    "two dogs &amp; a red bird, in the SNOW!",
    "Ein Häuschen am Weiher.",
    "",
    "a dog " * 60,
]
SHAPES = (
    *(
        "ViT-B-16-SigLIP",
        "ViT-B-16-SigLIP2",
        "ViT-B-32-SigLIP2-256",
        "ViT-L-16-SigLIP-256",
        "ViT-SO400M-14-SigLIP",
    ),
    *(
        "ViT-SO400M-14-SigLIP-384",
        "ViT-SO400M-16-SigLIP2-256",
        "ViT-gopt-16-SigLIP2-256",
        "siglip",
        "siglip2",
        "tokens",
    ),
)
WORDS = [
    *(
        "a",
        "photo",
        "of",
        "the",
        "Cat",
        "dogs",
        "Snow,",
        "häuschen",
        "über",
        "straße",
        "naïve",
        "café",
        "собака",
        "猫",
    ),
    *("窓", "قطة", "한국어", "ÅÄÖ", "🇩🇪", "don't", "&amp;", "13"),
    *(
        "\u0391\u03a3",
        "\u0130s",
        "\ufb01ne",
        "\uff21\uff22",
        "\xbd",
        "\u2122",
        "\xb4",
        "\xa8a",
        "e\u0301",
        "2,5",
        "-",
    ),
    *(
        "a\u0308\u0323",
        "\u200b",
        "x\u200dy",
        "👩\u200d👩\u200d👧",
        "\u3000",
        "\xa0",
        "\t",
        "\n",
        "'",
        "!",
        "_",
        "\u2026",
    ),
    *("\u201cq\u201d", "\x00", "\ufeff", "\ufdfa", "\u1100\u1161\u11a8", ""),
]


class Vocabularies:
    """The two kinds that SigLIPs have, as files, with so many tokens."""

    def __init__(self, folder: Path, size: int = 3000) -> None:
        lines = [
            line
            for path in sorted(Path("docs").glob("*.md"))
            for line in path.read_text("utf-8").splitlines()
        ]
        sentences = [
            line.strip().lower()[:300] for line in lines if line.strip()
        ] + make.SENTENCES.split("|") * 20
        first = make.learn(
            sentences, vocab_size=size, model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1
        )  # fmt: skip
        second = make.learn(
            sentences, vocab_size=size, model_type="bpe", normalization_rule_name="identity", add_dummy_prefix=False,
            remove_extra_whitespaces=False, split_digits=True, pad_id=0, eos_id=1, bos_id=2, unk_id=3,
            eos_piece="<eos>", bos_piece="<bos>",
        )  # fmt: skip
        self.size, self.folder = size, folder
        self.pieces = sentencepiece.SentencePieceProcessor(model_proto=first)
        self.pairs = sentencepiece.SentencePieceProcessor(model_proto=second)
        folder.mkdir()
        (folder / "spiece.model").write_bytes(first)
        gemma = {
            **make.gemma(self.pairs),
            "post_processor": end_with("<eos>", 1),
        }  # as published folders have it
        (folder / "gemma.json").write_text(json.dumps(gemma), encoding="utf-8")
        self.unigram_json().save(str(folder / "unigram.json"))

    def unigram_json(self):
        """The tokenizer.json of OpenCLIP's folders: as transformers makes it of T5's vocabulary."""
        from tokenizers import (
            Regex,
            Tokenizer,
            decoders,
            models,
            normalizers,
            pre_tokenizers,
            processors,
        )

        model, proto = self.pieces, sentencepiece_model_pb2.ModelProto()
        proto.ParseFromString(model.serialized_model_proto())
        scored = [(model.id_to_piece(at), model.get_score(at)) for at in range(len(model))]
        made = Tokenizer(models.Unigram(scored, 2, True))
        first = normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)
        spaces = [
            normalizers.Strip(left=False, right=True),
            normalizers.Replace(Regex(" {2,}"), "▁"),
        ]
        made.normalizer = normalizers.Sequence([first, *spaces])
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
        made.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 1)]
        )
        made.add_special_tokens(["</s>", "<unk>"])
        return made

    def put(self, folder: Path, name: str) -> None:
        """A vocabulary into a folder of a model, under the name that it has there."""
        shutil.copy(
            self.folder / name,
            folder / ("spiece.model" if name == "spiece.model" else "tokenizer.json"),
        )
        if name != "spiece.model":
            unigram = name == "unigram.json"
            special = {
                "eos_token": "</s>" if unigram else "<eos>",
                "pad_token": "</s>" if unigram else "<pad>",
            }
            described = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "unk_token": "<unk>",
                **special,
            }
            (folder / "tokenizer_config.json").write_text(json.dumps(described))


def disturb(model: nn.Module) -> nn.Module:
    """Norms and biases begin as ones and zeros, and would hide that they were swapped."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval()


def fewer_blocks(model: nn.Module, blocks: int) -> None:
    """OpenCLIP's towers cut to so many blocks: timm's have their depth by name."""
    model.visual.trunk.blocks = model.visual.trunk.blocks[:blocks]
    model.text.transformer.resblocks = model.text.transformer.resblocks[:blocks]


def openclip_shape(
    found: Comparisons, name: str, blocks: int, words: Vocabularies, place: Path
) -> None:
    config = copy.deepcopy(open_clip.get_model_config(name))
    config["text_cfg"]["vocab_size"] = words.size
    torch.manual_seed(0)
    arguments = {key: value for key, value in copy.deepcopy(config).items() if key != "custom_text"}
    model = open_clip.CustomTextCLIP(**arguments)
    if blocks:
        fewer_blocks(model, blocks)
        config["text_cfg"]["layers"] = blocks
        openclip.TIMM_SIZES = {
            kind: (width, blocks, heads, hidden)
            for kind, (width, _, heads, hidden) in openclip.TIMM_SIZES.items()
        }
    disturb(model)
    saved = place / "saved"
    saved.mkdir()
    seen = {
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "interpolation": "bicubic",
        "resize_mode": "squash",
    }
    (saved / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": config, "preprocess_cfg": seen})
    )
    save_file(model.state_dict(), saved / "open_clip_model.safetensors")
    words.put(saved, "gemma.json" if "SigLIP2" in name else "unigram.json")
    tokenizer = open_clip.tokenizer.HFTokenizer(
        str(saved), config["text_cfg"]["context_length"], **config["text_cfg"]["tokenizer_kwargs"]
    )
    ours = load_torch(saved)
    found.models(
        f"{name}, OpenCLIP's folder read", ours, openclip_encoders(model, tokenizer), CAPTIONS
    )
    scale, bias = model.logit_scale.exp().item(), model.logit_bias.item()
    found.add(f"{name}, scale and bias", *map(as_row, ((scale, bias), ours.logits())), 1e-5)
    write(ours, "openclip", place / "openclip")
    if blocks:  # timm would make it whole
        again = copy.deepcopy(model)
        tensors = open_clip.factory.load_state_dict(
            str(place / "openclip" / "open_clip_model.safetensors")
        )
        again.load_state_dict(tensors)
    else:
        again = open_clip.create_model_and_transforms(f"local-dir:{place / 'openclip'}")[0].eval()
    tokenizer = open_clip.get_tokenizer(f"local-dir:{place / 'openclip'}")
    found.models(
        f"{name}, ours written for OpenCLIP", ours, openclip_encoders(again, tokenizer), CAPTIONS
    )
    del again, model
    gc.collect()
    write(ours, "huggingface", place / "huggingface")
    back = transformers.SiglipModel.from_pretrained(place / "huggingface").eval()
    encoders = huggingface_encoders(back, huggingface_tokens(place / "huggingface"))
    found.models(
        f"{name}, ours written for transformers", ours, encoders, [plain(text) for text in CAPTIONS]
    )


def write(ours: Embedder, to: str, out: Path) -> None:
    """What `lapclip export` does, but for the check on images."""
    nothing = Pairs(np.zeros((0, 1, 1, 3), np.uint8), [])
    out.mkdir()
    find_format(to).check_model(ours, out)
    find_format(to).write(Job(ours, out, CheckPairs(nothing, nothing, "nothing")))


def as_row(numbers) -> Tensor:
    return torch.tensor(numbers).numpy()


def plain(text: str) -> str:
    """What their tokenizer does not mend."""
    return text.replace("&amp;", "&")


def huggingface_tokens(folder: Path):
    fast = transformers.AutoTokenizer.from_pretrained(folder)
    return lambda captions: fast(
        captions, padding="max_length", truncation=True, return_tensors="pt"
    )["input_ids"]


def huggingface_shape(
    found: Comparisons, kind: str, blocks: int, words: Vocabularies, place: Path
) -> None:
    sizes = {"num_hidden_layers": blocks} if blocks else {}
    text = {**sizes, "vocab_size": words.size}
    torch.manual_seed(1)
    if kind == "siglip":
        config = transformers.SiglipConfig(text_config=text, vision_config=sizes)
        model = disturb(transformers.SiglipModel(config))
        encode_image = huggingface_encoders(model, lambda _: None)[0]
    else:
        config = transformers.Siglip2Config(text_config=text, vision_config=sizes)
        model = disturb(transformers.Siglip2Model(config))
        encode_image = naflex(model)
    saved = place / "saved"
    model.save_pretrained(saved, max_shard_size="300MB")
    words.put(saved, "spiece.model" if kind == "siglip" else "gemma.json")
    ours = load_torch(saved)
    if kind == "siglip":
        slow = transformers.SiglipTokenizer(str(saved / "spiece.model"))

        def tokens(captions):
            padded = slow(captions, padding="max_length", truncation=True, return_tensors="pt")
            return padded.input_ids

    else:
        tokens = siglip2_tokens(saved)
    encoders = (encode_image, huggingface_encoders(model, tokens)[1])
    found.models(f"{kind}, transformers' folder read", ours, encoders, CAPTIONS)
    found.add(
        f"{kind}, scale and bias",
        as_row(ours.logits()),
        as_row((model.logit_scale.exp().item(), model.logit_bias.item())),
        1e-5,
    )
    write(ours, "huggingface", place / "huggingface")
    back = transformers.SiglipModel.from_pretrained(place / "huggingface").eval()
    found.models(
        f"{kind}, ours written for transformers",
        ours,
        huggingface_encoders(back, huggingface_tokens(place / "huggingface")),
        CAPTIONS,
    )


def naflex(model: nn.Module):
    """Square images as a Siglip2Model takes them: patches with colours last."""

    def encode(pixels: Tensor) -> Tensor:
        from transformers.models.siglip2.image_processing_siglip2 import convert_image_to_patches

        patches = torch.stack([convert_image_to_patches(image, 16) for image in pixels])
        grid = pixels.shape[-1] // 16
        mask, shapes = (
            torch.ones(patches.shape[:2], dtype=torch.int32),
            torch.tensor([[grid, grid]] * len(pixels)),
        )
        return model.get_image_features(
            pixel_values=patches, pixel_attention_mask=mask, spatial_shapes=shapes
        ).pooler_output

    return encode


def siglip2_tokens(folder: Path):
    """transformers' own tokenizer of SigLIP 2, with the end that published folders ask for."""
    described = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]
    fast = transformers.Siglip2Tokenizer(
        vocab=described["vocab"], merges=[tuple(pair) for pair in described["merges"]]
    )

    def encode(captions: list[str]) -> Tensor:
        rows = [[*fast(text, add_special_tokens=False)["input_ids"][:63], 1] for text in captions]
        return torch.tensor([row + [0] * (64 - len(row)) for row in rows])

    return encode


def texts(count: int) -> list[str]:
    """Words in several scripts, characters of all of Unicode, accents upon accents, blanks, long ones."""
    draw = random.Random(0)

    def one() -> str:
        kind = draw.random()
        if kind < 0.5:
            return "".join(
                draw.choice(WORDS) + draw.choice((" ", " ", "", "  "))
                for _ in range(draw.randrange(14))
            )
        if kind < 0.75:
            ranges = ((0x20, 0x7F), (0xA0, 0x3000), (0x3000, 0xD7FF), (0xE000, 0x110000))
            return "".join(
                chr(draw.randrange(*draw.choice(ranges))) for _ in range(draw.randrange(20))
            )
        if kind < 0.95:
            letters = "aeo\u0301\u0308\u0323\u1100\u1161\u11a8\ufdfa "
            return "".join(draw.choice(letters) for _ in range(draw.randrange(20)))
        return " ".join(draw.choice(WORDS) for _ in range(200))

    return [one() for _ in range(count)]


def tokens(found: Comparisons, count: int, words: Vocabularies, place: Path) -> None:
    """How many texts of all have other ids than SentencePiece's own, transformers' and OpenCLIP's."""
    many = texts(count)
    special = [f"<{name}" for name in ("pad>", "eos>", "bos>", "unk>", "mask>")]
    many = [text for text in many if not any(name in text for name in special)]

    def folder(name: str) -> Path:
        one = place / name
        one.mkdir()
        words.put(one, name)
        return one

    def compare(what: str, ours, theirs, some: list[str]) -> None:
        other = [text for text in some if ours.encode(text, 64) != theirs(text)]
        for text in other[:3]:
            print(ascii(text), ours.encode(text, 64)[:12], theirs(text)[:12])
        found.add(f"{len(some):,} texts, {what}", as_row([float(len(other))]), as_row([0.0]), 0)

    def filled(ids: list[int], padding: int) -> list[int]:
        return [*ids[:63], 1] + [padding] * (63 - len(ids))

    first = siglip_tokenizer(folder("spiece.model"), words.size)
    compare(
        "SentencePiece, unigram",
        first,
        lambda text: filled(words.pieces.encode(make.canonical(text)), 1),
        many,
    )
    slow = transformers.SiglipTokenizer(str(place / "spiece.model" / "spiece.model"))
    # transformers puts a space before a text and keeps one that begins it, and takes its marks out of texts.
    ordinary = [
        text
        for text in many
        if make.canonical(text) and text == text.strip() and not set(text) & {"▁", "\0"}
    ]
    compare(
        "transformers' SiglipTokenizer",
        first,
        lambda text: slow(text, padding="max_length", truncation=True)["input_ids"],
        ordinary[: count // 10],
    )
    second = siglip_tokenizer(folder("gemma.json"), words.size)
    by_letter = Lowercase().normalize_str  # which knows a newer Unicode than Python may
    compare(
        "SentencePiece, byte pairs",
        second,
        lambda text: filled(words.pairs.encode(by_letter(text)), 0),
        many,
    )
    theirs = siglip2_tokens(place / "gemma.json")
    compare(
        "transformers' Siglip2Tokenizer",
        second,
        lambda text: theirs([text])[0].tolist(),
        many[: count // 10],
    )
    for name in ("unigram.json", "gemma.json"):
        third = siglip_tokenizer(
            place / name if name == "gemma.json" else folder(name), words.size, "mended-canonical"
        )
        peer = open_clip.tokenizer.HFTokenizer(str(place / name), 64, clean="canonicalize")
        compare(
            f"OpenCLIP's tokenizer, {name}",
            third,
            lambda text, peer=peer: peer(text)[0].tolist(),
            many[: count // 10],
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        default=",".join(SHAPES),
        help="shapes, separated by commas; tokens for the tokenizers",
    )
    parser.add_argument(
        "--blocks", type=int, default=0, help="take so many blocks of each tower, to save memory"
    )
    parser.add_argument("--texts", type=int, default=20_000, help="texts whose ids are compared")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found, sizes = Comparisons(), dict(openclip.TIMM_SIZES)
    with tempfile.TemporaryDirectory() as shelf:
        words = Vocabularies(Path(shelf) / "words")
        for name in asked.only.split(","):
            openclip.TIMM_SIZES = dict(sizes)
            with tempfile.TemporaryDirectory() as place:
                if name == "tokens":
                    tokens(found, asked.texts, words, Path(place))
                else:
                    compare = huggingface_shape if name in huggingface.DEFAULTS else openclip_shape
                    compare(found, name, asked.blocks, words, Path(place))
    packages = ("open_clip_torch", "timm", "transformers", "tokenizers", "sentencepiece", "torch")
    worst = max(
        (row["difference"] / row["tolerance"] for row in found.rows if row["tolerance"]),
        default=0.0,
    )
    ok = all(row["ok"] for row in found.rows)
    versions = {package: version(package) for package in packages}
    facts = {
        "ok": ok,
        "blocks": asked.blocks or "all",
        "worst_share_of_tolerance": worst,
        "versions": versions,
    }
    print(json.dumps({**facts, "comparisons": found.rows}))
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
