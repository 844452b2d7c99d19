"""Answers to command lines that do not parse: flags of other trainers, and paths and texts without quotes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cyclopts.exceptions import (
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from lapclip.config import locate
from lapclip.errors import ConfigError
from lapclip.exporting import known_formats
from lapclip.suggest import command

PATH_ALONE = "the folder or table without a flag: lapclip train photos/"
RUN_FOLDER = "--name NAME: a run is the folder runs/NAME"
HALF_PRECISION = "--set train.dtype=bfloat16"
# What `lapclip train` has instead of flags of OpenCLIP, Hugging Face and other trainers. Names of settings, such as
# --warmup or --weight-decay, are not listed: they are found among the settings.
OTHER_FLAGS = {
    "--learning-rate": "--lr 1e-3",
    "--batch": "--batch-size 64",
    "--per-device-train-batch-size": "--batch-size 64",
    "--num-train-epochs": "--epochs 3",
    "--max-steps": "--set train.steps=1000",
    "--gpu": "--device cuda",
    "--data": PATH_ALONE,
    "--data-dir": PATH_ALONE,
    "--train-data": PATH_ALONE,
    "--val-data": "a column `split` in the table, with train and val",
    "--output-dir": RUN_FOLDER,
    "--out": RUN_FOLDER,
    "--workers": "--set train.loader_threads=4",
    "--num-workers": "--set train.loader_threads=4",
    "--wd": "--set train.weight_decay=0.1",
    "--seed": "--set train.seed=1",
    "--precision": HALF_PRECISION,
    "--fp16": "--set train.dtype=float16",
    "--bf16": HALF_PRECISION,
    "--model": "--set model.name=mini, or --from MODEL to continue from trained weights",
    "--pretrained": "--from vit-b-32-laion2b",
    "--resume": "lapclip resume, a command of its own",
    "--csv-img-key": "--set data.picture_column=NAME",
    "--csv-caption-key": "--set data.caption_column=NAME",
    "--accum-freq": "--set train.micro_batch=16",
    "--gradient-accumulation-steps": "--set train.micro_batch=16",
    "--grad-checkpointing": "--set train.recompute=true",
    "--report-to": "--set work.track=tensorboard",
}


def explain(error: CycloptsError, arguments: Sequence[str]) -> tuple[str, str]:
    """Return what is wrong with a command line, and what to try."""
    name = ""
    is_known_command = not isinstance(error, UnknownCommandError)
    if is_known_command and arguments and not arguments[0].startswith("-"):
        name = arguments[0]
    message = str(error).strip()
    hint = f"lapclip {name} --help" if name else "lapclip --help"
    if isinstance(error, UnknownOptionError) and name == "train":
        flag = (error.token.keyword or error.token.value).partition("=")[0]
        instead = replacement(flag)
        if instead:
            return f"Unknown option: {flag}.", instead
    if isinstance(error, MissingArgumentError) and name == "export":
        return f"Which format? --to {', '.join(known_formats())}.", "lapclip export --to onnx"
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        joined = join_path(arguments)
        if joined:
            path = next(word for word in joined if " " in word)
            return f"{path} has a space, so it needs quotes.", command(*joined)
        words = " ".join(error.unused_tokens)
        return f"Too many words: {words}. A path or a text with a space needs quotes.", hint
    return message, hint


def replacement(flag: str) -> str:
    """Return what `lapclip train` has instead of a flag of another trainer. Empty if nothing is known."""
    flag = flag.lower().replace("_", "-")
    if flag in OTHER_FLAGS:
        return OTHER_FLAGS[flag]
    try:
        section, field = locate(flag.removeprefix("--").replace("-", "_"))
    except ConfigError:
        return ""
    return f"--set {section}.{field}=VALUE"


def join_path(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with those that are an existing path, if joined by spaces, as one. Empty if none are."""
    for first in range(1, len(arguments)):
        for end in range(len(arguments), first + 1, -1):
            path = " ".join(arguments[first:end])
            if not path.startswith("-") and Path(path).exists():
                return [*arguments[:first], path, *arguments[end:]]
    return []
