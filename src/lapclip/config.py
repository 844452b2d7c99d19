"""Every setting exactly once: what it means, what it may be, and how recipes, --set and defaults come together.

A setting is named `section.field` everywhere: in recipes, in --set, in run.toml. Later layers win over earlier ones.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lapclip.errors import ConfigError, closest, nearest
from lapclip.paths import read_toml

AUTO, ALL, KEEP, NEVER = "auto", "all", "keep", "never"
DDP, FSDP = "ddp", "fsdp"
RANDOM, CLOSED_FORM = "random", "closed-form"
RECIPES = Path(__file__).parent / "recipes"
DEFAULT_RECIPE, PHOTOS_RECIPE = "first-run", "photos"
DEFAULT_MODEL = "mini"
STAGES = 4
"""A tower of convolutions has its blocks in so many stages, each of half the side and twice the width."""
CLIP_MEAN, CLIP_STD = "0.48145466 0.4578275 0.40821073", "0.26862954 0.26130258 0.27577711"
"""What CLIP takes from red, green and blue, which are 0 to 1, and what it divides them by."""
MOST_THREADS = 1024
"""More than any machine here has cores; torch crashes where the system gives it no more threads."""
ACTIVATIONS = ("gelu", "quick_gelu", "gelu_tanh")
BY_CONTENT, BY_NAME = "content", "name"
"""What splits are drawn by, where the data has none of its own."""


def setting(
    default: Any = dataclasses.MISSING,
    *,
    least: float | None = None,
    most: float | None = None,
    choices=(),
    objective: str = "",
) -> Any:
    """Return a field with its limits, and the objective in `training/objectives` that it switches on."""
    limits = {"least": least, "most": most, "choices": tuple(choices), "objective": objective}
    if default is dataclasses.MISSING:
        return field(metadata=limits)
    return field(default=default, metadata=limits)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the model. `lapclip model NAME` shows the named ones."""

    name: str = setting()
    """The named shape to start from; the fields below change it."""
    image_size: int = setting(least=1)
    """Side of the square images the image tower sees, in pixels."""
    patch: int = setting(least=1)
    """Side of a patch, in pixels. It must divide image_size."""
    architecture: str = setting("clip", choices=("clip", "siglip"))
    """Whose towers these are: CLIP's, or SigLIP's, which are read from published weights (docs/weights.md)."""
    image_tower: str = setting("transformer", choices=("transformer", "convolutions"))
    """What looks at images: CLIP's vision transformer, or a residual network, which learns more from few images."""
    image_from: str = setting("")
    """A pretrained network that looks at images instead: `efficientnet-lite0`, `timm:NAME`, or a Hugging Face folder
    or name. docs/finetune.md"""
    text_from: str = setting("")
    """A pretrained network that reads captions instead, with its own tokenizer: `minilm-l6`, or a Hugging Face folder
    or name."""
    image_taps: str = setting("")
    """Blocks of a pretrained image network after which its state is pooled and seen by the head, beside its features:
    numbers from 0, before the first block, separated by spaces."""
    text_taps: str = setting("")
    """The same for a pretrained text network."""
    head: int = setting(2048, least=1)
    """Width of the hidden layer between a pretrained network and the embedding."""
    image_width: int = setting(least=1)
    """Width of the image tower; of convolutions, the width of the first of four stages."""
    image_layers: int = setting(least=1)
    """Blocks in the image tower; of convolutions, a multiple of four."""
    image_heads: int = setting(least=1)
    """Attention heads in the image tower. They must divide image_width. Convolutions have none."""
    text_width: int = setting(least=1)
    """Width of the text tower."""
    text_layers: int = setting(least=1)
    """Blocks in the text tower."""
    text_heads: int = setting(least=1)
    """Attention heads in the text tower. They must divide text_width."""
    embedding: int = setting(least=1)
    """Length of the vectors that images and captions become."""
    vocabulary: int = setting(least=3)
    """Tokens the text tower knows. Training takes it from the tokenizer."""
    context: int = setting(least=2)
    """Longest caption in tokens, start and end included. Longer captions are cut."""
    logit_bias: bool = setting(False)
    """Whether a learnt bias is added to scaled similarities, as the sigmoid loss wants. Training sets it."""
    activation: str = setting("gelu", choices=ACTIVATIONS)
    """What is between the two layers of an MLP. OpenAI's weights want `quick_gelu`, x * sigmoid(1.702 x); SigLIP's
    `gelu_tanh`."""
    text_activation: str = setting("", choices=("", *ACTIVATIONS))
    """The same for the text tower, where it has another; empty is `activation`."""
    image_mlp: int = setting(0, least=0)
    """Width between the two layers of the image tower's MLPs; 0 is four times image_width."""
    text_mlp: int = setting(0, least=0)
    """The same for the text tower; 0 is four times text_width."""
    pixel_mean: str = setting(CLIP_MEAN)
    """What is taken from red, green and blue, which are 0 to 1: three numbers, separated by spaces."""
    pixel_std: str = setting(CLIP_STD)
    """What red, green and blue are divided by then: three numbers above 0, separated by spaces."""
    interpolation: str = setting("bicubic", choices=("bicubic", "bilinear"))
    """How images are resized."""
    resize: str = setting("shortest", choices=("shortest", "squash"))
    """`shortest` brings the short side to size and cuts the ends off the long one; `squash` squeezes all into the
    square."""
    crop_share: float = setting(1.0, least=0.1, most=1.0)
    """The share of the resized image's side that is seen, from its middle: image_size 224 and a share of 0.875 resize
    to 256 and cut 224 out."""
    colours: str = setting("srgb", choices=("srgb", "stored"))
    """`srgb` converts images with a colour profile; `stored` takes their numbers as they are, as published weights
    learnt them."""

    @property
    def image_hidden(self) -> int:
        """Width between the two layers of the image tower's MLPs."""
        return self.image_mlp or 4 * self.image_width

    @property
    def text_hidden(self) -> int:
        """Width between the two layers of the text tower's MLPs."""
        return self.text_mlp or 4 * self.text_width

    @property
    def class_tokens(self) -> int:
        """Tokens of the image tower beside its patches: CLIP's has one, SigLIP's none."""
        return int(self.architecture == "clip")

    def __post_init__(self) -> None:
        _check_shape(self)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to learn from."""

    source: str = setting("scenes")
    """Where images and captions come from: a folder, a file, a pattern of tar shards, `emoji`, or `scenes`, which are
    drawn."""
    seed: int = setting(0, least=0)
    """Seed of the split where the data has none of its own, and of the drawn images and their captions."""
    split_rule: str = setting(BY_CONTENT, choices=(BY_CONTENT, BY_NAME))
    """What that split is drawn by: the images themselves, so that copies of one image, exact or near, are all on one
    side, or their names. A run keeps its rule."""
    held_out: float = setting(0.1, least=0.01, most=0.4)
    """Share of the images in each of `val` and `test`, where the data has no splits of its own."""
    picture_column: str = setting(AUTO)
    """The column or key of a table that names the image. `auto` looks at names and contents."""
    caption_column: str = setting(AUTO)
    """The column or key of a table that holds the caption."""
    split_column: str = setting(AUTO)
    """The column or key of a table that holds the split; empty uses none."""
    separator: str = setting(AUTO)
    """What separates the columns of a table; `tab` for a tab."""
    pictures: str = setting("")
    """The folder that the names in a table are relative to; empty looks beside the table."""
    prompts: str = setting("a photo of a {}.")
    """Captions for a folder of class folders, with {} for the class, separated by a vertical bar."""
    tokenizer: str = setting(AUTO, choices=(AUTO, "characters", "bpe", "clip"))
    """How captions become tokens: a token a character, a BPE learnt from the training captions, or CLIP's own."""
    vocabulary: int = setting(4096, least=600, most=65_536)
    """Tokens of a BPE that is learnt; 514 of them stand for single bytes, start and end. `auto` may take fewer."""
    stream: str = setting(AUTO, choices=(AUTO, "always", "never"))
    """Decode images each time they are needed instead of packing them once. `auto` where the disk is too small."""
    broken_share: float = setting(0.05, least=0.0, most=1.0)
    """The share of broken images up to which they are left out and named; beyond it there is no run."""
    min_pairs: int = setting(10, least=2)
    """Fewest images with captions that a run is trained on; those that the data itself holds out do
    not count. Fewer are refused."""
    train_pairs: int = setting(5000, least=2)
    """Images to draw for training."""
    captions: int = setting(4, least=1, most=16)
    """Captions written for each drawn training image."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to learn."""

    seed: int = setting(0, least=0)
    """Seed of the initial weights, the order of the pairs and every draw while training."""
    epochs: int = setting(20, least=1)
    """Passes over the training images. `steps` or `minutes` override it."""
    steps: int = setting(0, least=0)
    """Updates in all; 0 leaves it to `epochs`."""
    minutes: float = setting(0.0, least=0.0)
    """Time to fill; turned into `steps` once, before training, by timing real steps. 0 leaves it to `epochs`."""
    batch_size: int = setting(128, least=2)
    """Pairs the loss compares at once. More negatives teach more; memory grows with it."""
    micro_batch: int = setting(0, least=0)
    """Pairs in memory at once; 0 takes the whole batch. The result is the same: smaller costs time and saves memory."""
    parallel: str = setting(AUTO, choices=(AUTO, DDP, FSDP))
    """How ranks of `torchrun` divide the work: `ddp` gives each all weights and some rows of every batch; `fsdp` also
    divides weights, gradients and the optimizer's state: less memory while it trains, and slower. `auto` is `ddp`.
    docs/together.md"""
    rows: str = setting("")
    """How many rows of a batch each host takes, in proportion: `3,1` gives the first three times as many as the second.
    Empty for equal ranks."""
    timeout_seconds: float = setting(600.0, least=10.0)
    """Seconds after which ranks that wait for another in a step end. torchrun starts them again if it may."""
    loss_ring: bool = setting(False)
    """Compute the loss of several ranks block by block: embeddings travel from rank to rank, and no rank holds those of
    the whole batch. Less memory for large batches, and more time."""
    exchange: str = setting("float32", choices=("float32", "bfloat16"))
    """The precision in which ranks of `torchrun` send each other gradients: `bfloat16` takes half as long on a slow
    network. docs/together.md"""
    loss: str = setting(
        "softmax", choices=("softmax", "sigmoid"), objective="contrastive.Contrastive"
    )
    """How similarities are judged: `softmax` has each image choose among all captions of the batch, and each caption
    among all images (CLIP); `sigmoid` judges each pair by itself (SigLIP). A model to start from that learnt with
    `sigmoid` goes on with it, unless another is asked for. docs/loss.md"""
    phrases: float = setting(0.0, least=0.0, most=0.95, objective="phrases.PhraseObjective")
    """Share of the loss that phrases have: beside each whole caption a word or a few of any caption of the
    image, so that short questions are answered as well. 0 learns from whole captions alone. docs/finetune.md"""
    optimizer: str = setting("adamw", choices=("adamw", "muon"))
    """What updates weights: `adamw`, or `muon`, which takes the matrices of blocks a step of equal size in every
    direction and leaves the rest to AdamW. docs/photos.md says what it gives from random weights."""
    learning_rate: float = setting(1e-3, least=0.0)
    """Highest learning rate, reached at the end of the warm-up."""
    matrix_rate: float = setting(0.03, least=0.0)
    """The same for the matrices that Muon updates; of convolutions, the angle by which they turn."""
    weight_decay: float = setting(0.1, least=0.0)
    """AdamW's decay of weight matrices. Norms, biases, position and class embeddings and the temperature have none."""
    beta1: float = setting(0.9, least=0.0, most=0.9999)
    """AdamW's memory of the gradient."""
    beta2: float = setting(0.98, least=0.0, most=0.9999)
    """AdamW's memory of the squared gradient."""
    epsilon: float = setting(1e-6, least=0.0)
    """AdamW's guard against division by zero."""
    warmup: float = setting(0.1, least=0.0, most=1.0)
    """Share of the run in which the learning rate rises; afterwards it falls along a cosine."""
    clip_norm: float = setting(1.0, least=0.0)
    """Gradients longer than this are shortened to it; 0 never shortens."""
    cheap_size: int = setting(0, least=0)
    """Side of the images in the cheap part of the run, in pixels; 0 is the model's own."""
    cheap_share: float = setting(0.5, least=0.0, most=1.0)
    """The cheap part: this share of the run, from its start. The rest sees images of full size."""
    start: str = setting("")
    """The model to start from, as `--from` names it: a run, a folder or file of weights, or a name on the hub."""
    head_start: str = setting(RANDOM, choices=(RANDOM, CLOSED_FORM))
    """What new heads of pretrained networks start with: random values, or the linear maps that fit the frozen features
    of both towers to each other best (canonical correlation analysis), in seconds. docs/finetune.md"""
    image_blocks: int | str = setting(ALL, least=0, choices=(ALL,))
    """How many of the image tower's last blocks learn; 0 leaves its head alone to learn, `all` freezes nothing."""
    text_blocks: int | str = setting(ALL, least=0, choices=(ALL,))
    """The same for the text tower."""
    lora_rank: int = setting(0, least=0)
    """Rank of additions to attention (LoRA) that learn instead of the blocks' own weights; 0 is without."""
    tower_share: float = setting(1.0, least=0.0)
    """Share of the learning rate for all but the heads: pretrained towers want less than new heads."""
    layer_decay: float = setting(1.0, least=0.0, most=1.0)
    """The learning rate of each block as a share of the one above it."""
    views: int = setting(0, least=0)
    """Crops and flips of each image that are drawn once and used again; the first is the image as it is. 0 draws
    new ones at each step. What a frozen tower makes of so many can be kept."""
    features: str = setting(KEEP, choices=(KEEP, NEVER))
    """Compute once what frozen parts of towers give for images and captions and keep it, or never."""
    teacher: str = setting("", objective="distillation.Distillation")
    """The model that teaches this one, as `--teacher` names it: a run, a folder of weights, or a file of
    embeddings (docs/distil.md)."""
    teacher_weight: float = setting(0.9, least=0.0, most=1.0)
    """Share of the loss that the teacher's has; the contrastive one has the rest."""
    crop: float = setting(1.0, least=0.05, most=1.0)
    """Smallest share of an image that a random crop keeps; 1 never crops."""
    flip: float = setting(0.0, least=0.0, most=1.0)
    """How often an image is flipped left to right. Never where its caption names a side."""
    label_smoothing: float = setting(0.0, least=0.0, most=0.9)
    """Share of the softmax loss's target that all captions of a batch have, and all images: some fit nearly as well as
    the true ones. 0 is without."""
    word_weight: float = setting(
        0.0, least=0.0, most=100.0, objective="predicted_words.PredictedWords"
    )
    """Weight of a second loss beside the contrastive one: from each embedding, the tokens of all captions of its image
    are predicted, so that captions that say the same in other words come together. 0 is without. docs/photos.md"""
    consistency: float = setting(0.0, least=0.0, most=100.0, objective="consistency.Consistency")
    """Weight of a loss that brings two crops of an image together. 0 is without. On 1,500 photos a
    weight of 1 found 8.0 % of images among the first ten instead of 6.9 %, within the intervals, and a
    step took 1.8 times as long (dev/LOG.md)."""
    symbol_dropout: float = setting(0.0, least=0.0, most=0.9)
    """Share of a caption's tokens left out at random, so that few captions are not learnt by heart."""
    feature_dropout: float = setting(0.0, least=0.0, most=0.9)
    """Share of a pretrained image network's features left out at random before its head."""
    head_dropout: float = setting(0.0, least=0.0, most=0.9)
    """Share of the hidden layer of the heads of pretrained networks left out at random."""
    evaluate_every_epochs: int = setting(1, least=1)
    """Epochs between evaluations. The last step is always evaluated."""
    patience: int = setting(0, least=0)
    """Evaluations in a row without a better score after which a run ends; 0 always goes to the last step."""
    checkpoint_every_seconds: float = setting(60.0, least=0.0)
    """Seconds between checkpoints: what a crash can cost. 0 writes none by the clock."""
    checkpoint_every_epochs: int = setting(0, least=0)
    """Epochs between checkpoints; 0 writes none by the epoch."""
    device: str = setting(AUTO, choices=(AUTO, "cpu", "accelerator", "cuda", "mps", "xpu"))
    """Where to compute. Like the other `auto` settings it is settled by timing real steps (`lapclip tune`) or, where
    the run is too short for that, plainly: the accelerator where there is one, float32."""
    dtype: str = setting(AUTO, choices=(AUTO, "float32", "bfloat16", "float16"))
    """Precision of the products. The weights that are kept and updated stay float32."""
    image_attention: str = setting(AUTO, choices=(AUTO, "fused", "products", "triton"))
    """How the image tower computes attention: by torch's own kernel, as two products with a softmax between them, or by
    our own kernel for short sequences (CUDA, half precision)."""
    text_attention: str = setting(AUTO, choices=(AUTO, "fused", "products", "triton"))
    """The same for the text tower."""
    linear: str = setting(AUTO, choices=(AUTO, "torch", "onednn", "triton"))
    """What computes the linear layers: torch's choice, or oneDNN (CPU); `triton` has our own kernels compute
    GELU and norms, with the gradients of the biases beside them (CUDA, half precision)."""
    recompute: bool = setting(False)
    """Compute blocks again in the backward pass instead of keeping what they computed: less memory, more time."""
    compile: str = setting(AUTO, choices=(AUTO, "none", "compiled", "graph", "compiled-graph"))
    """How a step is sent to the device. `graph` records it once and replays it (CUDA); `compiled` has torch.compile
    rewrite it first, which takes a minute and needs a compiler. `auto` records where that can be had."""
    threads: int | str = setting(AUTO, least=1, most=MOST_THREADS, choices=(AUTO,))
    """CPU threads. `auto` starts from torch's own choice. Kept for the whole run, because results depend on it."""
    loader_threads: int | str = setting(AUTO, least=1, most=MOST_THREADS, choices=(AUTO,))
    """Threads that prepare the next batches. `auto` takes as few as keep up with the step."""


