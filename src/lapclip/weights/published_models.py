"""Published models by short names: what each is, where it comes from, how well others found it to do, and fetching it.

A line in `_TABLE` is all that a further model takes. No figure is ours or guessed; where each comes from:

- parameters: counted from the shape, and compared with the tensors whenever the model is read;
- bytes: of OpenAI's files their exact size, as public lists have it beside the same SHA-256; of a repository on the hub
  four bytes a parameter, because its weights are float32 (pages of the hub and MTEB's list of models give 605, 599,
  1,710 and 3,940 MB for CLIP's four sizes here, 813 MB to 2.61 GB for SigLIP's, 1.5 GB for SigLIP 2's);
- recall: OpenCLIP's table of zero-shot retrieval, docs/openclip_retrieval_results.csv at commit 05e7db4: captions to
  images, then images to captions, at 1, 5 and 10; it has none for SigLIP 2;
- arithmetic for an image: OpenCLIP's docs/model_profile.csv at commit 3b37473; SigLIP 2's towers are SigLIP's;
- licence: OpenAI's repository; the page of the repository on the hub.

OpenAI's addresses hold the SHA-256 of the file. On the hub, the digests of a repository are trusted when a model is
first fetched and remembered; later they must be the same. Whatever is in the cache is compared with its digests each
time it is opened. No torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import filelock

from lapclip.errors import WeightsError
from lapclip.paths import cache_folder, digest_of_file, read_json, write_atomic
from lapclip.progress import Progress
from lapclip.text import size
from lapclip.weights.download import (
    LARGEST_FILE,
    RemoteFile,
    fetch_file,
    fetch_json,
    headers_of,
    may,
)

HUB = "https://huggingface.co"
OPENAI = "https://openaipublic.azureedge.net/clip/models"
"""As in clip.py of github.com/openai/CLIP."""
RECALL_SOURCE = "https://github.com/mlfoundations/open_clip/blob/05e7db4987eda177906dc164b4c3ebeb39a9991a/docs/openclip_retrieval_results.csv"
MIT, APACHE = "MIT", "Apache-2.0"
FOLDER = "models"
"""In the cache: a folder for each model and, beside it, what it was when it was first fetched here."""
RANKS = (1, 5, 10)
Recall = tuple[float, ...]
"""Captions to images at these ranks, then images to captions."""
SMALLEST = 5
"""Weights may be in half precision, or less: not in fewer bytes than this part of what they have in full."""
SPARE = 100_000_000
"""Bytes by which a repository may be larger than its weights: tokenizer and configuration."""
SMALL = 40
"""Billions of operations for an image beyond which a processor alone takes about a second for it."""


@dataclass(frozen=True)
class PublishedModel:
    """A model that others trained and publish."""

    name: str
    origin: str
    """The https address of its file, which holds the file's SHA-256, or its repository on the hub."""
    parameters: int
    bytes: int | None
    bytes_source: str
    image_gigaflops: float
    """Arithmetic for one image, in 10^9 operations."""
    licence: str
    licence_source: str
    flickr30k: Recall = ()
    """Recall on Flickr30k's 1,000 test images."""
    coco: Recall = ()
    """Recall on COCO's 5,000 test images."""
    recall_source: str = RECALL_SOURCE

    @property
    def page(self) -> str:
        """Where it comes from."""
        return self.origin if self.pinned else f"{endpoint()}/{self.origin}"

    @property
    def pinned(self) -> str:
        """The SHA-256 that its publisher gives, where that is in the address; else empty."""
        found = re.search(r"://.*/([0-9a-f]{64})/[^/]+$", self.origin)
        return found[1] if found else ""

    @property
    def folder(self) -> Path:
        """Where it lies once it was fetched."""
        return cache_folder() / FOLDER / self.name

    @property
    def known_files(self) -> dict[str, Any]:
        """Size and SHA-256 of each file, as it was first fetched here. That stays when the files themselves go."""
        try:
            return dict(read_json(self.record)["files"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    @property
    def record(self) -> Path:
        """Where it is written down what was first fetched."""
        return self.folder.with_name(f"{self.name}.json")

    @property
    def in_cache(self) -> bool:
        """Whether all its files are here, as far as their sizes tell."""
        files = self.known_files
        return bool(files) and all(
            _has_size(self.folder / name, known) for name, known in files.items()
        )

    @property
    def memory_bytes(self) -> int:
        """What opening it takes: its weights in float32, and once more while they are read."""
        return 8 * self.parameters

    @property
    def t2i_r1(self) -> float:
        """How often a caption finds its own image first, on average over what was measured; 0 where nothing was."""
        found = [recall[0] for recall in (self.flickr30k, self.coco) if recall]
        return sum(found) / max(len(found), 1)

    def to_dict(self) -> dict[str, Any]:
        """As `lapclip models --json` has it."""
        recall = {
            name: _recall(found)
            for name, found in (("flickr30k", self.flickr30k), ("coco", self.coco))
            if found
        }
        return {
            "name": self.name,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "bytes_source": self.bytes_source,
            "image_gigaflops": self.image_gigaflops,
            "memory_bytes": self.memory_bytes,
            "licence": self.licence,
            "licence_source": self.licence_source,
            "from": self.page,
            "digest": "published" if self.pinned else "trusted on first use",
            "recall": {**recall, "source": self.recall_source} if recall else None,
            "cached": self.in_cache,
            "in_cache": self.in_cache,  # what releases before called it
            "path": str(self.folder) if self.in_cache else None,
        }


def _openai(
    name: str,
    file: str,
    parameters: int,
    length: int,
    gigaflops: float,
    flickr30k: Recall,
    coco: Recall,
) -> PublishedModel:
    listed, licence = (
        "https://github.com/pxl-pshr/pytti, model_mirror.py",
        "https://github.com/openai/CLIP, LICENSE",
    )
    address = f"{OPENAI}/{file}"
    return PublishedModel(
        name, address, parameters, length, listed, gigaflops, MIT, licence, flickr30k, coco
    )


def _on_hub(
    name: str,
    repository: str,
    parameters: int,
    gigaflops: float,
    licence: str,
    flickr30k: Recall,
    coco: Recall,
) -> PublishedModel:
    page, length = f"{HUB}/{repository}", 4 * parameters
    counted = f"{page}: float32 weights"
    return PublishedModel(
        name, repository, parameters, length, counted, gigaflops, licence, page, flickr30k, coco
    )


# fmt: off
_TABLE = (
    _openai("vit-b-32-openai", "40d365715913c9da98579312b702a82c18be219cc2a73407c4526f58eba950af/ViT-B-32.pt",
            151_277_313, 353_976_522, 8.82,
            (0.5878, 0.8356, 0.9002, 0.7890, 0.9490, 0.9820), (0.3044, 0.5594, 0.6687, 0.5012, 0.7500, 0.8352)),
    _openai("vit-b-16-openai", "5806e77cd80f8b59890b7e101eabd078d9fb84e6937f9e85e4ecb61988df416f/ViT-B-16.pt",
            149_620_737, 350_837_078, 35.13,
            (0.6216, 0.8572, 0.9192, 0.8220, 0.9660, 0.9900), (0.3309, 0.5842, 0.6899, 0.5242, 0.7670, 0.8462)),
    _openai("vit-l-14-openai", "b8cca3fd41ae0c99ba7e8951adf17d267cdb84cd88be6f7c2e0eca1737a03836/ViT-L-14.pt",
            427_616_513, 932_768_134, 162.03,
            (0.6496, 0.8724, 0.9204, 0.8520, 0.9740, 0.9920), (0.3651, 0.6106, 0.7113, 0.5634, 0.7938, 0.8660)),
    _openai("vit-l-14-336-openai", "3035c92b350959924f9f00213499208652fc7ea050643e8b385c2dac08641f02/ViT-L-14-336px.pt",
            427_944_193, 934_088_680, 381.92,
            (0.6690, 0.8900, 0.9334, 0.8770, 0.9850, 0.9940), (0.3709, 0.6162, 0.7147, 0.5794, 0.8120, 0.8792)),
    _on_hub("vit-b-32-laion2b", "laion/CLIP-ViT-B-32-laion2B-s34B-b79K", 151_277_313, 8.82, MIT,
            (0.6678, 0.8838, 0.9310, 0.8410, 0.9620, 0.9830), (0.3934, 0.6543, 0.7561, 0.5632, 0.7984, 0.8712)),
    _on_hub("vit-b-32-datacomp", "laion/CLIP-ViT-B-32-DataComp.XL-s13B-b90K", 151_277_313, 8.82, MIT,
            (0.6108, 0.8492, 0.9092, 0.7900, 0.9390, 0.9620), (0.3714, 0.6235, 0.7268, 0.5354, 0.7778, 0.8604)),
    _on_hub("vit-b-32-256-datacomp", "laion/CLIP-ViT-B-32-256x256-DataComp-s34B-b86K", 151_288_833, 11.5, MIT,
            (0.6492, 0.8722, 0.9216, 0.8480, 0.9670, 0.9850), (0.3993, 0.6543, 0.7524, 0.5792, 0.8056, 0.8810)),
    _on_hub("vit-b-16-laion2b", "laion/CLIP-ViT-B-16-laion2B-s34B-b88K", 149_620_737, 35.13, MIT,
            (0.6984, 0.9038, 0.9456, 0.8630, 0.9790, 0.9940), (0.4231, 0.6770, 0.7706, 0.5944, 0.8178, 0.8862)),
    _on_hub("vit-b-16-datacomp", "laion/CLIP-ViT-B-16-DataComp.XL-s13B-b90K", 149_620_737, 35.13, MIT,
            (0.6756, 0.8834, 0.9300, 0.8510, 0.9720, 0.9840), (0.4016, 0.6595, 0.7562, 0.5744, 0.8086, 0.8830)),
    _on_hub("vit-l-14-datacomp", "laion/CLIP-ViT-L-14-DataComp.XL-s13B-b90K", 427_616_513, 162.03, MIT,
            (0.7338, 0.9174, 0.9554, 0.8900, 0.9860, 0.9970), (0.4573, 0.7003, 0.7916, 0.6330, 0.8414, 0.9040)),
    _on_hub("vit-h-14-laion2b", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K", 986_109_441, 334.59, MIT,
            (0.7764, 0.9418, 0.9660, 0.9070, 0.9920, 0.9970), (0.4948, 0.7338, 0.8151, 0.6592, 0.8606, 0.9188)),
    _on_hub("vit-b-16-siglip", "timm/ViT-B-16-SigLIP", 203_155_970, 35.42, APACHE,
            (0.7468, 0.9230, 0.9562, 0.8910, 0.9800, 0.9930), (0.4778, 0.7244, 0.8100, 0.6574, 0.8542, 0.9126)),
    _on_hub("vit-b-16-siglip-256", "timm/ViT-B-16-SigLIP-256", 203_202_050, 46.82, APACHE,
            (0.7504, 0.9242, 0.9626, 0.9040, 0.9830, 0.9930), (0.4834, 0.7254, 0.8099, 0.6614, 0.8634, 0.9182)),
    _on_hub("vit-b-16-siglip-384", "timm/ViT-B-16-SigLIP-384", 203_447_810, 112.13, APACHE,
            (0.7848, 0.9416, 0.9708, 0.9270, 0.9910, 0.9980), (0.4990, 0.7366, 0.8204, 0.6774, 0.8758, 0.9258)),
    _on_hub("vit-l-16-siglip-256", "timm/ViT-L-16-SigLIP-256", 652_150_786, 162.56, APACHE,
            (0.7904, 0.9446, 0.9684, 0.9180, 0.9900, 0.9980), (0.5228, 0.7580, 0.8334, 0.7080, 0.8870, 0.9374)),
    _on_hub("vit-l-16-siglip-384", "timm/ViT-L-16-SigLIP-384", 652_478_466, 383.85, APACHE,
            (0.8142, 0.9536, 0.9748, 0.9370, 0.9920, 0.9990), (0.5391, 0.7657, 0.8399, 0.7190, 0.9006, 0.9410)),
    _on_hub("so400m-14-siglip-384", "timm/ViT-SO400M-14-SigLIP-384", 877_960_498, 670.35, APACHE,
            (0.8296, 0.9610, 0.9804, 0.9430, 0.9970, 0.9980), (0.5421, 0.7678, 0.8424, 0.7242, 0.8998, 0.9448)),
    _on_hub("vit-b-16-siglip2-384", "timm/ViT-B-16-SigLIP2-384", 375_479_810, 112.13, APACHE,
            (), ()),
)
# fmt: on
MODELS = {model.name: model for model in _TABLE}


def endpoint() -> str:
    """The hub: huggingface.co, or a mirror that HF_ENDPOINT names."""
    return (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")


def find(name: str) -> PublishedModel | None:
    """The published model of that name, if there is one."""
    return MODELS.get(name)


def best_that_fits(memory: int, disk: int, *, accelerator: bool) -> PublishedModel | None:
    """The model with the best published recall that this computer has room for; without an accelerator, of those whose
    images do not take seconds each. One that is here needs no room on the disk."""
    fitting = [
        model
        for model in MODELS.values()
        if model.memory_bytes < memory / 2
        and (model.in_cache or (model.bytes or model.memory_bytes) < disk / 2)
        and (accelerator or model.image_gigaflops < SMALL)
    ]
    return max(fitting, key=lambda model: model.t2i_r1, default=None)


def fetch(model: PublishedModel, *, yes: bool = False, progress: Progress | None = None) -> Path:
    """The folder with a model: out of the cache, or fetched there after a person agreed. Its files are compared with
    their digests each time; WeightsError where that, or fetching, fails."""
    if not model.in_cache:
        _agreed(model, yes=yes)
        model.folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(model.folder.with_name(f".{model.name}.lock")):
            if not model.in_cache:  # another process may have fetched it meanwhile
                _fetch(model, progress)
                return model.folder  # each file was compared as it came
    for name, known in model.known_files.items():
        path = model.folder / name
        if digest_of_file(path) != (model.pinned or known["sha256"]):
            path.unlink()
            raise WeightsError(
                f"{path} was not what was fetched: its digest is another. It was removed, and nothing of it was used.",
                hint=f"lapclip models {model.name} --yes, which fetches it again",
            )
    return model.folder


def _agreed(model: PublishedModel, *, yes: bool) -> None:
    """Raise WeightsError where nobody agreed to a download."""
    what = f"{model.name} is not on this computer yet: {size(model.bytes)} from {model.page}, licence {model.licence}."
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "ON", "YES"):
        raise WeightsError(
            f"{what} HF_HUB_OFFLINE forbids to fetch it.", hint="a folder with the model"
        )
    if yes:
        return
    answer = may(f"{what} Fetch it?")
    if answer is None:
        once = f"lapclip models {model.name} --yes"
        raise WeightsError(
            f"{what} Nobody can be asked here.", hint=f"add --yes, or once before: {once}"
        )
    if not answer:
        raise WeightsError(f"{model.name} was not fetched.", hint="lapclip models lists others")


def _fetch(model: PublishedModel, progress: Progress | None) -> None:
    """Fetch all files of a model, and remember what they are. Those that are here and right are not fetched again."""
    files, commit = ([_pinned_file(model)], "") if model.pinned else _files_on_hub(model)
    known = model.known_files
    wanted = sum(file.bytes or 0 for file in files)
    whole = all(file.bytes is not None for file in files)
    if model.bytes and (
        wanted > model.bytes + SPARE or (whole and wanted < model.bytes / SMALLEST)
    ):
        raise WeightsError(
            f"{model.page} offers {size(wanted)} for {model.name}, which has {size(model.bytes)}: it is another model.",
            hint="lapclip models lists others",
        )
    _check_announced(model, files, known)
    _check_room(model, files)
    digests, before = {}, 0
    for file in files:
        path = model.folder / file.name
        if found := _already_here(path, file, known.get(file.name)):
            digests[file.name] = found
            before += file.bytes or 0
            continue
        digests[file.name] = found = fetch_file(
            file, model.folder, _part_of(progress, before, wanted)
        )
        before += file.bytes or 0
        if known and found != known.get(file.name, {}).get("sha256"):
            path.unlink()
            raise _changed(model, file.name)
    if not known:
        sizes = {name: (model.folder / name).stat().st_size for name in digests}
        record = {
            "from": model.page,
            "commit": commit,
            "fetched": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "files": {
                name: {"bytes": sizes[name], "sha256": digest} for name, digest in digests.items()
            },
        }
        write_atomic(model.record, json.dumps(record, indent=1))


def _part_of(progress: Progress | None, before: int, whole: int) -> Progress | None:
    """Progress of one file as progress of all, in megabytes."""
    if progress is None:
        return None
    total = max(1, round(whole / 1e6))
    return lambda done, _: progress(min(round((before + done) / 1e6), total), total)


def _pinned_file(model: PublishedModel) -> RemoteFile:
    return RemoteFile(model.origin.rpartition("/")[2], model.origin, model.bytes, model.pinned)


def _files_on_hub(model: PublishedModel) -> tuple[list[RemoteFile], str]:
    """The files of a repository that make a model, with the sizes and digests that the hub announces; its commit."""
    from lapclip.weights.huggingface import choose_files  # brings torch

    listing = fetch_json(f"{endpoint()}/api/models/{model.origin}?blobs=true")
    try:
        commit = str(listing.get("sha") or "")
        commit = commit if re.fullmatch(r"[0-9a-f]{40,64}", commit) else "main"
        about = {each["rfilename"]: each for each in listing["siblings"]}
        files = [_announced(model, name, about[name], commit) for name in choose_files(about)]
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        raise WeightsError(
            f"{endpoint()} does not answer as the Hugging Face hub does.",
            hint="another HF_ENDPOINT, or none",
        ) from None
    if not any(file.name.endswith((".safetensors", ".bin")) for file in files):
        raise WeightsError(
            f"{model.page} has no weights that can be read.", hint="lapclip models lists others"
        )
    return files, commit


def _announced(model: PublishedModel, name: str, about: dict[str, Any], commit: str) -> RemoteFile:
    """What the hub says of one file: in its listing or, where a mirror's is shorter, when asked for the file."""
    address = f"{endpoint()}/{model.origin}/resolve/{commit}/{quote(name)}"
    stored = about.get("lfs") or {}
    length, digest = (
        stored.get("size") or about.get("size"),
        stored.get("sha256") or about.get("blobId") or "",
    )
    if length is None:
        headers = headers_of(address)
        length = headers.get("X-Linked-Size") or headers.get("Content-Length")
        digest = (
            (headers.get("X-Linked-ETag") or headers.get("ETag") or "")
            .removeprefix("W/")
            .strip('"')
        )
    digest = digest if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", str(digest)) else ""
    if length is not None and int(length) < 0:
        raise ValueError("a size below zero")
    most = model.bytes + SPARE if model.bytes else LARGEST_FILE
    return RemoteFile(name, address, None if length is None else int(length), digest, commit, most)


def _check_announced(model: PublishedModel, files: list[RemoteFile], known: dict[str, Any]) -> None:
    """Say before anything large is fetched that it is no longer what it was when it was first fetched."""
    if not known or model.pinned:
        return
    if {file.name for file in files} != set(known):
        raise _changed(model, ", ".join(sorted({file.name for file in files} ^ set(known))))
    for file in files:
        if len(file.digest) == 64 and file.digest != known[file.name]["sha256"]:
            raise _changed(model, file.name)


def _changed(model: PublishedModel, name: str) -> WeightsError:
    return WeightsError(
        f"{model.name} is no longer what it was when it was first fetched here: {name} at {model.page} has changed. "
        "Nothing of it was taken.",
        hint=f"hf:{model.origin} takes it as it is now"
        if not model.pinned
        else "lapclip models lists others",
    )


def _check_room(model: PublishedModel, files: list[RemoteFile]) -> None:
    here = sum(path.stat().st_size for path in model.folder.iterdir() if path.is_file())
    wanted = sum(file.bytes or 0 for file in files) - here
    if (free := shutil.disk_usage(model.folder).free) < 1.05 * wanted:
        raise WeightsError(
            f"{model.name} takes {size(wanted)} in {model.folder}, and {size(free)} are free there.",
            hint="lapclip clean shows what takes room; LAPCLIP_CACHE names another folder",
        )


def _already_here(path: Path, file: RemoteFile, known: Any) -> str:
    """The SHA-256 of a file that is here, where it is the one that is wanted; else nothing."""
    wanted = file.digest if len(file.digest) == 64 else known["sha256"] if known else ""
    return wanted if wanted and path.is_file() and digest_of_file(path) == wanted else ""


def _has_size(path: Path, known: Any) -> bool:
    try:
        return path.is_file() and path.stat().st_size == known["bytes"] and bool(known["sha256"])
    except (OSError, KeyError, TypeError):
        return False


def _recall(found: Recall) -> dict[str, float]:
    ways = [f"{way}_r{rank}" for way in ("t2i", "i2t") for rank in RANKS]
    return dict(zip(ways, found, strict=True))
