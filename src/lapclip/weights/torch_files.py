"""Tensors out of the files torch writes, without running what is in them.

`torch.save` files are pickles, which can carry code; torch reads them with `weights_only=True`, which refuses it.
OpenAI published its weights as TorchScript archives, which that refuses whole. They are zip files with a pickle that
names the tensors; ours reads it with a list of what may occur. The program that lies beside it is never read.

Weights take about the memory that their file has bytes. A small file that would take much more is refused: archives
that unpack to more than they are, tensors that repeat one value a billion times, headers of millions of names.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lapclip.errors import WeightsError, first_line
from lapclip.paths import check_plain, open_own

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
MOST_NAMES = 10_000_000
"""Bytes that the names and sizes of tensors may take in a file; those of the largest CLIP take 200,000."""
MOST_UNPACKED = 100_000_000
"""Bytes by which an archive's content may be larger than its file; only its programs are compressed."""
MOST_MODULES = 20_000
"""Modules of an archive; ViT-L has some hundred."""
MOST_REPEATED = 4
"""How many times the bytes of their file tensors may have, which may lie in the same place."""
CONVERT = "a safetensors file of the same weights; where they come from often has one"


def read_tensors(path: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors in a file by their names, and its kind: safetensors, torchscript, checkpoint or state-dict.

    A checkpoint is what a trainer keeps: the state dict is one of its entries.
    """
    try:
        tensors, kind = _read(path)
        check_claims(tensors, path)
        return tensors, kind
    except WeightsError:
        raise
    except FileNotFoundError:
        raise WeightsError(f"There is no file {path}.") from None
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
        if int.from_bytes(file.read(8), "little") > MOST_NAMES:
            raise WeightsError(f"{path} is not a whole safetensors file: its header is too long.")
    return load_file(path)


def check_claims(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise WeightsError where tensors have far more bytes than their file: copied, they would fill memory."""
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    size = os.path.getsize(path)
    if claimed > MOST_REPEATED * size + MOST_NAMES:
        raise WeightsError(
            f"{path} has {size / 1e6:,.1f} MB, and its tensors would take {claimed / 1e6:,.0f} MB of memory.",
            hint=CONVERT,
        )


def _read(path: Path) -> tuple[dict[str, Tensor], str]:
    check_plain(path)
    if path.suffix == ".safetensors":
        return read_safetensors(path), "safetensors"
    if zipfile.is_zipfile(path) and _is_torchscript(path):
        return _read_torchscript(path), "torchscript"
    return _read_saved(path)


def _with_code(path: Path, message: str) -> WeightsError:
    found = REFUSED.search(message)
    if not found:
        return WeightsError(
            f"{path} is neither a safetensors file nor a file of tensors that torch wrote.",
            hint=CONVERT,
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
    if all(
        name.startswith("module.") for name in tensors
    ):  # as torch's wrapper for several devices has them
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return tensors, kind


def _is_torchscript(path: Path) -> bool:
    _check_directory(path)
    with zipfile.ZipFile(path) as archive:
        size, unpacked = (
            os.path.getsize(path),
            sum(member.file_size for member in archive.infolist()),
        )
        if unpacked > size + MOST_UNPACKED:
            raise WeightsError(
                f"{path} has {size / 1e6:,.1f} MB and would unpack to {unpacked / 1e6:,.0f} MB.",
                hint=CONVERT,
            )
        return any(
            name.count("/") == 1 and name.endswith("/constants.pkl") for name in archive.namelist()
        )


def _read_torchscript(path: Path) -> dict[str, Tensor]:
    with zipfile.ZipFile(path) as archive:
        (pickled,) = (
            name
            for name in archive.namelist()
            if name.count("/") == 1 and name.endswith("/data.pkl")
        )
        content = archive.read(pickled)
        _check_memo(content)
        module = _Reader(io.BytesIO(content), archive, pickled.removesuffix("data.pkl")).load()
    tensors = _gather(module)
    if not tensors:
        raise ValueError("it holds no tensors")
    return tensors


def _check_directory(path: Path) -> None:
    """Raise WeightsError where an archive's list of members is longer than any is: it is read as a whole."""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 2**16 - 200))
        end = file.read()
    size = end[(at := end.rfind(b"PK\5\6")) + 12 : at + 16]
    if size == b"\xff" * 4:  # an archive of more than 4 GB says it elsewhere
        size = end[(at := end.rfind(b"PK\6\6")) + 40 : at + 48]
    if int.from_bytes(size, "little") > MOST_NAMES:
        raise WeightsError(
            f"{path} is an archive of too many members to be one of tensors.", hint=CONVERT
        )


def _check_memo(pickled: bytes) -> None:
    """Raise ValueError where a pickle numbers its objects higher than it can have any: a place is made for each."""
    for operation, argument, _ in pickletools.genops(pickled):
        if "PUT" in operation.name and isinstance(argument, int) and argument > len(pickled):
            raise ValueError("its objects are numbered too high")


class _Inert:
    """Stands for any class of the archive: it keeps its attributes and does nothing."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


def _gather(root: Any) -> dict[str, Tensor]:
    """The tensors of a module and of those inside it, by their full names."""
    tensors: dict[str, Tensor] = {}
    waiting, walked = [(root, "")], 0
    while waiting:
        module, prefix = waiting.pop()
        walked += 1
        if (
            walked > MOST_MODULES
        ):  # one that lies under two names is walked twice, and so on inside it
            raise ValueError(f"it has more than {MOST_MODULES:,} modules")
        for name, value in vars(module).items() if isinstance(module, _Inert) else ():
            if isinstance(value, Tensor):
                tensors[prefix + name] = value
            elif isinstance(value, _Inert):
                waiting.append((value, f"{prefix}{name}."))
    return tensors


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
            self._storages[key] = (
                torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            )
        return self._storages[key]


def _as_it_is(value: Any) -> Any:
    return value


def _rebuild(
    storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> Tensor:
    """A tensor in a storage. torch checks that it lies inside."""
    return storage.as_strided(size, stride, offset)