@dataclass(frozen=True, kw_only=True)
class WorkConfig:
    """How a run behaves towards the machine and its people. None of it changes what is learnt."""

    polite: bool = setting(False)
    """Run at a low priority, and pause on a low battery, when the processor is held back by heat and while swap grows;
    go on by itself."""
    battery: int = setting(30, least=0, most=100)
    """Per cent of the battery below which a polite run pauses, unless the machine is plugged in."""
    keep_awake: bool = setting(True)
    """Keep the machine from sleeping while the run works. The lid still puts it to sleep."""
    ask: str = setting("")
    """Captions to follow in `lapclip watch --web`, separated by a vertical bar; `--ask` adds one."""
    track: str = setting("none", choices=("none", "tensorboard"))
    """Write the figures in another tool's form as well: `tensorboard` puts its event files into the run's folder."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    work: WorkConfig = WorkConfig()


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "work": WorkConfig,
}


@dataclass(frozen=True)
class Layer:
    """Some settings and where they came from, for error messages."""

    origin: str
    values: Mapping[str, Mapping[str, Any]]


def recipe_for(source: str | None, recipe: str | None, start: str | None = None) -> str:
    """Return the requested recipe, the default one for drawn scenes, or AUTO: chosen when the images are counted."""
    return recipe or (
        DEFAULT_RECIPE if source in (None, DataConfig().source) and not start else AUTO
    )


def recipe_from_nothing(source: str | None) -> str:
    """The recipe that trains without weights of others, for the built-in scenes or for images."""
    return DEFAULT_RECIPE if source in (None, DataConfig().source) else PHOTOS_RECIPE


def recipe_names() -> list[str]:
    """The recipes that come with lapclip, the default one first."""
    names = sorted(path.stem for path in RECIPES.glob("*.toml"))
    return sorted(names, key=lambda name: name != DEFAULT_RECIPE)


def read_recipe(recipe: str) -> Layer:
    """A recipe by its name, or a TOML file by its path."""
    path = RECIPES / f"{recipe}.toml"
    if recipe.endswith(".toml"):
        path = Path(recipe)
    elif recipe not in recipe_names():
        likely = closest(recipe, recipe_names()) or DEFAULT_RECIPE
        unknown = f"Unknown recipe {recipe}. {nearest(recipe, recipe_names())}"
        raise ConfigError(unknown, hint=f"--recipe {likely}")
    return read_layer(path)


def read_layer(path: Path) -> Layer:
    """The settings in a TOML file."""
    try:
        values = read_toml(path)
    except FileNotFoundError:
        raise ConfigError(
            f"No such file: {path}.", hint=f"--recipe with one of {', '.join(recipe_names())}"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not readable as TOML: {error}.",
            hint="open it in an editor and mend that line",
        ) from None
    return Layer(path.name, values)


def parse_settings(settings: list[str]) -> Layer:
    """`section.field=value`, as given to --set. Names are as `locate` takes them."""
    values: dict[str, dict[str, Any]] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting} has no value.", hint=f"--set {name}=VALUE")
        section, field_name = locate(name.strip(), text.strip())
        values.setdefault(section, {})[field_name] = _parse_text(text.strip())
    return Layer("--set", values)


# Flags of `lapclip train`, and arguments of `lapclip.train`, that are short for a setting.
SETTING_FLAGS = {
    "device": "train.device",
    "batch_size": "train.batch_size",
    "epochs": "train.epochs",
    "lr": "train.learning_rate",
}


def flag_settings(flags: Mapping[str, str | float | None]) -> list[str]:
    """Return flags as settings. They are laid over `--set`, so a flag wins."""
    return [f"{SETTING_FLAGS[name]}={value}" for name, value in flags.items() if value is not None]


def minutes_layer(minutes: float | None) -> Layer:
    """What --minutes asks for."""
    if minutes is not None and minutes <= 0:
        raise ConfigError(f"--minutes must be more than 0, not {minutes:g}.", hint="--minutes 5")
    return Layer("--minutes", {"train": {"minutes": minutes}} if minutes is not None else {})


def check_teacher(recipe: str, layers: Sequence[Layer], config: Config) -> None:
    """Refuse a recipe that learns from a teacher where none is named. The first layer is the recipe's."""
    needs_teacher = (
        "teacher_weight" in layers[0].values.get("train", {}) and config.train.teacher_weight
    )
    if needs_teacher and not config.train.teacher:
        raise ConfigError(
            f"Recipe {recipe} learns from a teacher, and none is named.",
            hint="--teacher RUN, or a file of embeddings; --set train.teacher_weight=0 trains the same without one",
        )


