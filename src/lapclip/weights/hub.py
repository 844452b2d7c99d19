"""Models by name from the Hugging Face hub: no more files than are needed, kept in the hub's own cache."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from lapclip.errors import WeightsError, first_line
from lapclip.weights import HUB, MERGES, OWN_TOKENIZER, PIECES, TOKENIZER, huggingface, openclip
from lapclip.weights.download import may

SECONDS = 20
"""To wait for an answer of the hub."""


def choose_files(there: Iterable[str]) -> list[str]:
    """The smallest set of files that makes a model: configuration, tokenizer, weights, as safetensors if possible."""
    there = set(there)
    chosen = {TOKENIZER, OWN_TOKENIZER, PIECES} & there or {MERGES} & there
    if openclip.CONFIG in there:
        chosen |= {openclip.CONFIG}
        weights = [name for name in openclip.WEIGHTS if name in there]
    else:
        chosen |= {huggingface.CONFIG, huggingface.PREPROCESSOR, huggingface.PROCESSOR} & there
        weights = [name for own in huggingface.WEIGHTS for name in (own, f"{own}{huggingface.INDEX}") if name in there]
    if weights and weights[0].endswith(huggingface.INDEX):
        stem, _, ending = weights[0].removesuffix(huggingface.INDEX).rpartition(".")
        shards = re.compile(rf"{re.escape(stem)}-\d+-of-\d+\.{ending}")
        chosen |= {name for name in there if shards.fullmatch(name)}
    return sorted(chosen | set(weights[:1]))


def confirmed_name(text: str) -> str:
    """The name on the hub that is meant, without `hf:`. A name that could be a mistyped path is asked about, unless
    the model was downloaded before; where nobody can answer it is refused, because a download is not a small thing."""
    if text.startswith(HUB) or _is_cached(text):
        return text.removeprefix(HUB)
    if may(f"There is no file or folder {text}. Download {text} from the Hugging Face hub?"):
        return text
    raise WeightsError(
        f"There is no file or folder {text}, and a name on the Hugging Face hub is written with hf: before it.",
        hint=f"{HUB}{text} where that is meant; else check the path, or lapclip runs",
    )


def _is_cached(name: str) -> bool:
    """Whether a model of the hub was downloaded before."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    configs = (openclip.CONFIG, huggingface.CONFIG)
    return any(isinstance(try_to_load_from_cache(name, config), str) for config in configs)


def download(text: str) -> Path:
    """The folder with a model of the hub, fetched with a progress bar where it is not here yet."""
    name = confirmed_name(text)
    try:
        from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError:
        raise WeightsError(
            f"There is no file or folder {name}, and models of the Hugging Face hub need the package huggingface_hub.",
            hint="pip install 'lapclip[hub]'",
        ) from None
    try:
        # Listing files would try again and again for half a minute where there is no network; this asks once.
        found = HfApi().model_info(name, timeout=SECONDS)
        files = choose_files(file.rfilename for file in found.siblings or ())
    except GatedRepoError:
        raise WeightsError(
            f"{name} wants its terms accepted first.", hint=f"https://huggingface.co/{name}, then hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise WeightsError(
            f"There is no file or folder {name}, and no model of that name on the Hugging Face hub.",
            hint="check the spelling, or lapclip runs",
        ) from None
    except Exception as error:  # the hub cannot be reached; each of the layers below has errors of its own for that
        for config in (openclip.CONFIG, huggingface.CONFIG):  # it may have been downloaded before
            if isinstance(here := try_to_load_from_cache(name, config), str):
                return Path(here).parent
        raise WeightsError(
            f"There is no file or folder {name}, and the Hugging Face hub cannot be reached: "
            f"{first_line(error).strip(' .:')}.",
            hint="a folder with the model, or the same command when online",
        ) from None
    if not any(file.endswith((".safetensors", ".bin")) for file in files):
        raise WeightsError(f"{name} on the Hugging Face hub has no weights that can be read.")
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:
        raise WeightsError(
            f"{name} could not be downloaded: {first_line(error)}.", hint="the same command again; it goes on"
        ) from None
