"""Read tensors from files that torch or safetensors wrote, without running what is in them.

`torch.save` files are pickles, which can carry code: torch reads them with `weights_only=True`, which refuses it.
TorchScript archives are programs and are refused.

Weights take about the memory that their file has bytes. A small file that would take much more is refused: archives
that unpack to more than they are, tensors that repeat one value a billion times, headers of millions of names.
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lapclip.errors import WeightsError, first_line
from lapclip.paths import check_plain, open_own
from lapclip.weights.published_models import MODELS

REFUSED = re.compile(r"(?:GLOBAL|Trying to instantiate class|Unsupported class)\s+([\w.<>]+)")
MAX_HEADER_BYTES = 10_000_000  # names and sizes of tensors; those of the largest CLIP take 200,000
MAX_UNPACKED_BYTES = 100_000_000  # by which the content of an archive may exceed its file
MAX_REPEATS = 4  # bytes of all tensors for each byte of their file; tensors may share memory
SAFETENSORS_HINT = "a safetensors file of the same weights; where they come from often has one"


def read_tensors(path: Path) -> tuple[dict[str, Tensor], str]:
    """Return the tensors in a file by name, and its kind: safetensors, checkpoint or state-dict.

    A checkpoint is what a trainer keeps: the state dict is one of its entries.
    """
    try:
        tensors, kind = _read(path)
        check_claims(tensors, path)
        return tensors, kind
    except WeightsError:
        raise
    except SafetensorError as error:
        raise WeightsError(
            f"{path} is not a whole safetensors file: {first_line(error)}.",
            hint="download or copy it again",
        ) from None
    except pickle.UnpicklingError as error:
        raise _with_code(path, str(error)) from None
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}.") from None
    except MemoryError:
        raise WeightsError(f"There is too little memory for {path}.") from None
    # What torch has to say about a file that is none of its own would mean nothing to a user.
    except Exception:
        raise WeightsError(
            f"{path} is no file of tensors that torch or safetensors wrote, or not the whole of one.",
            hint="the file of weights itself; where it is that, download or copy it again",
        ) from None


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors in a safetensors file. Raises WeightsError where its header is longer than any is."""
    with open_own(path) as file:
        if int.from_bytes(file.read(8), "little") > MAX_HEADER_BYTES:
            raise WeightsError(f"{path} is not a whole safetensors file: its header is too long.")
    return load_file(path)


def check_claims(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise WeightsError where tensors have far more bytes than their file: copied, they would fill memory."""
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    size = os.path.getsize(path)
    if claimed > MAX_REPEATS * size + MAX_HEADER_BYTES:
        raise WeightsError(
            f"{path} has {size / 1e6:,.1f} MB, and its tensors would take {claimed / 1e6:,.0f} MB of memory.",
            hint=SAFETENSORS_HINT,
        )


def _read(path: Path) -> tuple[dict[str, Tensor], str]:
    check_plain(path)
    if path.suffix == ".safetensors":
        return read_safetensors(path), "safetensors"
    if zipfile.is_zipfile(path):
        _check_archive(path)
    return _read_saved(path)


def _with_code(path: Path, message: str) -> WeightsError:
    found = REFUSED.search(message)
    if not found:
        return WeightsError(
            f"{path} is neither a safetensors file nor a file of tensors that torch wrote.",
            hint=SAFETENSORS_HINT,
        )
    return WeightsError(
        f"{path} is a pickle with code: it asks for {found[1].rstrip('.')}, which is no tensor. Nothing of it was run.",
        hint=SAFETENSORS_HINT,
    )


def _read_saved(path: Path) -> tuple[dict[str, Tensor], str]:
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    kind = "state-dict"
    if isinstance(saved, dict) and isinstance(saved.get("state_dict"), dict):
        saved, kind = saved["state_dict"], "checkpoint"
    if not isinstance(saved, dict):
        raise ValueError(f"it holds one {type(saved).__name__}, not named tensors")
    tensors = {str(name): tensor for name, tensor in saved.items() if isinstance(tensor, Tensor)}
    if not tensors:
        raise ValueError("it holds no named tensors")
    if all(
        name.startswith("module.") for name in tensors
    ):  # as torch's wrapper for several devices has them
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return tensors, kind


def _check_archive(path: Path) -> None:
    """Refuse TorchScript, and archives whose list of members or content is far larger than their file."""
    _check_directory(path)
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        unpacked = sum(member.file_size for member in archive.infolist())
    size = os.path.getsize(path)
    if unpacked > size + MAX_UNPACKED_BYTES:
        raise WeightsError(
            f"{path} has {size / 1e6:,.1f} MB and would unpack to {unpacked / 1e6:,.0f} MB.",
            hint=SAFETENSORS_HINT,
        )
    if any(re.fullmatch(r"[^/]+/constants\.pkl", name) for name in names):
        name = f"{path.stem.lower().removesuffix('px')}-openai"  # OpenAI's file is ViT-B-32.pt
        raise WeightsError(
            f"{path} is a TorchScript archive, which is a program and is not read.",
            hint=f"the model {name}" if name in MODELS else SAFETENSORS_HINT,
        )


def _check_directory(path: Path) -> None:
    """Refuse an archive with a list of members that would fill memory; `zipfile` reads it whole."""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 2**16 - 200))
        end = file.read()
    start = end.rfind(b"PK\5\6")
    size = end[start + 12 : start + 16]
    if size == b"\xff" * 4:  # larger than 4 GB: the size is in the record before
        start = end.rfind(b"PK\6\6")
        size = end[start + 40 : start + 48]
    if int.from_bytes(size, "little") > MAX_HEADER_BYTES:
        raise WeightsError(
            f"{path} is an archive of too many members to be one of tensors.",
            hint=SAFETENSORS_HINT,
        )