def build_config(layers: Sequence[Layer], shapes: Mapping[str, ModelConfig]) -> Config:
    """Lay the layers over the defaults and over the named model shape, and check every value."""
    chosen: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for layer in layers:
        for section, values in layer.values.items():
            if section not in SECTIONS:
                raise ConfigError(
                    f"{layer.origin}: unknown section {section}. {nearest(section, SECTIONS)}"
                )
            if not isinstance(values, Mapping):
                raise ConfigError(
                    f"{layer.origin}: {section} is a section, so it takes fields.",
                    hint=f"[{section}]",
                )
            for name, value in values.items():
                chosen[section][name] = checked(layer.origin, section, name, value)
    shape_name = chosen["model"].get("name", DEFAULT_MODEL)
    whole = all(
        one.name in chosen["model"] for one in dataclasses.fields(ModelConfig) if _is_required(one)
    )
    if shape_name not in shapes and not whole:
        origin = [layer.origin for layer in layers if "name" in layer.values.get("model", {})][-1]
        likely = closest(shape_name, shapes) or DEFAULT_MODEL
        unknown = f"{origin}: unknown model {shape_name}. {nearest(shape_name, shapes)}"
        raise ConfigError(unknown, hint=f"lapclip model {likely}")
    try:
        base = vars(shapes[shape_name]) if shape_name in shapes else {}
        model = ModelConfig(**{**base, **chosen["model"]})
    except ConfigError as error:  # parts that do not fit each other may come from several places
        origins = [
            layer.origin for layer in layers if set(layer.values.get("model", {})) - {"name"}
        ]
        raise ConfigError(f"{', '.join(origins)}: {error.message}", hint=error.hint) from None
    train = TrainConfig(**chosen["train"])
    if train.cheap_size % model.patch or train.cheap_size > model.image_size:
        origins = [
            layer.origin for layer in layers if "cheap_size" in layer.values.get("train", {})
        ]
        raise ConfigError(
            f"{', '.join(origins)}: train.cheap_size {train.cheap_size} must be a multiple of model.patch "
            f"{model.patch}, at most model.image_size {model.image_size}.",
            hint=f"--set train.cheap_size={max(1, model.image_size // model.patch // 2) * model.patch}",
        )
    return Config(
        model=model,
        data=DataConfig(**chosen["data"]),
        train=train,
        work=WorkConfig(**chosen["work"]),
    )


