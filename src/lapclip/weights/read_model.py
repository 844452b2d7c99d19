"""Which format a model has, and the model: its shape, its tensors under our names, its tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from lapclip.config import ModelConfig
from lapclip.data.tokenizers import (
    SentencePieceTokenizer,
    SiglipTokenizer,
    Tokenizer,
    clip_tokenizer,
    load_tokenizer,
    tokenizer_from_dict,
)
from lapclip.errors import DataError, RunError, WeightsError, first_line
from lapclip.model.pretrained_towers import HUGGING_FACE, PACKAGE, TIMM, TowerSpec
from lapclip.paths import read_bytes, read_json
from lapclip.weights import (
    CONFIG,
    OWN_TOKENIZER,
    PIECES,
    PREPROCESSOR,
    PROCESSOR,
    TOKENIZER,
    WEIGHTS,
    hub,
    huggingface,
    is_exported,
    is_hub_name,
    openai,
    openclip,
    published_models,
)
from lapclip.weights.check_fields import (
    FLAG,
    SECTION,
    STRING,
    check_fields,
    checked_shape,
    one_of,
    whole,
)
from lapclip.weights.published import check_depth
from lapclip.weights.torch_files import read_safetensors, read_tensors

OWN_FIELDS = {"format": one_of(1), "model": SECTION, "tokenizer": SECTION, "towers": SECTION}
TOWER_FIELDS = {
    "kind": one_of(HUGGING_FACE, TIMM, PACKAGE),
    "name": STRING,
    "config": SECTION,
    "pooling": one_of("mean", "first", "last", "max"),
    "unit_length": FLAG,
    "padding": whole(0),
}


class ReadModel(NamedTuple):
    """A model as it was read: its shape, its tensors by our names, in float32 and fresh memory, its tokenizer."""

    shape: ModelConfig
    tensors: dict[str, Tensor]
    tokenizer: Tokenizer
    towers: Mapping[str, TowerSpec] = MappingProxyType({})
    """The foreign networks among its towers."""


def read_model(path: str | os.PathLike) -> ReadModel:
    """A model of ours or a published one: from a run, a folder, a file, by its short name, or by one on the hub."""
    folder = Path(path)
    if not folder.exists():
        if (model := published_models.find(folder.as_posix())) is not None:
            return _read_published(model)
        if is_hub_name(folder.as_posix()):
            folder = hub.download(folder.as_posix())
    if folder.is_file():
        return _read_file(folder)
    if is_exported(folder):
        raise WeightsError(
            f"{folder} holds towers for another engine than torch.",
            hint="the model that it was exported from; lapclip eval and lapclip.load take it as it is",
        )
    if (folder / "model" / CONFIG).exists():
        folder = folder / "model"
    if (folder / openclip.CONFIG).exists():
        return _read_openclip(folder, openclip.weights_file(folder))
    if (folder / CONFIG).exists():
        config = _read_json(folder / CONFIG)
        return (
            _read_own(folder, config) if "format" in config else _read_huggingface(folder, config)
        )
    what = "There is no trained model in" if folder.is_dir() else "There is no folder"
    raise RunError(f"{what} {path}.", hint="lapclip runs")


def _read_published(model: published_models.PublishedModel) -> ReadModel:
    """A model by its short name, fetched where it is not here. It must have the parameters that are known of it."""
    folder = published_models.fetch(model)
    found = read_model(folder)
    if (count := sum(tensor.numel() for tensor in found.tensors.values())) != model.parameters:
        raise WeightsError(
            f"What was fetched as {model.name} has {count:,} parameters instead of {model.parameters:,}: it is another "
            "model.",
            hint="lapclip models lists others",
        )
    return found


def _read_own(folder: Path, saved: dict[str, Any]) -> ReadModel:
    where = str(folder / CONFIG)
    check_fields(saved, OWN_FIELDS, where)
    try:
        shape, tokenizer = (
            checked_shape(saved.get("model"), where),
            tokenizer_from_dict(saved["tokenizer"]),
        )
        if tokenizer.vocabulary > shape.vocabulary:
            raise ValueError(
                f"its tokenizer has {tokenizer.vocabulary:,} tokens, and its weights {shape.vocabulary:,}"
            )
        towers = read_towers(saved.get("towers", {}), shape, where)
        # Copied into fresh memory: products of the file's own, unaligned memory differ in the last bit.
        tensors = {
            name: tensor.clone() for name, tensor in read_safetensors(folder / WEIGHTS).items()
        }
        check_depth(shape, tensors, str(folder))
        return ReadModel(shape, tensors, tokenizer, towers)
    except (DataError, WeightsError) as error:
        raise RunError(
            f"The model in {folder} cannot be loaded: {error.message}",
            hint=error.hint or "lapclip train",
        ) from None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        SafetensorError,
    ) as error:
        raise RunError(
            f"The model in {folder} cannot be loaded: {first_line(error)}.", hint="lapclip train"
        ) from None


def read_towers(saved: dict[str, Any], shape: ModelConfig, where: str) -> dict[str, TowerSpec]:
    """Return what the foreign networks among the towers of a saved model are."""
    for tower, reference in (("image", shape.image_from), ("text", shape.text_from)):
        if bool(reference) != (tower in saved):
            raise WeightsError(
                f"{where}: model.{tower}_from is {reference!r}; it must name the network that is described under "
                f'"towers", and be "" where there is none.'
            )
    for tower, spec in saved.items():
        check_fields({f"towers.{tower}": spec}, {f"towers.{tower}": SECTION}, where)
        for name in ("kind", "name"):
            if name not in spec:
                raise WeightsError(f"{where}: towers.{tower}.{name} is missing.")
        unknown = set(spec) - set(TOWER_FIELDS)
        if unknown:
            raise WeightsError(f"{where}: towers.{tower} has the unknown field {min(unknown)}.")
        check_fields(spec, TOWER_FIELDS, f"{where}: towers.{tower}")
    return {tower: TowerSpec(**spec) for tower, spec in saved.items()}


def _read_openclip(folder: Path, weights: Path) -> ReadModel:
    config = _read_json(folder / openclip.CONFIG)
    shape = openclip.shape_of(config, str(folder / openclip.CONFIG))
    siglip = shape.architecture == "siglip"
    if siglip:
        tokenizer = siglip_tokenizer(folder, shape.vocabulary, openclip.cleaning_of(config))
    else:
        tokenizer = fitting_tokenizer(folder, shape.vocabulary, str(weights))
    tensors = read_tensors(weights)[0]
    shape = replace(shape, logit_bias="logit_bias" in tensors)
    layout = openclip.SIGLIP_LAYOUT if siglip else openai.LAYOUT
    return ReadModel(shape, layout.to_ours(tensors, shape, str(weights)), tokenizer)


def _read_huggingface(folder: Path, config: dict[str, Any]) -> ReadModel:
    both = (folder / name for name in (PROCESSOR, PREPROCESSOR))
    whole, alone = (_read_json(path) if path.exists() else {} for path in both)
    seen = whole.get("image_processor") or alone  # in the order of transformers
    shape = huggingface.shape_of(config, seen, str(folder / CONFIG))
    if shape.architecture == "siglip":
        tokenizer = siglip_tokenizer(folder, shape.vocabulary)
    else:
        tokenizer = fitting_tokenizer(folder, shape.vocabulary, str(folder))
    tensors = huggingface.read_folder(folder)
    # A CLIPModel that is saved again keeps the configuration's bias and loses the tensor, which ranks do not need.
    shape = replace(shape, logit_bias="logit_bias" in tensors)
    layout = huggingface.LAYOUTS[shape.architecture]
    return ReadModel(shape, layout.to_ours(tensors, shape, str(folder)), tokenizer)


def _read_file(path: Path) -> ReadModel:
    """One file of weights. A configuration beside it is taken for its own; without one the shape is inferred."""
    if path.name in openclip.WEIGHTS and (path.parent / openclip.CONFIG).exists():
        return _read_openclip(path.parent, path)
    if path.name in huggingface.WEIGHTS and (path.parent / CONFIG).exists():
        return read_model(path.parent)
    if path.name in openclip.WEIGHTS:
        raise WeightsError(
            f"{path} has no {openclip.CONFIG} beside it, which says how the model computes.",
            hint=f"the folder it came from, with {openclip.CONFIG}",
        )
    tensors, kind = read_tensors(path)
    if openai.has_these_names(tensors):
        # OpenAI's own have quick_gelu. What OpenCLIP's trainer keeps has gelu, unless the model's name says otherwise.
        shape = openai.infer_shape(
            tensors, path, activation="gelu" if kind == "checkpoint" else "quick_gelu"
        )
        tokenizer = fitting_tokenizer(None, shape.vocabulary, str(path))
        return ReadModel(shape, openai.LAYOUT.to_ours(tensors, shape, str(path)), tokenizer)
    if huggingface.has_these_names(tensors):
        raise WeightsError(
            f"{path} has Hugging Face's names and no {CONFIG} beside it, which says how many heads it has.",
            hint=f"the folder it came from, with {CONFIG}",
        )
    first = min(tensors)
    raise WeightsError(
        f"{path} is of another architecture: it has {first} and no visual.conv1.weight, which every CLIP has.",
        hint="weights of a CLIP with a vision transformer, such as ViT-B-32",
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        saved = read_json(path)
        if not isinstance(saved, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"{path} cannot be read: {error}.", hint="download or copy it again"
        ) from None
    return saved


def fitting_tokenizer(folder: Path | None, vocabulary: int, where: str) -> Tokenizer:
    """The tokenizer for weights that know so many tokens; `folder` is where its files would be."""
    try:
        own = load_tokenizer(folder / OWN_TOKENIZER) if folder else None
    except DataError as error:
        raise WeightsError(error.message, hint="download or copy it again") from None
    tokenizer, called = (own, OWN_TOKENIZER) if own else (clip_tokenizer(), "CLIP's own tokenizer")
    if folder and own is None:
        _check_clips_own(folder, vocabulary)
    if tokenizer.vocabulary != vocabulary:
        raise WeightsError(
            f"{called} does not fit the weights: it has {tokenizer.vocabulary:,} tokens, and {where} knows "
            f"{vocabulary:,}.",
            hint="weights that were trained with CLIP's own tokenizer",
        )
    return tokenizer


def siglip_tokenizer(folder: Path, vocabulary: int, cleaning: str | None = None) -> Tokenizer:
    """The tokenizer in a folder of a SigLIP whose weights know so many tokens.

    The first SigLIP has pieces of a unigram model (`spiece.model`, or a tokenizer.json of the same), takes punctuation
    away and fills with the end; SigLIP 2 has Gemma's byte pairs, in lower case, and a token to fill with. `cleaning` is
    what else OpenCLIP does to captions.
    """
    try:
        tokenizer = load_tokenizer(folder / OWN_TOKENIZER) or _siglip_tokenizer(
            folder, vocabulary, cleaning
        )
    except DataError as error:
        raise WeightsError(error.message, hint=error.hint or "download or copy it again") from None
    if tokenizer.vocabulary > vocabulary:
        raise WeightsError(
            f"The tokenizer does not fit the weights: that in {folder} has {tokenizer.vocabulary:,} tokens, and the "
            f"weights know {vocabulary:,}.",
            hint="tokenizer and weights of the same model",
        )
    return tokenizer


def _siglip_tokenizer(folder: Path, vocabulary: int, cleaning: str | None) -> Tokenizer:
    # Each as its library does: transformers reads the first SigLIP's pieces, OpenCLIP a tokenizer.json.
    names = (PIECES, TOKENIZER) if cleaning is None else (TOKENIZER, PIECES)
    path = next((folder / name for name in names if (folder / name).exists()), None)
    if path is None:
        raise WeightsError(
            f"{folder} has no tokenizer.", hint=f"{PIECES} or {TOKENIZER} from where it came"
        )
    try:
        if path.name == PIECES:
            pieces = read_bytes(path, own=True)
            return SentencePieceTokenizer(pieces, "canonical" if cleaning is None else cleaning)
        return _described_tokenizer(read_json(path), vocabulary, cleaning)
    except DataError as error:
        raise DataError(f"{path} cannot be read: {error.message}", hint=error.hint) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"{path} cannot be read: {first_line(error)}.") from None


def _described_tokenizer(
    description: dict[str, Any], vocabulary: int, cleaning: str | None
) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json: a unigram model, or byte pairs as Gemma's."""
    model = description["model"]
    if model["type"] == "Unigram":
        # Multilingual vocabularies end with pieces that T5 reserved; the weights lack them.
        pieces = model["vocab"]
        while len(pieces) > vocabulary and "<extra_id_" in pieces[-1][0]:
            pieces.pop()
        ids = {piece: at for at, (piece, _) in enumerate(pieces)}
        end, padding = "</s>", "</s>"
        cleaning = "canonical" if cleaning is None else cleaning
    else:
        ids = model["vocab"]
        end, padding = "<eos>", "<pad>"
        if cleaning is None and '"Lowercase"' not in json.dumps(description["normalizer"]):
            steps: list[Any] = [{"type": "Lowercase"}]
            if description["normalizer"]:
                steps.append(description["normalizer"])
            description["normalizer"] = {"type": "Sequence", "normalizers": steps}
    tokenizer = SiglipTokenizer(description, ids[padding], cleaning or "")
    if tokenizer.end != ids[end] or tokenizer.length("") != 1:
        description["post_processor"] = end_with(end, ids[end])
        tokenizer = SiglipTokenizer(description, ids[padding], cleaning or "")
    return tokenizer


