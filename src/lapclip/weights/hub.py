"""Models on the Hugging Face hub: which files make one, and downloading them.

A published model is downloaded file by file into a folder of ours, each file compared with the digest that the hub
announces. A broken download leaves its beginning under a hidden name, and the next one continues it. Any other name on
the hub (`hf:org/name`) is downloaded into the hub's own cache, which other programs share. No torch.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lapclip.errors import WeightsError, first_line
from lapclip.paths import digest_of_file, replace
from lapclip.progress import Progress
from lapclip.text import size
from lapclip.weights import (
    CONFIG,
    HUB,
    HUGGINGFACE_WEIGHTS,
    INDEX,
    OPENCLIP_CONFIG,
    OPENCLIP_WEIGHTS,
    OWN_TOKENIZER,
    PIECES,
    PREPROCESSOR,
    PROCESSOR,
    TOKENIZER,
)

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

ADDRESS = "https://huggingface.co"
TIMEOUT_SECONDS = 20
PARTIAL = "unfinished"
AGAIN = "the same command again: it continues where it stopped"


@dataclass(frozen=True)
class HubFile:
    """A file as the hub announces it."""

    name: str
    bytes: int
    digest: str
    """SHA-256 of a large file (64 digits), git's SHA-1 of a small one (40 digits)."""

    def partial(self, folder: Path) -> Path:
        """Return where the file lies until it is complete."""
        return folder / f".{self.name}.{self.digest[:16]}.{PARTIAL}"


def endpoint() -> str:
    """Return the address of the hub: huggingface.co, or a mirror in HF_ENDPOINT."""
    return (os.environ.get("HF_ENDPOINT") or ADDRESS).rstrip("/")