def replace_in(config: Config, section: str, **values: Any) -> Config:
    """The configuration with some fields of one section changed."""
    return dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **values)}
    )


def _is_required(one: dataclasses.Field) -> bool:
    return one.default is dataclasses.MISSING


def locate(name: str, value: str = "") -> tuple[str, str]:
    """Return the section and the field that a setting's name means.

    A field name that is unique may stand alone. `value` is for the hint of an error.
    """
    fields = {
        f"{section}.{f.name}": (section, f.name)
        for section, kind in SECTIONS.items()
        for f in dataclasses.fields(kind)
    }
    if name in fields:
        return fields[name]
    matches = [found for found in fields.values() if found[1] == name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        options = " or ".join(".".join(found) for found in matches)
        raise ConfigError(
            f"--set {name} could mean {options}.", hint=f"--set {'.'.join(matches[0])}=VALUE"
        )
    known = set(fields) if "." in name else {found[1] for found in fields.values()}
    likely = closest(name, known)
    if likely is None:
        raise ConfigError(f"--set {name}: unknown field.", hint="a field of docs/settings.md")
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", value):
        value = "VALUE"  # else it would have to be quoted for a shell
    raise ConfigError(
        f"--set {name}: unknown field. Did you mean {likely}?", hint=f"--set {likely}={value}"
    )


def _parse_text(text: str) -> Any:
    """A value as TOML would read it; anything else is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


@cache
def field_types(section: type) -> dict[str, Any]:
    """Return the type of each field of a section."""
    return typing.get_type_hints(section)


def checked(origin: str, section: str, name: str, value: Any) -> Any:
    """The value of a field of a section, or ConfigError where it may not be that."""
    kind = SECTIONS[section]
    known = {f.name: f for f in dataclasses.fields(kind)}
    if name not in known:
        raise ConfigError(f"{origin}: unknown field {section}.{name}. {nearest(name, known)}")
    limits = known[name].metadata
    where = f"{origin}: {section}.{name}"
    annotation = field_types(kind)[name]
    accepted = (
        typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    )
    if float in accepted and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise ConfigError(f"{where} must be a number that is not as large as that.") from None
    if accepted == (str,) and type(value) in (int, float):
        value = str(value)  # a folder, a column or a list of one may look like a number
    if type(value) not in accepted:
        expected = " or ".join(
            {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}[
                t.__name__
            ]
            for t in accepted
        )
        raise ConfigError(f"{where} must be {expected}, not {value!r}.")
    if isinstance(value, str) and re.search(
        "[\ud800-\udfff]", value
    ):  # of a name that is no UTF-8; run.toml has to be
        raise ConfigError(
            f"{where} holds bytes that are no text: {value!r}.",
            hint="rename the folder or the file",
        )
    if isinstance(value, str) and limits["choices"] and value not in limits["choices"]:
        raise ConfigError(
            f"{where} cannot be {value!r}; it is one of {', '.join(limits['choices'])}."
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where} must be a finite number, not {value}.")
    if not isinstance(value, str):
        if limits["least"] is not None and value < limits["least"]:
            raise ConfigError(f"{where} must be at least {limits['least']}, not {value}.")
        if limits["most"] is not None and value > limits["most"]:
            raise ConfigError(f"{where} must be at most {limits['most']}, not {value}.")
    return value


def _check_shape(shape: ModelConfig) -> None:
    """Raise ConfigError where the settings of a `ModelConfig` cannot go together."""
    siglip = shape.architecture == "siglip"
    if siglip and (shape.image_tower != "transformer" or shape.image_from or shape.text_from):
        raise ConfigError(
            "model.architecture siglip has towers of its own: it takes neither convolutions nor other networks.",
            hint="--set model.architecture=clip",
        )
    if siglip and shape.embedding != shape.image_width:
        raise ConfigError(
            f"SigLIP's embeddings are as long as its image tower is wide: model.embedding {shape.embedding} is not "
            f"model.image_width {shape.image_width}.",
            hint=f"--set model.embedding={shape.image_width}",
        )
    # Where SigLIP's patches do not divide an image, as 14 does not 384, its last pixels are not seen.
    if (
        shape.image_size % shape.patch
        and not shape.image_from
        and (not siglip or shape.image_size < shape.patch)
    ):
        raise ConfigError(
            f"model.patch {shape.patch} does not divide model.image_size {shape.image_size}.",
            hint=f"--set model.image_size={max(1, shape.image_size // shape.patch) * shape.patch}",
        )
    if shape.image_tower == "convolutions" and (
        shape.image_layers % STAGES or shape.image_width % 2
    ):
        raise ConfigError(
            f"A tower of convolutions has blocks in {STAGES} stages and an even width, not model.image_layers "
            f"{shape.image_layers} and model.image_width {shape.image_width}.",
            hint=f"--set model.image_layers={-(-shape.image_layers // STAGES) * STAGES} "
            f"--set model.image_width={shape.image_width + shape.image_width % 2}",
        )
    for tower in ("image", "text"):
        width, heads = getattr(shape, f"{tower}_width"), getattr(shape, f"{tower}_heads")
        if width % heads:
            fitting = max(count for count in range(1, heads + 1) if width % count == 0)
            raise ConfigError(
                f"model.{tower}_heads {heads} does not divide model.{tower}_width {width}.",
                hint=f"--set model.{tower}_heads={fitting}",
            )
    _check_colours("pixel_mean", shape.pixel_mean, CLIP_MEAN, above=-math.inf)
    _check_colours("pixel_std", shape.pixel_std, CLIP_STD, above=0.0)


def _check_colours(name: str, text: str, usual: str, *, above: float) -> None:
    """Three numbers for red, green and blue."""
    try:
        fits = len(text.split()) == 3 and all(
            above < float(number) < math.inf for number in text.split()
        )
    except (ValueError, AttributeError):
        fits = False
    if not fits:
        kind = "three numbers above 0" if above == 0 else "three numbers"
        raise ConfigError(
            f"model.{name} must be {kind}, separated by spaces, not {text!r}.",
            hint=f'--set "model.{name}={usual}"',
        )
