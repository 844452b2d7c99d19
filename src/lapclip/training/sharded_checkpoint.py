"""Tensors of a checkpoint in parts: every rank writes the parts that it has, any number of ranks reads them.

The files are safetensors, one for each rank, as torch's distributed checkpoints write them for Hugging Face. Each file
says which part of a tensor it holds. The caller writes a manifest with the checksums last. Torch's default format is
not used, because its metadata is a pickle.

While torch writes, ranks send each other their plans as pickles. That is why FSDP is for ranks inside a trusted network
(`torchrun`), and not for `--machines`. Reading sends nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lapclip import paths
from lapclip.errors import CheckpointError, first_line
from lapclip.training.distributed import Ranks

PATTERN = "*.safetensors"


def write_parts(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, str]:
    """Write the parts of tensors that each rank has, and return the SHA-256 of every file. All ranks call this.

    `folder` lies on a disk that all ranks share. Tensors that are not in parts are written by one of them.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            save(dict(tensors), storage_writer=writer, process_group=ranks.process_group)
        except CheckpointException as failed:  # no Exception
            rank, (error, _) = min(failed.failures.items(), key=_rank_of)
            raise OSError(f"{first_line(error)} (rank {rank} on {ranks.hosts[rank]})") from failed
    own = f"shard-{ranks.rank + 1:05d}-"
    digests = {}
    for path in sorted(folder.glob(PATTERN)):
        if path.name.startswith(own):
            digests[path.name] = paths.digest_of_file(path)
    merged: dict[str, str] = {}
    for of_rank in ranks.gather_json(digests):
        merged.update(of_rank)
    return merged


def _rank_of(failure: tuple[int, object]) -> int:
    return failure[0]


def read_parts(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite tensors, whole or in parts, with what a folder of parts has. The caller has checked the checksums."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    sizes = sizes_of_parts(folder)
    if sizes.keys() != tensors.keys():
        other = min(sizes.keys() ^ tensors.keys())
        raise CheckpointError(f"it holds other tensors than the run has: {other}")
    for name, tensor in tensors.items():
        if sizes[name] != tensor.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(sizes[name])}, not {tuple(tensor.shape)}"
            )
    reader = HuggingFaceStorageReader(str(folder))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(dict(tensors), storage_reader=reader, no_dist=True)


def sizes_of_parts(folder: Path) -> dict[str, torch.Size]:
    """Return the shape of every whole tensor in a folder of parts."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: metadata[name].size for name in metadata}  # pyright: ignore[reportAttributeAccessIssue]
