"""Tensors out of the files torch writes, without running what is in them.

`torch.save` files are pickles, which can carry code; torch reads them with `weights_only=True`, which refuses it.
OpenAI published its weights as TorchScript archives, which that refuses whole. They are zip files with a pickle that
names the tensors; ours reads it with a list of what may occur. The program that lies beside it is never looked at.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lapclip.errors import WeightsError, first_line

STORAGES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
LISTS = ("build_intlist", "build_doublelist", "build_boollist", "build_tensorlist")
REFUSED = re.compile(r"(?:GLOBAL|Trying to instantiate class|Unsupported class)\s+([\w.<>]+)")
CONVERT = "a safetensors file of the same weights; where they come from often has one"


def read_tensors(path: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors in a file by their names, and its kind: safetensors, torchscript, checkpoint or state-dict.

    A checkpoint is what a trainer keeps: the state dict is one of its entries.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path), "safetensors"
        if _is_torchscript(path):
            return _read_torchscript(path), "torchscript"
        return _read_saved(path)
    except FileNotFoundError:
        raise WeightsError(f"There is no file {path}.") from None
    except SafetensorError as error:
        raise WeightsError(
            f"{path} is not a whole safetensors file: {first_line(error)}.", hint="download or copy it again"
        ) from None
    except pickle.UnpicklingError as error:
        raise _with_code(path, str(error)) from None
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}.") from None
    # What torch has to say about a file that is none of its own would mean nothing to a user.
    except (zipfile.BadZipFile, EOFError, KeyError, IndexError, TypeError, ValueError, RuntimeError):
        raise WeightsError(
            f"{path} is no file of tensors that torch or safetensors wrote, or not the whole of one.",
            hint="the file of weights itself; where it is that, download or copy it again",
        ) from None


def _with_code(path: Path, message: str) -> WeightsError:
    found = REFUSED.search(message)
    if not found:
        return WeightsError(
            f"{path} is neither a safetensors file nor a file of tensors that torch wrote.", hint=CONVERT
        )
    return WeightsError(
        f"{path} is a pickle with code: it asks for {found[1].rstrip('.')}, which is no tensor. Nothing of it was run.",
        hint=CONVERT,
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
    if all(name.startswith("module.") for name in tensors):  # as torch's wrapper for several devices has them
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return tensors, kind


def _is_torchscript(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.count("/") == 1 and name.endswith("/constants.pkl") for name in archive.namelist())


def _read_torchscript(path: Path) -> dict[str, Tensor]:
    with zipfile.ZipFile(path) as archive:
        (pickled,) = (name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl"))
        with archive.open(pickled) as file:
            module = _Reader(file, archive, pickled.removesuffix("data.pkl")).load()
    tensors: dict[str, Tensor] = {}
    _gather(module, "", tensors)
    if not tensors:
        raise ValueError("it holds no tensors")
    return tensors


class _Inert:
    """Stands for any class of the archive: it keeps its attributes and does nothing."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


def _gather(module: Any, prefix: str, tensors: dict[str, Tensor]) -> None:
    """The tensors of a module and of those inside it, by their full names."""
    for name, value in vars(module).items() if isinstance(module, _Inert) else ():
        if isinstance(value, Tensor):
            tensors[prefix + name] = value
        elif isinstance(value, _Inert):
            _gather(value, f"{prefix}{name}.", tensors)


class _Reader(pickle.Unpickler):
    """Reads the pickle of a TorchScript archive. Whatever is not on its list ends the reading."""

    def __init__(self, file: Any, archive: zipfile.ZipFile, prefix: str) -> None:
        super().__init__(file)
        self._archive, self._prefix = archive, prefix
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        if module == "__torch__" or module.startswith("__torch__."):
            return _Inert
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if module == "torch.jit._pickle" and name in LISTS:
            return _as_it_is
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")

    def persistent_load(self, pid: Any, /) -> Tensor:
        """A storage: the bytes of a file of the archive."""
        kind, dtype, key, _, _ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise ValueError("it has a storage of an unknown kind")
        if key not in self._storages:
            data = bytearray(self._archive.read(f"{self._prefix}data/{key}"))
            self._storages[key] = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return self._storages[key]


def _as_it_is(value: Any) -> Any:
    return value


def _rebuild(storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    """A tensor in a storage. torch checks that it lies inside."""
    return storage.as_strided(size, stride, offset)