def confirm(question: str) -> bool | None:
    """Return whether a person at the terminal agrees, or None if nobody can be asked."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def choose_files(names: Iterable[str]) -> list[str]:
    """Choose the smallest set of files that makes a model: configuration, tokenizer, weights (safetensors first)."""
    names = set(names)
    chosen = {TOKENIZER, OWN_TOKENIZER, PIECES} & names
    if OPENCLIP_CONFIG in names:
        chosen.add(OPENCLIP_CONFIG)
        candidates = [*OPENCLIP_WEIGHTS]
    else:
        chosen |= {CONFIG, PREPROCESSOR, PROCESSOR} & names
        candidates = []
        for name in HUGGINGFACE_WEIGHTS:
            candidates += [name, f"{name}{INDEX}"]
    weights = next((name for name in candidates if name in names), None)
    if weights is None:
        return sorted(chosen)
    chosen.add(weights)
    if weights.endswith(INDEX):
        stem, _, ending = weights.removesuffix(INDEX).rpartition(".")
        shard = re.compile(rf"{re.escape(stem)}-\d+-of-\d+\.{ending}")
        chosen.update(name for name in names if shard.fullmatch(name))
    return sorted(chosen)


def list_files(repository: str) -> tuple[str, list[HubFile]]:
    """Return the commit of a repository and the files that make a model."""
    from httpx2 import TransportError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(endpoint=endpoint(), token=False)
    try:
        info = api.model_info(repository, files_metadata=True, timeout=TIMEOUT_SECONDS)
        siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
        files = [_announced(siblings[name]) for name in choose_files(siblings)]
        if not info.sha:
            raise ValueError("it names no commit")
    except (TransportError, ConnectionError) as error:
        raise WeightsError(
            f"{_host()} cannot be reached: {_reason(error)}.",
            hint="the same command when online",
        ) from None
    except (HfHubHTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"{endpoint()} does not answer as the Hugging Face hub does: {_reason(error)}.",
            hint="another HF_ENDPOINT, or another network: one with a login page answers for others",
        ) from None
    if not any(file.name.endswith((".safetensors", ".bin")) for file in files):
        raise WeightsError(
            f"{endpoint()}/{repository} has no weights that can be read.",
            hint="lapclip models lists others",
        )
    return info.sha, files


def _announced(sibling: RepoSibling) -> HubFile:
    """Return a file of a listing. ValueError if its size or its digest is none."""
    length: Any = sibling.size
    digest: Any = sibling.blob_id
    if sibling.lfs is not None:
        length = sibling.lfs.size
        digest = sibling.lfs.sha256
    if type(length) is not int or length < 0:
        raise ValueError(f"{sibling.rfilename} has no size")
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", str(digest)):
        raise ValueError(f"{sibling.rfilename} has no digest")
    return HubFile(sibling.rfilename, length, digest)


class _PartialFile(io.FileIO):
    """The beginning of a file. It never grows beyond the announced size."""

    def __init__(self, path: Path, max_bytes: int, progress: Progress | None) -> None:
        super().__init__(path, "a")
        self._max_bytes, self._progress = max_bytes, progress
        if self.tell() > max_bytes:
            self.truncate(0)
            self.seek(0)

    def write(self, data: Any, /) -> int:
        end = self.tell() + len(data)
        if end > self._max_bytes:
            raise ValueError(f"more than the announced {self._max_bytes:,} bytes came")
        rest = memoryview(data)
        while rest:  # a disk that fills up takes a part, and refuses the rest
            rest = rest[super().write(rest) :]
        if self._progress:
            self._progress(end, self._max_bytes)
        return len(data)


def download_file(
    repository: str, commit: str, file: HubFile, folder: Path, progress: Progress | None = None
) -> str:
    """Download a file, or the rest of it, into a folder. Return its SHA-256.

    WeightsError if it does not come or is not what was announced; of the latter nothing is kept.
    """
    partial = file.partial(folder)
    for other in folder.glob(f".{file.name}.*.{PARTIAL}"):
        if other != partial:
            other.unlink(missing_ok=True)
    _complete(partial, repository, commit, file, progress)
    digest = digest_of_file(partial)
    found = digest if len(file.digest) == 64 else _git_digest(partial)
    if found != file.digest:
        partial.unlink()
        raise WeightsError(
            f"{file.name} from {_host()} is not what was announced: its digest begins with {found[:12]} "
            f"instead of {file.digest[:12]}. Nothing of it was kept.",
            hint="the same command again; if it happens twice, somebody on the way changes files",
        )
    replace(partial, folder / file.name)
    return digest


def _complete(
    partial: Path, repository: str, commit: str, file: HubFile, progress: Progress | None
) -> None:
    """Append what is missing of a file to its beginning."""
    from httpx2 import HTTPError, TransportError
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars, logging

    disable_progress_bars("huggingface_hub.http_get")  # ours is shown
    logging.set_verbosity_error()  # what it retries is no news
    address = hf_hub_url(repository, file.name, revision=commit, endpoint=endpoint())
    try:
        with _PartialFile(partial, file.bytes, progress) as out:
            http_get(
                address,
                out,
                resume_size=out.tell(),
                headers=build_hf_headers(token=False),
                expected_size=file.bytes,
            )
    except (HTTPError, OSError, ValueError) as error:
        reason, hint = _reason(error), AGAIN
        may_continue = isinstance(error, TransportError)
        if isinstance(error, HfHubHTTPError):
            may_continue = error.response.status_code >= 500
        elif isinstance(error, OSError) and error.errno is not None:
            reason = f"{partial} cannot be written: {error.strerror}"
            hint = f"free some disk space, or LAPCLIP_CACHE for another folder; then {AGAIN}"
            may_continue = True
        came = ""
        if may_continue and partial.exists():
            came = f" {size(partial.stat().st_size)} of {size(file.bytes)} came."
        else:
            partial.unlink(missing_ok=True)
        raise WeightsError(
            f"{file.name} could not be downloaded from {_host()}: {reason}.{came}", hint=hint
        ) from None


def _host() -> str:
    return urlsplit(endpoint()).netloc


def _reason(error: Exception) -> str:
    return first_line(error).strip(" .:") or type(error).__name__


def _git_digest(path: Path) -> str:
    """Return git's SHA-1 of a file's content."""
    content = path.read_bytes()  # configurations and tokenizers; weights have a SHA-256
    header = f"blob {len(content)}\0".encode()
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()


def confirm_name(text: str) -> str:
    """Return the name on the hub without `hf:`.

    A name without it may be a mistyped path: a person is asked, and nothing is downloaded without one, unless the
    model was downloaded before.
    """
    if text.startswith(HUB) or _cached_folder(text) is not None:
        return text.removeprefix(HUB)
    if confirm(f"There is no file or folder {text}. Download {text} from the Hugging Face hub?"):
        return text
    raise WeightsError(
        f"There is no file or folder {text}, and a name on the Hugging Face hub is written with hf: before it.",
        hint=f"{HUB}{text} where that is meant; else check the path, or lapclip runs",
    )


def _cached_folder(name: str) -> Path | None:
    """Return where the hub's own cache has a model, if it was downloaded before."""
    from huggingface_hub import try_to_load_from_cache

    for config in (OPENCLIP_CONFIG, CONFIG):
        path = try_to_load_from_cache(name, config)
        if isinstance(path, str):
            return Path(path).parent
    return None


def download(text: str) -> Path:
    """Return the folder of a model on the hub, downloaded into the hub's cache if it is not there."""
    name = confirm_name(text)
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        # Listing files would retry for half a minute without a network; this asks once.
        info = HfApi().model_info(name, timeout=TIMEOUT_SECONDS)
        files = choose_files(sibling.rfilename for sibling in info.siblings or ())
    except GatedRepoError:
        raise WeightsError(
            f"{name} wants its terms accepted first.",
            hint=f"https://huggingface.co/{name}, then hf auth login",
        ) from None
    except RepositoryNotFoundError:
        raise WeightsError(
            f"There is no file or folder {name}, and no model of that name on the Hugging Face hub.",
            hint="check the spelling, or lapclip runs",
        ) from None
    except Exception as error:  # not reached; each layer below has errors of its own for that
        if (folder := _cached_folder(name)) is not None:
            return folder
        raise WeightsError(
            f"There is no file or folder {name}, and the Hugging Face hub cannot be reached: {_reason(error)}.",
            hint="a folder with the model, or the same command when online",
        ) from None
    if not any(file.endswith((".safetensors", ".bin")) for file in files):
        raise WeightsError(f"{name} on the Hugging Face hub has no weights that can be read.")
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:
        raise WeightsError(
            f"{name} could not be downloaded: {_reason(error)}.", hint=AGAIN
        ) from None