def end_with(name: str, token: int) -> dict[str, Any]:
    """Return the step of a tokenizer.json that puts an end token behind each caption."""
    parts = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": name, "type_id": 0}}]
    special = {name: {"id": name, "ids": [token], "tokens": [name]}}
    return {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": special}


def _check_clips_own(folder: Path, vocabulary: int) -> None:
    """Where a folder has a tokenizer, it must be the one that we take for it."""
    path = folder / TOKENIZER
    if not path.exists():
        return
    try:
        tokens, merges = _tokenizer_in_json(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"{path} cannot be read: {error}.", hint="download or copy it again"
        ) from None
    if tokens != vocabulary:
        raise WeightsError(
            f"The tokenizer does not fit the weights: {path} has {tokens:,} tokens, and the weights know "
            f"{vocabulary:,}.",
            hint="tokenizer and weights of the same model",
        )
    if merges != [tuple(merge) for merge in clip_tokenizer().merges]:
        raise WeightsError(
            f"{path} is another tokenizer than CLIP's own, the only foreign one that can be read.",
            hint="weights that were trained with CLIP's own tokenizer",
        )


def _tokenizer_in_json(path: Path) -> tuple[int, list[tuple[str, ...]]]:
    """Return how many tokens a tokenizer of Hugging Face has, and its merges, none if it is of another kind."""
    saved: dict[str, Any] = read_json(path)
    model = saved["model"]
    vocab = model.get("vocab", {})
    names = set(vocab) if isinstance(vocab, dict) else {piece[0] for piece in vocab}
    names |= {token["content"] for token in saved.get("added_tokens") or ()}
    merges = [
        tuple(merge.split(" ") if isinstance(merge, str) else merge)
        for merge in model.get("merges", ())
    ]
    return len(names), merges
