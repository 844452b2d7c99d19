"""Published models by short names: what each is, where it comes from, how well it does, and fetching it.

A line in `_TABLE` adds a model. No figure is ours or guessed:

- parameters: counted from the shape, and compared with the tensors whenever the model is read;
- recall: OpenCLIP's table of zero-shot retrieval, docs/openclip_retrieval_results.csv at commit 05e7db4: captions to
  images, then images to captions, at 1, 5 and 10; it has none for SigLIP 2;
- arithmetic for an image: OpenCLIP's docs/model_profile.csv at commit 3b37473; SigLIP 2's towers are SigLIP's;
- license: OpenAI's repository; the page of the repository on the hub.

The digests of a repository are trusted when a model is first fetched, and remembered: later they must be the same. Files
in the cache are compared with their digests each time the model is opened. No torch.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from lapclip.errors import WeightsError
from lapclip.paths import cache_folder, digest_of_file, read_json, write_atomic
from lapclip.progress import Progress
from lapclip.text import size
from lapclip.weights.hub import HubFile, confirm, download_file, endpoint, list_files

RECALL_SOURCE = "https://github.com/mlfoundations/open_clip/blob/05e7db4987eda177906dc164b4c3ebeb39a9991a/docs/openclip_retrieval_results.csv"
MIT, APACHE = "MIT", "Apache-2.0"
FOLDER = "models"
"""Folder in the cache: a folder for each model, and beside it what was first fetched."""
RANKS = (1, 5, 10)
Recall = tuple[float, ...]
"""Recall at `RANKS`, captions to images, then images to captions."""
MIN_SIZE_SHARE = 0.2  # of the size in float32: weights may be in half precision
MAX_EXTRA_BYTES = 100_000_000  # tokenizer and configuration beside the weights
MAX_CPU_GIGAFLOPS = 40  # for an image; beyond it a processor takes about a second for each


@dataclass(frozen=True)
class PublishedModel:
    """A model that others trained and published on the Hugging Face hub."""

    name: str
    repository: str
    parameters: int
    image_gigaflops: float
    license: str
    flickr30k: Recall = ()
    """Recall on Flickr30k's 1,000 test images."""
    coco: Recall = ()
    """Recall on COCO's 5,000 test images."""

    @property
    def bytes(self) -> int:
        """Size in float32."""
        return 4 * self.parameters

    @property
    def page(self) -> str:
        """Address of its repository."""
        return f"{endpoint()}/{self.repository}"

    @property
    def folder(self) -> Path:
        """Folder of its files in the cache."""
        return cache_folder() / FOLDER / self.name

    @property
    def record(self) -> Path:
        """File with the size and SHA-256 of each file as first fetched. It outlives the files themselves."""
        return self.folder.with_name(f"{self.name}.json")

    @property
    def known_files(self) -> dict[str, Any]:
        """Size and SHA-256 of each file as first fetched."""
        try:
            return dict(read_json(self.record)["files"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    @property
    def is_cached(self) -> bool:
        """Whether all its files are in the cache, judged by their sizes."""
        files = self.known_files
        return bool(files) and all(
            _has_size(self.folder / name, known) for name, known in files.items()
        )

    @property
    def memory_bytes(self) -> int:
        """Memory for opening it: its weights in float32, twice while they are read."""
        return 2 * self.bytes

    @property
    def t2i_r1(self) -> float:
        """Mean text-to-image R@1 over the published data sets; 0 without any."""
        found = [recall[0] for recall in (self.flickr30k, self.coco) if recall]
        return sum(found) / max(len(found), 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `lapclip models --json`."""
        recall: dict[str, Any] | None = None
        if self.flickr30k:
            recall = {
                "flickr30k": _recall(self.flickr30k),
                "coco": _recall(self.coco),
                "source": RECALL_SOURCE,
            }
        return {
            "name": self.name,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "image_gigaflops": self.image_gigaflops,
            "memory_bytes": self.memory_bytes,
            "license": self.license,
            "from": self.page,
            "recall": recall,
            "cached": self.is_cached,
            "path": str(self.folder) if self.is_cached else None,
        }


# fmt: off
_TABLE = (
    PublishedModel("vit-b-32-openai", "timm/vit_base_patch32_clip_224.openai", 151_277_313, 8.82, MIT,
            (0.5878, 0.8356, 0.9002, 0.7890, 0.9490, 0.9820), (0.3044, 0.5594, 0.6687, 0.5012, 0.7500, 0.8352)),
    PublishedModel("vit-b-16-openai", "timm/vit_base_patch16_clip_224.openai", 149_620_737, 35.13, MIT,
            (0.6216, 0.8572, 0.9192, 0.8220, 0.9660, 0.9900), (0.3309, 0.5842, 0.6899, 0.5242, 0.7670, 0.8462)),
    PublishedModel("vit-l-14-openai", "timm/vit_large_patch14_clip_224.openai", 427_616_513, 162.03, MIT,
            (0.6496, 0.8724, 0.9204, 0.8520, 0.9740, 0.9920), (0.3651, 0.6106, 0.7113, 0.5634, 0.7938, 0.8660)),
    PublishedModel("vit-l-14-336-openai", "timm/vit_large_patch14_clip_336.openai", 427_944_193, 381.92, MIT,
            (0.6690, 0.8900, 0.9334, 0.8770, 0.9850, 0.9940), (0.3709, 0.6162, 0.7147, 0.5794, 0.8120, 0.8792)),
    PublishedModel("vit-b-32-laion2b", "laion/CLIP-ViT-B-32-laion2B-s34B-b79K", 151_277_313, 8.82, MIT,
            (0.6678, 0.8838, 0.9310, 0.8410, 0.9620, 0.9830), (0.3934, 0.6543, 0.7561, 0.5632, 0.7984, 0.8712)),
    PublishedModel("vit-b-32-datacomp", "laion/CLIP-ViT-B-32-DataComp.XL-s13B-b90K", 151_277_313, 8.82, MIT,
            (0.6108, 0.8492, 0.9092, 0.7900, 0.9390, 0.9620), (0.3714, 0.6235, 0.7268, 0.5354, 0.7778, 0.8604)),
    PublishedModel("vit-b-32-256-datacomp", "laion/CLIP-ViT-B-32-256x256-DataComp-s34B-b86K", 151_288_833, 11.5, MIT,
            (0.6492, 0.8722, 0.9216, 0.8480, 0.9670, 0.9850), (0.3993, 0.6543, 0.7524, 0.5792, 0.8056, 0.8810)),
    PublishedModel("vit-b-16-laion2b", "laion/CLIP-ViT-B-16-laion2B-s34B-b88K", 149_620_737, 35.13, MIT,
            (0.6984, 0.9038, 0.9456, 0.8630, 0.9790, 0.9940), (0.4231, 0.6770, 0.7706, 0.5944, 0.8178, 0.8862)),
    PublishedModel("vit-b-16-datacomp", "laion/CLIP-ViT-B-16-DataComp.XL-s13B-b90K", 149_620_737, 35.13, MIT,
            (0.6756, 0.8834, 0.9300, 0.8510, 0.9720, 0.9840), (0.4016, 0.6595, 0.7562, 0.5744, 0.8086, 0.8830)),
    PublishedModel("vit-l-14-datacomp", "laion/CLIP-ViT-L-14-DataComp.XL-s13B-b90K", 427_616_513, 162.03, MIT,
            (0.7338, 0.9174, 0.9554, 0.8900, 0.9860, 0.9970), (0.4573, 0.7003, 0.7916, 0.6330, 0.8414, 0.9040)),
    PublishedModel("vit-h-14-laion2b", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K", 986_109_441, 334.59, MIT,
            (0.7764, 0.9418, 0.9660, 0.9070, 0.9920, 0.9970), (0.4948, 0.7338, 0.8151, 0.6592, 0.8606, 0.9188)),
    PublishedModel("vit-b-16-siglip", "timm/ViT-B-16-SigLIP", 203_155_970, 35.42, APACHE,
            (0.7468, 0.9230, 0.9562, 0.8910, 0.9800, 0.9930), (0.4778, 0.7244, 0.8100, 0.6574, 0.8542, 0.9126)),
    PublishedModel("vit-b-16-siglip-256", "timm/ViT-B-16-SigLIP-256", 203_202_050, 46.82, APACHE,
            (0.7504, 0.9242, 0.9626, 0.9040, 0.9830, 0.9930), (0.4834, 0.7254, 0.8099, 0.6614, 0.8634, 0.9182)),
    PublishedModel("vit-b-16-siglip-384", "timm/ViT-B-16-SigLIP-384", 203_447_810, 112.13, APACHE,
            (0.7848, 0.9416, 0.9708, 0.9270, 0.9910, 0.9980), (0.4990, 0.7366, 0.8204, 0.6774, 0.8758, 0.9258)),
    PublishedModel("vit-l-16-siglip-256", "timm/ViT-L-16-SigLIP-256", 652_150_786, 162.56, APACHE,
            (0.7904, 0.9446, 0.9684, 0.9180, 0.9900, 0.9980), (0.5228, 0.7580, 0.8334, 0.7080, 0.8870, 0.9374)),
    PublishedModel("vit-l-16-siglip-384", "timm/ViT-L-16-SigLIP-384", 652_478_466, 383.85, APACHE,
            (0.8142, 0.9536, 0.9748, 0.9370, 0.9920, 0.9990), (0.5391, 0.7657, 0.8399, 0.7190, 0.9006, 0.9410)),
    PublishedModel("so400m-14-siglip-384", "timm/ViT-SO400M-14-SigLIP-384", 877_960_498, 670.35, APACHE,
            (0.8296, 0.9610, 0.9804, 0.9430, 0.9970, 0.9980), (0.5421, 0.7678, 0.8424, 0.7242, 0.8998, 0.9448)),
    PublishedModel("vit-b-16-siglip2-384", "timm/ViT-B-16-SigLIP2-384", 375_479_810, 112.13, APACHE,
            (), ()),
)
# fmt: on
MODELS = {model.name: model for model in _TABLE}


def find(name: str) -> PublishedModel | None:
    """Return the published model of a name, if there is one."""
    return MODELS.get(name)


def best_that_fits(memory: int, disk: int, *, accelerator: bool) -> PublishedModel | None:
    """Return the model with the best published recall that fits memory and disk.

    Without an accelerator, models that take over a second for an image are left out. A cached model needs no disk.
    """
    fitting = [
        model
        for model in MODELS.values()
        if model.memory_bytes < memory / 2
        and (model.is_cached or model.bytes < disk / 2)
        and (accelerator or model.image_gigaflops < MAX_CPU_GIGAFLOPS)
    ]
    return max(fitting, key=lambda model: model.t2i_r1, default=None)


def fetch(model: PublishedModel, *, yes: bool = False, progress: Progress | None = None) -> Path:
    """Return the folder of a model, downloaded if it is not cached and a person agrees.

    Its files are compared with their digests each time. WeightsError if that or the download fails.
    """
    if not model.is_cached:
        _require_consent(model, yes=yes)
        model.folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(model.folder.with_name(f".{model.name}.lock")):
            if not model.is_cached:  # another process may have downloaded it meanwhile
                _download(model, progress)
                return model.folder  # each file was compared when it came
    for name, known in model.known_files.items():
        path = model.folder / name
        if digest_of_file(path) != known["sha256"]:
            path.unlink(missing_ok=True)  # another process may have removed it
            raise WeightsError(
                f"{path} was not what was fetched: its digest is another. It was removed, and nothing of it was used.",
                hint=f"lapclip models {model.name} --yes, which fetches it again",
            )
    return model.folder


def _require_consent(model: PublishedModel, *, yes: bool) -> None:
    """Raise WeightsError unless somebody agrees to the download."""
    what = f"{model.name} is not on this computer yet: {size(model.bytes)} from {model.page}, license {model.license}."
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "ON", "YES"):
        raise WeightsError(
            f"{what} HF_HUB_OFFLINE forbids to fetch it.", hint="a folder with the model"
        )
    if yes:
        return
    answer = confirm(f"{what} Fetch it?")
    if answer is None:
        once = f"lapclip models {model.name} --yes"
        raise WeightsError(
            f"{what} Nobody can be asked here.", hint=f"add --yes, or once before: {once}"
        )
    if not answer:
        raise WeightsError(f"{model.name} was not fetched.", hint="lapclip models lists others")


def _download(model: PublishedModel, progress: Progress | None) -> None:
    """Download all files of a model and remember their digests. Files that are there and right are kept."""
    commit, files = list_files(model.repository)
    known = model.known_files
    total = sum(file.bytes for file in files)
    if not MIN_SIZE_SHARE * model.bytes <= total <= model.bytes + MAX_EXTRA_BYTES:
        raise WeightsError(
            f"{model.page} offers {size(total)} for {model.name}, which has {size(model.bytes)}: it is another model.",
            hint="lapclip models lists others",
        )
    _check_unchanged(model, files, known)
    _check_room(model, total)
    digests: dict[str, str] = {}
    done = 0
    for file in files:
        path = model.folder / file.name
        if path.is_file() and digest_of_file(path) == file.digest:
            digests[file.name] = file.digest
        else:
            counted = _part_of(progress, done, total)
            digests[file.name] = download_file(
                model.repository, commit, file, model.folder, counted
            )
        done += file.bytes
        if known and digests[file.name] != known[file.name]["sha256"]:
            path.unlink()
            raise _changed(model, file.name)
    if not known:
        sizes = {name: {"bytes": (model.folder / name).stat().st_size, "sha256": digest}
                 for name, digest in digests.items()}  # fmt: skip
        record = {
            "from": model.page,
            "commit": commit,
            "fetched": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "files": sizes,
        }
        write_atomic(model.record, json.dumps(record, indent=1))


def _part_of(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Turn the progress of one file into that of all, in megabytes."""
    if progress is None:
        return None
    megabytes = max(1, round(total / 1e6))
    return lambda done, _: progress(min(round((before + done) / 1e6), megabytes), megabytes)


def _check_unchanged(model: PublishedModel, files: list[HubFile], known: dict[str, Any]) -> None:
    """Refuse a repository that announces other files than those first fetched, before anything large comes."""
    if not known:
        return
    other_names = {file.name for file in files} ^ set(known)
    if other_names:
        raise _changed(model, ", ".join(sorted(other_names)))
    for file in files:
        if len(file.digest) == 64 and file.digest != known[file.name]["sha256"]:
            raise _changed(model, file.name)


def _changed(model: PublishedModel, name: str) -> WeightsError:
    return WeightsError(
        f"{model.name} is no longer what it was when it was first fetched here: {name} at {model.page} has changed. "
        "Nothing of it was taken.",
        hint=f"hf:{model.repository} takes it as it is now",
    )


def _check_room(model: PublishedModel, total: int) -> None:
    here = sum(path.stat().st_size for path in model.folder.iterdir() if path.is_file())
    free = shutil.disk_usage(model.folder).free
    if free < 1.05 * (total - here):
        raise WeightsError(
            f"{model.name} takes {size(total - here)} in {model.folder}, and {size(free)} are free there.",
            hint="lapclip clean shows what takes room; LAPCLIP_CACHE names another folder",
        )


def _has_size(path: Path, known: Any) -> bool:
    try:
        return path.is_file() and path.stat().st_size == known["bytes"] and bool(known["sha256"])
    except (OSError, KeyError, TypeError):
        return False


def _recall(values: Recall) -> dict[str, float]:
    names = [f"{way}_r{rank}" for way in ("t2i", "i2t") for rank in RANKS]
    return dict(zip(names, values, strict=True))
