"""Models that embed images and captions, with their tokenizer and preprocessing.

They run in torch or, after an export, in ONNX Runtime.

model = lapclip.load("runs/first-run")
images = model.encode_image(["cat.jpg", "dog.jpg"])
captions = model.encode_text(["a cat", "a dog"])
similarity = images @ captions.T
model.classify("cat.jpg", ["cat", "dog"])
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import torch
from PIL import Image

from lapclip.data.any_image import as_image, as_list, is_one_image
from lapclip.data.dataset import Pairs, Pixels
from lapclip.data.pixels import View, middle_square, normalise
from lapclip.data.tokenizers import PretrainedTokenizer, Tokenizer, load_tokenizer
from lapclip.errors import ConfigError, DataError, RunError, WeightsError, first_line
from lapclip.fingerprint import fingerprint, image_fingerprint, short_digest
from lapclip.machine.choose_device import choose_device
from lapclip.machine.cpu import keep_freed_memory
from lapclip.machine.device import Device
from lapclip.model.clip import CLIP, count_parameters
from lapclip.paths import check_plain, digest_of_file, read_json
from lapclip.progress import Progress, ignore_progress
from lapclip.progress_bar import counted
from lapclip.prompts import TEMPLATES, class_embeddings, class_shares
from lapclip.runs.folder import RUNS
from lapclip.suggest import install
from lapclip.text import parameters
from lapclip.weights import DESCRIPTION, EXPORT_VERSION, OWN_TOKENIZER, is_exported
from lapclip.weights.pretrained_networks import build_network
from lapclip.weights.read_model import read_model
from lapclip.which_model import which_model

if TYPE_CHECKING:
    from lapclip.data.any_image import ManyImages, OneImage

BATCH = 64
USUAL_SCALE = 100.0  # of published CLIPs, for exported models that do not know their own


class Logits(NamedTuple):
    """Parameters that turn similarities into logits: times the scale, plus the bias."""

    scale: float
    bias: float | None
    """None if the model was not trained with the sigmoid loss."""


class Encoder(ABC):
    """A model that turns images and captions into comparable vectors of unit length."""

    batch = BATCH
    """Images or captions of a forward pass."""
    map_batches: Callable[[Callable[[Any], np.ndarray], Sequence[Any]], Iterable[np.ndarray]] = map
    """Function that computes batches one after the other. Several ranks of a run share them."""
    source = ""
    """Path or name that it was loaded from. Empty for a model built here."""

    def __init__(self, view: View, tokenizer: Tokenizer, context: int, embedding: int) -> None:
        self.view, self.tokenizer = view, tokenizer
        self.context, self.embedding = context, embedding

    @abstractmethod
    def embed_pixels(self, pixels_BSSC: np.ndarray) -> np.ndarray:
        """Return vectors of one batch of uint8 pixels."""

    @abstractmethod
    def embed_tokens(self, tokens_BL: np.ndarray) -> np.ndarray:
        """Return vectors of one batch of tokens."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that depend on all that decides an embedding."""

    @abstractmethod
    def image_fingerprint(self) -> str:
        """Return 16 hexadecimal digits that depend on all that decides embeddings of images."""

    def logits(self) -> Logits | None:
        """Return the learned scale and bias. None if unknown."""
        return None

    def encode_image(
        self,
        images: OneImage | ManyImages,
        *,
        batch_size: int | None = None,
        progress: bool | Progress = False,
    ) -> np.ndarray:
        """Return a vector of unit length for each image, float32 of shape (images, embedding).

        A single image gives one vector. An image may be a path, the bytes of a file, a PIL image,
        an array (height, width, colors) or a tensor (colors, height, width). Several images are a
        list of these, or an array or a tensor with one more dimension in front. Numbers are from 0
        to 255, or from 0 to 1 if they are floating-point, and not normalized: the model resizes,
        crops and normalizes images itself.

        Parameters
        ----------
        images
            One image or several.
        batch_size
            Images of a forward pass. 64 by default.
        progress
            True shows a bar. A function is called with the number of images done and of all images.
        """
        all_images = as_list(images)
        size = _checked_size(batch_size) or self.batch

        def embed(start: int) -> np.ndarray:
            batch = all_images[start : start + size]
            squares = [middle_square(as_image(image), self.view) for image in batch]
            return self.embed_pixels(np.stack(squares))

        with counted(progress, "embedding images") as bar:
            batches = map(embed, range(0, len(all_images), size))
            vectors = self._concatenate(batches, len(all_images), bar)
        return vectors[0] if is_one_image(images) else vectors

    def encode_pixels(self, pixels_NSSC: Pixels, progress: Progress | None = None) -> np.ndarray:
        """Return a vector for each image, given as uint8 pixels of the model's size."""

        def embed(start: int) -> np.ndarray:
            return self.embed_pixels(np.array(pixels_NSSC[start : start + self.batch]))

        starts = range(0, len(pixels_NSSC), self.batch)
        batches = self.map_batches(embed, starts)
        return self._concatenate(batches, len(pixels_NSSC), progress)

    def encode_text(
        self,
        captions: str | Sequence[str],
        progress: bool | Progress | None = None,
        *,
        batch_size: int | None = None,
    ) -> np.ndarray:
        """Return a vector of unit length for each caption, float32 of shape (captions, embedding).

        A single caption gives one vector.

        Parameters
        ----------
        captions
            One caption or several. Longer ones are cut off at the model's context length.
        progress
            True shows a bar. A function is called with the number of captions done and of all.
        batch_size
            Captions of a forward pass. 64 by default.
        """
        texts = _check_texts("encode_text", captions, "a caption")
        size = _checked_size(batch_size) or self.batch

        def embed(start: int) -> np.ndarray:
            return self.embed_tokens(
                self.tokenizer.batch(texts[start : start + size], self.context)
            )

        batches = self.map_batches(embed, range(0, len(texts), size))
        with counted(progress, "embedding captions") as bar:
            vectors = self._concatenate(batches, len(texts), bar)
        return vectors[0] if isinstance(captions, str) else vectors

    @overload
    def classify(
        self,
        images: str | os.PathLike[str] | bytes | Image.Image,
        labels: Sequence[str],
        *,
        templates: Sequence[str] = ...,
        batch_size: int | None = ...,
        progress: bool | Progress = ...,
    ) -> dict[str, float]: ...

    @overload
    def classify(
        self,
        images: list[Any] | tuple[Any, ...],
        labels: Sequence[str],
        *,
        templates: Sequence[str] = ...,
        batch_size: int | None = ...,
        progress: bool | Progress = ...,
    ) -> list[dict[str, float]]: ...

    @overload
    def classify(
        self,
        images: OneImage | ManyImages,
        labels: Sequence[str],
        *,
        templates: Sequence[str] = ...,
        batch_size: int | None = ...,
        progress: bool | Progress = ...,
    ) -> Any: ...

    def classify(
        self,
        images: OneImage | ManyImages,
        labels: Sequence[str],
        *,
        templates: Sequence[str] = TEMPLATES,
        batch_size: int | None = None,
        progress: bool | Progress = False,
    ) -> dict[str, float] | list[dict[str, float]]:
        """Return the probability of each label, most probable first.

        Returns a dictionary for one image, and a list of them for several. The labels need not be
        among the training data. Probabilities sum to 1, except for a model that was trained with
        the sigmoid loss, which judges each label by itself.

        Parameters
        ----------
        images
            One image or several, in any form that `encode_image` takes.
        labels
            The labels to choose from, such as `["cat", "dog"]`.
        templates
            Sentences with {} for the label, whose embeddings are averaged. `["{}"]` takes the
            labels alone.
        batch_size, progress
            As for `encode_image`.
        """
        names = _check_labels(labels)
        sentences = _check_templates(templates)
        image_vectors = self.encode_image(as_list(images), batch_size=batch_size, progress=progress)
        label_vectors = class_embeddings(self.encode_text, names, sentences)
        scale, bias = self.logits() or Logits(USUAL_SCALE, None)
        probabilities = class_shares(image_vectors @ label_vectors.T, scale, bias)
        results = []
        for of_image in probabilities:
            order = np.argsort(-of_image, kind="stable").tolist()
            results.append({names[label]: float(of_image[label]) for label in order})
        return results[0] if is_one_image(images) else results

    def to(self, device: str) -> Encoder:
        """Move the model to a device: `auto`, `cpu`, `cuda`, `mps` or `xpu`. Return the model."""
        if device not in ("auto", "cpu"):
            raise ConfigError(
                f"This model was exported for the CPU; it cannot be moved to {device}.",
                hint="lapclip.load(RUN)",
            )
        return self

    def encode_pairs(
        self, pairs: Pairs, progress: Progress | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return vectors of all images and of all captions, and the image of each caption."""
        report = progress or ignore_progress
        captions, which, image_of_caption = distinct_captions(pairs)
        total = len(pairs) + len(captions)
        images = self.encode_pixels(pairs.pixels, lambda done, _: report(done, total))
        texts = self.encode_text(captions, lambda done, _: report(len(pairs) + done, total))
        return images, texts[which], image_of_caption

    def _concatenate(
        self, batches: Iterable[np.ndarray], total: int, progress: Progress | None
    ) -> np.ndarray:
        """Return the vectors of all batches, and report progress as they are computed."""
        blocks = []
        done = 0
        for batch in batches:
            blocks.append(batch)
            done += len(batch)
            if progress:
                progress(done, total)
        if not blocks:
            return np.zeros((0, self.embedding), dtype=np.float32)
        return np.concatenate(blocks)

    def summary(self) -> dict[str, str]:
        """Return the main facts about the model, for people."""
        about = {"from": self.source} if self.source else {}
        return about | {
            "sees": f"{self.view.side} x {self.view.side} pixels",
            "reads": f"captions of up to {self.context} tokens",
            "gives": f"vectors of {self.embedding} numbers",
        }

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {text}" for name, text in self.summary().items())
        return f"<{type(self).__name__}: {facts}>"


def _check_texts(function: str, texts: Any, kind: str) -> list[str]:
    """Return one text or several as a list. Raise ConfigError for anything else."""
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, bytes) or not isinstance(texts, Iterable):
        raise ConfigError(
            f"{function}: a {type(texts).__name__} is neither a text nor several.",
            hint='["a cat", "a dog"]',
        )
    checked = list(texts)
    for number, text in enumerate(checked):
        if not isinstance(text, str):
            raise ConfigError(
                f"{function}: item {number} is {text!r:.60}, and {kind} is a text.",
                hint="str(ITEM)",
            )
    return checked


def _check_labels(labels: Any) -> list[str]:
    """Return labels as texts. Raise ConfigError unless they are several different ones."""
    names = []
    if isinstance(labels, Iterable) and not isinstance(labels, str):
        names = [str(label) for label in labels]
    if not names:
        raise ConfigError("classify takes a list of labels to choose among.", hint='["cat", "dog"]')
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(
                f"classify: the label {name!r} is there twice.", hint="each label once"
            )
    return names


def _check_templates(templates: Any) -> list[str]:
    """Return templates as a list. Raise ConfigError unless each has a place for the label."""
    sentences = []
    if not isinstance(templates, str):
        sentences = _check_texts("classify", templates, "a template")
    if not sentences or not all("{}" in sentence for sentence in sentences):
        raise ConfigError(
            "classify takes a list of templates with {} for the label.",
            hint='["a photo of a {}."]',
        )
    return sentences


def _checked_size(batch_size: int | None) -> int | None:
    if batch_size is not None and (not isinstance(batch_size, (int, np.integer)) or batch_size < 1):
        raise ConfigError(f"batch_size must be a whole number from 1 up, not {batch_size!r:.60}.")
    return batch_size


class Embedder(Encoder):
    """A model in torch."""

    def __init__(self, model: CLIP, tokenizer: Tokenizer, device: Device) -> None:
        super().__init__(
            View.of(model.shape), tokenizer, model.shape.context, model.shape.embedding
        )
        self.model, self.device = model, device

    @torch.inference_mode()
    def embed_pixels(self, pixels_BSSC: np.ndarray) -> np.ndarray:
        pixels = torch.from_numpy(pixels_BSSC).to(self.device.torch)
        return self.model.encode_image(normalise(pixels, self.model.shape)).cpu().numpy()

    @torch.inference_mode()
    def embed_tokens(self, tokens_BL: np.ndarray) -> np.ndarray:
        tokens = torch.from_numpy(tokens_BL).to(self.device.torch)
        return self.model.encode_text(tokens).cpu().numpy()

    def to(self, device: str) -> Embedder:
        chosen = choose_device(device, "device")[0]
        self.model.to(chosen.torch)
        self.device = chosen
        return self

    def summary(self) -> dict[str, str]:
        count = f"{parameters(count_parameters(self.model))} parameters"
        return {**super().summary(), "has": count, "on": self.device.kind}

    def fingerprint(self) -> str:
        return fingerprint(self.model, self.tokenizer)

    def image_fingerprint(self) -> str:
        return image_fingerprint(self.model)

    def logits(self) -> Logits:
        bias = self.model.logit_bias
        return Logits(self.model.logit_scale.exp().item(), None if bias is None else bias.item())

    def description(self) -> dict:
        """Return the contents of config.json: everything but the weights."""
        towers = {name: spec.to_dict() for name, spec in self.model.networks().items()}
        saved = {
            "format": 1,
            "model": asdict(self.model.shape),
            "tokenizer": self.tokenizer.to_dict(),
        }
        return {**saved, "towers": towers} if towers else saved


class OnnxSession:
    """One ONNX file, ready to run on the CPU."""

    def __init__(self, path: Path, threads: int = 0) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Threads that spin between two calls would slow down those that decode images.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.log_severity_level = 3
        try:
            check_plain(path)
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # a damaged file raises many kinds of errors
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
        """Contents of lapclip.json."""
        super().__init__(
            _exported_view(about),
            _exported_tokenizer(folder, about),
            about["tokenizer"]["longest"],
            about["embedding"],
        )
        self.files = {
            tower: folder / Path(about["towers"][tower]["file"]).name for tower in ("image", "text")
        }
        """ONNX file of each tower."""
        self._image, self._text = (OnnxSession(path, threads) for path in self.files.values())

    @property
    def made_from(self) -> str:
        """Fingerprint of the model that was exported."""
        return self.about.get("made_from", "")

    def embed_pixels(self, pixels_BSSC: np.ndarray) -> np.ndarray:
        return self._image(pixels_BSSC)

    def embed_tokens(self, tokens_BL: np.ndarray) -> np.ndarray:
        return self._text(tokens_BL)

    def fingerprint(self) -> str:
        text = {
            "weights": digest_of_file(self.files["text"]),
            "tokenizer": self.tokenizer.to_dict(),
        }
        return short_digest({**self._image_facts(), **text, "context": self.context})

    def image_fingerprint(self) -> str:
        return short_digest(self._image_facts())

    def logits(self) -> Logits | None:
        if "logit_scale" not in self.about:
            return None
        return Logits(self.about["logit_scale"], self.about.get("logit_bias"))

    def _image_facts(self) -> dict[str, Any]:
        # The file of the tower also holds the scaling of pixels.
        return {"image": digest_of_file(self.files["image"]), "view": asdict(self.view)}


def distinct_captions(pairs: Pairs) -> tuple[list[str], list[int], np.ndarray]:
    """Return the distinct captions, the index among them of each caption, and the image of each.

    Embedding equal captions once saves work and gives them equal scores, so that they tie.
    """
    captions = list(chain.from_iterable(pairs.captions))
    distinct = list(dict.fromkeys(captions))
    number_of = {caption: number for number, caption in enumerate(distinct)}
    caption_counts = [len(options) for options in pairs.captions]
    image_of_caption = np.repeat(np.arange(len(pairs)), caption_counts)
    return distinct, [number_of[caption] for caption in captions], image_of_caption


def load(path: str | os.PathLike[str], device: str = "cpu") -> Encoder:
    """Load a trained model that embeds images and captions.

    Parameters
    ----------
    path
        Name or folder of a run, folder of a model or an export, file of published weights, short
        name that `lapclip models` lists, or name on the Hugging Face hub (`hf:org/name`).
    device
        Device to compute on: `auto`, `cpu`, `cuda`, `mps` or `xpu`. Exports for ONNX Runtime run on
        the CPU.
    """
    try:
        path = _path_of(os.fspath(path))
    except TypeError:
        raise ConfigError(
            f"A {type(path).__name__} is no path of a model.", hint='"runs/first-run"'
        ) from None
    model = open_exported(path) if is_exported(Path(path)) else load_torch(path, device)
    model.source = path
    return model


def _path_of(name: str) -> str:
    """Return the path of a model: of the run with this name if there is one, else the name itself.

    The name of a run comes before an equal path, as in `lapclip.which_model`.
    """
    path = Path(name)
    if path.is_absolute():
        return name
    is_run = (RUNS / path).exists()
    is_unknown_name = path.parent == Path() and not path.exists()
    if is_run or is_unknown_name:
        return str(which_model(name).path)
    return name


@contextmanager
def naming_device_flag() -> Iterator[None]:
    """Replace train.device by --device in errors about a missing device."""
    try:
        yield
    except ConfigError as error:
        message = error.message.replace("train.device", "--device")
        if message == error.message:
            raise
        raise ConfigError(message, hint="--device auto") from None


def load_torch(path: str | os.PathLike[str], device: str = "cpu") -> Embedder:
    """Load a model in torch. Raise an error for folders that were exported for another engine."""
    # A program may have another default device, to which earlier releases of safetensors load.
    with torch.device("cpu"):
        shape, tensors, tokenizer, towers = read_model(path)
    networks = {tower: (build_network(spec), spec) for tower, spec in towers.items()}
    # Without memory for initial values, which the saved ones replace. Foreign networks need it,
    # because they run once to find out their sizes.
    try:
        with torch.device("cpu" if networks else "meta"):
            model = CLIP(shape, networks=networks)
        model.load_state_dict(tensors, assign=True)
    except (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        MemoryError,
    ) as error:
        raise RunError(
            f"The model in {path} cannot be loaded: {error}.", hint="lapclip train"
        ) from None
    chosen = choose_device(device)[0]
    if chosen.is_cpu:
        keep_freed_memory()  # large convolutions run at up to three times the speed
    return Embedder(model.to(chosen.torch).eval(), tokenizer, chosen)


def open_exported(folder: str | os.PathLike, threads: int = 0) -> OnnxEmbedder:
    """Load a model that was exported for ONNX Runtime.

    `threads` is the number for each tower. 0 takes one for each core.
    """
    folder = Path(folder)
    made_for = read_description(folder)["format"]
    if not made_for.startswith("onnx"):
        raise WeightsError(
            f"{folder} is for {made_for}, which ONNX Runtime does not read.", hint="--to onnx"
        )
    if find_spec("onnxruntime") is None:
        raise WeightsError("This needs onnxruntime.", hint=install("export"))
    try:
        return OnnxEmbedder(folder, threads)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, DataError) as error:
        why = f"{folder / DESCRIPTION} is damaged: {first_line(error)}."
        raise WeightsError(why, hint="lapclip export again") from None


def read_description(folder: Path) -> dict[str, Any]:
    """Return the contents of lapclip.json in an exported folder."""
    try:
        about = read_json(folder / DESCRIPTION)
        version = about["version"]
        description = {
            **about,
            "towers": dict(about["towers"]),
            "preprocessing": dict(about["preprocessing"]),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"{folder / DESCRIPTION} cannot be read: {error}.", hint="lapclip export again"
        ) from None
    if version != EXPORT_VERSION:
        raise WeightsError(
            f"{folder} is an export of version {version!r}; this lapclip reads {EXPORT_VERSION}.",
            hint="lapclip export again",
        )
    return description


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
        raise WeightsError(
            f"{path} cannot be read: {error}.", hint="lapclip export again"
        ) from None
    return PretrainedTokenizer(description, about["tokenizer"]["padding"])
