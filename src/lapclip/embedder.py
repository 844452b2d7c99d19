"""Model, tokenizer and preprocessing as one thing that is loaded and asked for embeddings: run by torch or, where it
was exported, by ONNX Runtime.

model = lapclip.load("runs/first-run")
images = model.encode_image(["cat.jpg", "dog.jpg"])
captions = model.encode_text(["a cat", "a dog"])
similarity = images @ captions.T
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from lapclip.data.dataset import Pairs, Pixels
from lapclip.data.pixels import View, middle_square, normalise
from lapclip.data.tokenizers import PretrainedTokenizer, Tokenizer, load_tokenizer
from lapclip.errors import DataError, RunError, WeightsError, first_line
from lapclip.fingerprint import fingerprint, image_fingerprint, short_digest
from lapclip.machine.choose_device import choose_device
from lapclip.machine.cpu import keep_freed_memory
from lapclip.machine.device import Device
from lapclip.machine.ranks import ALONE
from lapclip.model.clip import CLIP
from lapclip.paths import check_plain, digest_of_file, read_json
from lapclip.progress import Progress
from lapclip.weights import DESCRIPTION, OWN_TOKENIZER, is_exported
from lapclip.weights.pretrained_networks import build_network
from lapclip.weights.read_model import read_model

BATCH = 64


class Logits(NamedTuple):
    """What a model learnt to make of a similarity: times a scale, plus a bias where it learnt with the sigmoid loss."""

    scale: float
    bias: float | None


class Encoder(ABC):
    """Turns images and captions into unit-length vectors that can be compared, whatever computes them."""

    batch = BATCH
    """Images or captions at once."""
    ranks = ALONE
    """Who computes with this one, while several processes embed the same."""

    def __init__(self, view: View, tokenizer: Tokenizer, context: int, embedding: int) -> None:
        self.view, self.tokenizer, self.context, self.embedding = view, tokenizer, context, embedding

    @abstractmethod
    def embed_pixels(self, pixels_BSSC: np.ndarray) -> np.ndarray:
        """Unit-length rows of one batch of uint8 pixels."""

    @abstractmethod
    def embed_tokens(self, tokens_BL: np.ndarray) -> np.ndarray:
        """Unit-length rows of one batch of tokens."""

    @abstractmethod
    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with whatever decides an embedding (`lapclip.fingerprint`)."""

    @abstractmethod
    def image_fingerprint(self) -> str:
        """The same for the embeddings of images alone."""

    def logits(self) -> Logits | None:
        """The learnt scale and bias, where they are known."""
        return None

    def encode_image(self, images: Sequence[str | os.PathLike | Image.Image]) -> np.ndarray:
        """One unit-length row per image, given as paths or as PIL images."""
        if isinstance(images, (str, os.PathLike, Image.Image)):
            raise TypeError("encode_image takes a list of images, not one image")
        batches = [
            self.embed_pixels(np.stack([middle_square(image, self.view) for image in images[at : at + self.batch]]))
            for at in range(0, len(images), self.batch)
        ]
        return self._joined(batches)

    def encode_pixels(self, pixels_NSSC: Pixels, progress: Progress | None = None) -> np.ndarray:
        """One unit-length row per image, given as uint8 pixels of the model's size."""
        starts = range(0, len(pixels_NSSC), self.batch)
        made = self.ranks.computed_in_shares(
            starts, lambda at: self.embed_pixels(np.array(pixels_NSSC[at : at + self.batch]))
        )
        return self._counted(made, len(pixels_NSSC), progress)

    def encode_text(self, captions: Sequence[str], progress: Progress | None = None) -> np.ndarray:
        """One unit-length row per caption."""
        if isinstance(captions, str):
            raise TypeError("encode_text takes a list of captions, not one string")
        made = self.ranks.computed_in_shares(
            range(0, len(captions), self.batch),
            lambda at: self.embed_tokens(self.tokenizer.batch(captions[at : at + self.batch], self.context)),
        )
        return self._counted(made, len(captions), progress)

    def encode_pairs(self, pairs: Pairs, progress: Progress | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Embeddings of all images, of all captions, and each caption's image."""
        captions, which, owner = distinct_captions(pairs)
        total = len(pairs) + len(captions)
        tell = progress or (lambda done, total: None)
        images = self.encode_pixels(pairs.pixels, lambda done, _: tell(done, total))
        texts = self.encode_text(captions, lambda done, _: tell(len(pairs) + done, total))
        return images, texts[which], owner

    def _counted(self, made: Iterable[np.ndarray], total: int, progress: Progress | None) -> np.ndarray:
        """Batches that are made one after the other, as one."""
        batches, done = [], 0
        for batch in made:
            batches.append(batch)
            done += len(batch)
            if progress:
                progress(done, total)
        return self._joined(batches)

    def _joined(self, batches: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(batches) if batches else np.zeros((0, self.embedding), dtype=np.float32)


class Embedder(Encoder):
    """A model in torch."""

    def __init__(self, model: CLIP, tokenizer: Tokenizer, device: Device) -> None:
        super().__init__(View.of(model.shape), tokenizer, model.shape.context, model.shape.embedding)
        self.model, self.device = model, device

    @torch.inference_mode()
    def embed_pixels(self, pixels_BSSC: np.ndarray) -> np.ndarray:
        pixels = torch.from_numpy(pixels_BSSC).to(self.device.of("image").torch)
        return self.model.encode_image(normalise(pixels, self.model.shape)).cpu().numpy()

    @torch.inference_mode()
    def embed_tokens(self, tokens_BL: np.ndarray) -> np.ndarray:
        tokens = torch.from_numpy(tokens_BL).to(self.device.of("text").torch)
        return self.model.encode_text(tokens).cpu().numpy()

    def fingerprint(self) -> str:
        return fingerprint(self.model, self.tokenizer)

    def image_fingerprint(self) -> str:
        return image_fingerprint(self.model)

    def logits(self) -> Logits:
        bias = self.model.logit_bias
        return Logits(self.model.logit_scale.exp().item(), None if bias is None else bias.item())

    def description(self) -> dict:
        """What config.json holds: everything but the weights."""
        towers = {name: spec.to_dict() for name, spec in self.model.networks().items()}
        saved = {"format": 1, "model": asdict(self.model.shape), "tokenizer": self.tokenizer.to_dict()}
        return {**saved, "towers": towers} if towers else saved


class OnnxSession:
    """One ONNX file, ready to run on the CPU."""

    def __init__(self, path: Path, threads: int = 0) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Threads that spin between two calls take the cores from whoever decodes the next images.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.log_severity_level = 3
        try:
            check_plain(path)
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # whatever the engine says of a damaged file
            raise _cannot_run(path, error) from None
        self._path, self._input = path, self._session.get_inputs()[0].name

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        try:
            return np.asarray(self._session.run(None, {self._input: inputs})[0])
        except Exception as error:
            raise _cannot_run(self._path, error) from None


def _cannot_run(path: Path, error: Exception) -> WeightsError:
    return WeightsError(f"{path} cannot be run: {first_line(error)}.", hint="lapclip export again")


class OnnxEmbedder(Encoder):
    """A model that `lapclip export --to onnx` or `onnx-int8` wrote, run by ONNX Runtime."""

    def __init__(self, folder: Path, threads: int = 0) -> None:
        self.about = about = read_description(folder)
        """What lapclip.json says."""
        super().__init__(
            _exported_view(about), _exported_tokenizer(folder, about), about["tokenizer"]["longest"], about["embedding"]
        )
        self.files = {tower: folder / Path(about["towers"][tower]["file"]).name for tower in ("image", "text")}
        """Each tower's ONNX file."""
        self._image, self._text = (OnnxSession(path, threads) for path in self.files.values())

    @property
    def made_from(self) -> str:
        """The fingerprint of the model that was exported; of exports by earlier releases the digest of its weights."""
        return self.about.get("made_from", "")

    def embed_pixels(self, pixels_BSSC: np.ndarray) -> np.ndarray:
        return self._image(pixels_BSSC)

    def embed_tokens(self, tokens_BL: np.ndarray) -> np.ndarray:
        return self._text(tokens_BL)

    def fingerprint(self) -> str:
        text = {"weights": digest_of_file(self.files["text"]), "tokenizer": self.tokenizer.to_dict()}
        return short_digest({**self._image_facts(), **text, "context": self.context})

    def image_fingerprint(self) -> str:
        return short_digest(self._image_facts())

    def logits(self) -> Logits | None:
        return Logits(self.about["logit_scale"], self.about.get("logit_bias")) if "logit_scale" in self.about else None

    def _image_facts(self) -> dict[str, Any]:
        # Pixels are scaled inside the tower, so its file tells that too.
        return {"image": digest_of_file(self.files["image"]), "view": asdict(self.view)}


def distinct_captions(pairs: Pairs) -> tuple[list[str], list[int], np.ndarray]:
    """The different captions, which of them each caption is, and each caption's image.

    Equal captions once: it is less work, and they are to score the same to the last bit, so that they tie.
    """
    every = [caption for captions in pairs.captions for caption in captions]
    rows = {caption: at for at, caption in enumerate(dict.fromkeys(every))}
    owner = np.repeat(np.arange(len(pairs)), [len(captions) for captions in pairs.captions])
    return list(rows), [rows[caption] for caption in every], owner


def load(path: str | os.PathLike, device: str = "cpu") -> Encoder:
    """The model in a run's folder, in a model folder, in an exported folder, in a file of published weights, of a short
    name that `lapclip models` lists, or of a name on the Hugging Face hub. What was exported for ONNX Runtime runs on
    the CPU."""
    return open_exported(path) if is_exported(Path(path)) else load_torch(path, device)


def load_torch(path: str | os.PathLike, device: str = "cpu") -> Embedder:
    """The same, for what needs the model in torch; folders exported for another engine are refused."""
    shape, tensors, tokenizer, towers = read_model(path)
    networks = {tower: (build_network(spec), spec) for tower, spec in towers.items()}
    # No first values: the saved ones take their place. A foreign network has to run once to be known.
    try:
        with torch.device("cpu" if networks else "meta"):
            model = CLIP(shape, networks=networks)
        model.load_state_dict(tensors, assign=True)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, MemoryError) as error:
        raise RunError(f"The model in {path} cannot be loaded: {error}.", hint="lapclip train") from None
    chosen = choose_device(device)[0]
    if chosen.is_cpu:
        keep_freed_memory()  # large convolutions run at up to three times the speed
    return Embedder(model.to(chosen.torch).eval(), tokenizer, chosen)


def open_exported(folder: str | os.PathLike, threads: int = 0) -> OnnxEmbedder:
    """The model in a folder exported for ONNX Runtime. `threads` is for each tower; 0 takes a thread a core."""
    folder = Path(folder)
    made_for = read_description(folder)["format"]
    if not made_for.startswith("onnx"):
        raise WeightsError(f"{folder} is for {made_for}, which ONNX Runtime does not read.", hint="--to onnx")
    if find_spec("onnxruntime") is None:
        raise WeightsError("This needs onnxruntime.", hint='pip install "lapclip[export]"')
    try:
        return OnnxEmbedder(folder, threads)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, DataError) as error:
        why = f"{folder / DESCRIPTION} is damaged: {first_line(error)}."
        raise WeightsError(why, hint="lapclip export again") from None


def read_description(folder: Path) -> dict[str, Any]:
    """What the lapclip.json of an exported folder says."""
    try:
        about = read_json(folder / DESCRIPTION)
        return {**about, "towers": dict(about["towers"]), "preprocessing": dict(about["preprocessing"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{folder / DESCRIPTION} cannot be read: {error}.", hint="lapclip export again") from None


def _exported_view(about: dict[str, Any]) -> View:
    seen = about["preprocessing"]
    share = seen["side"] / seen["resized"]
    return View(seen["side"], seen["interpolation"], seen["resize"], share, seen["colours"])


def _exported_tokenizer(folder: Path, about: dict[str, Any]) -> Tokenizer:
    own = load_tokenizer(folder / OWN_TOKENIZER)
    if own is not None:
        return own
    path = folder / Path(about["tokenizer"]["file"]).name
    try:
        description = read_json(path)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}.", hint="lapclip export again") from None
    return PretrainedTokenizer(description, about["tokenizer"]["padding"])
