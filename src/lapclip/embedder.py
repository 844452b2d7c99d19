"""Model, tokenizer and preprocessing as one thing that is loaded and asked for embeddings: run by torch or, where it
was exported, by ONNX Runtime.

model = lapclip.load("runs/first-run")
images = model.encode_image(["cat.jpg", "dog.jpg"])
captions = model.encode_text(["a cat", "a dog"])
similarity = images @ captions.T
model.classify("cat.jpg", ["cat", "dog"])
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
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
from lapclip.progress import Progress
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
USUAL_SCALE = 100.0
"""What published CLIPs learnt to multiply similarities by; for an exported model that does not say its own."""


class Logits(NamedTuple):
    """What a model learnt to make of a similarity: times a scale, plus a bias where it learnt with the sigmoid loss."""

    scale: float
    bias: float | None


class Encoder(ABC):
    """Turns images and captions into unit-length vectors that can be compared, whatever computes them."""

    batch = BATCH
    """Images or captions at once."""
    map_batches: Callable[[Callable[[Any], np.ndarray], Sequence[Any]], Iterable[np.ndarray]] = map
    """What computes batches one after the other. Several ranks of a run share them."""
    source = ""
    """Where it was loaded from; empty where it was made here."""

    def __init__(self, view: View, tokenizer: Tokenizer, context: int, embedding: int) -> None:
        self.view, self.tokenizer, self.context, self.embedding = (
            view,
            tokenizer,
            context,
            embedding,
        )

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

    def encode_image(
        self,
        images: OneImage | ManyImages,
        *,
        batch_size: int | None = None,
        progress: bool | Progress = False,
    ) -> np.ndarray:
        """A unit-length row for each image, float32 of shape (images, embedding); for a single image one vector.

        An image may be a path, the bytes of a file, a PIL image, an array (height, width, colours) or a tensor
        (colours, height, width); several are a list of any of these, or an array or a tensor with one more dimension in
        front. Numbers are from 0 to 255, or from 0 to 1 where they are floating-point, and not normalised: the model
        resizes, crops and normalises as it learnt to see.

        Parameters
        ----------
        images
            One image or several.
        batch_size
            Images at once; without it 64.
        progress
            True shows a bar; a function is called with how many are done and how many there are.
        """
        given, size = as_list(images), _checked_size(batch_size) or self.batch

        def embed(at: int) -> np.ndarray:
            squares = [middle_square(as_image(image), self.view) for image in given[at : at + size]]
            return self.embed_pixels(np.stack(squares))

        with counted(progress, "embedding images") as bar:
            rows = self._counted(map(embed, range(0, len(given), size)), len(given), bar)
        return rows[0] if is_one_image(images) else rows

    def encode_pixels(self, pixels_NSSC: Pixels, progress: Progress | None = None) -> np.ndarray:
        """One unit-length row per image, given as uint8 pixels of the model's size."""
        starts = range(0, len(pixels_NSSC), self.batch)
        made = self.map_batches(
            lambda at: self.embed_pixels(np.array(pixels_NSSC[at : at + self.batch])), starts
        )
        return self._counted(made, len(pixels_NSSC), progress)

    def encode_text(
        self,
        captions: str | Sequence[str],
        progress: bool | Progress | None = None,
        *,
        batch_size: int | None = None,
    ) -> np.ndarray:
        """A unit-length row for each caption, float32 of shape (captions, embedding); for a single one a vector.

        Parameters
        ----------
        captions
            One caption or several. What is longer than the model reads is cut off.
        progress
            True shows a bar; a function is called with how many are done and how many there are.
        batch_size
            Captions at once; without it 64.
        """
        given = _texts("encode_text", captions, "a caption")
        size = _checked_size(batch_size) or self.batch
        made = self.map_batches(
            lambda at: self.embed_tokens(self.tokenizer.batch(given[at : at + size], self.context)),
            range(0, len(given), size),
        )
        with counted(progress, "embedding captions") as bar:
            rows = self._counted(made, len(given), bar)
        return rows[0] if isinstance(captions, str) else rows

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
        """What share of its belief the model gives each label, the likeliest label first: a dictionary for one image, a
        list of them for several.

        The labels need not be among what the model learnt. Shares sum to 1, unless the model learnt with the sigmoid
        loss: then each label is a question of its own.

        Parameters
        ----------
        images
            One image or several, in any form that `encode_image` takes.
        labels
            The names to choose among, such as `["cat", "dog"]`.
        templates
            Sentences with {} for the label, whose embeddings are averaged; `["{}"]` takes labels as they are.
        batch_size, progress
            As for `encode_image`.
        """
        names = (
            []
            if isinstance(labels, str) or not isinstance(labels, Iterable)
            else [str(label) for label in labels]
        )
        if not names:
            raise ConfigError(
                "classify takes a list of labels to choose among.", hint='["cat", "dog"]'
            )
        sentences = _texts(
            "classify", [] if isinstance(templates, str) else templates, "a template"
        )
        if not sentences or not all("{}" in sentence for sentence in sentences):
            raise ConfigError(
                "classify takes a list of templates with {} for the label.",
                hint='["a photo of a {}."]',
            )
        if twice := [name for at, name in enumerate(names) if name in names[:at]]:
            raise ConfigError(
                f"classify: the label {twice[0]!r} is there twice.", hint="each label once"
            )
        image_NE = self.encode_image(as_list(images), batch_size=batch_size, progress=progress)
        scale, bias = self.logits() or Logits(USUAL_SCALE, None)
        similarity_NC = image_NE @ class_embeddings(self.encode_text, names, sentences).T
        shares_NC = class_shares(similarity_NC, scale, bias)
        told = [
            {names[at]: float(shares_C[at]) for at in np.argsort(-shares_C, kind="stable").tolist()}
            for shares_C in shares_NC
        ]
        return told[0] if is_one_image(images) else told

    def to(self, device: str) -> Encoder:
        """Move the model to a device: `auto`, `cpu`, `cuda`, `mps` or `xpu`. Gives back the model."""
        if device not in ("auto", "cpu"):
            raise ConfigError(
                f"This model was exported for the CPU; it cannot be moved to {device}.",
                hint="lapclip.load(RUN)",
            )
        return self

    def encode_pairs(
        self, pairs: Pairs, progress: Progress | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Embeddings of all images, of all captions, and each caption's image."""
        captions, which, owner = distinct_captions(pairs)
        total = len(pairs) + len(captions)
        tell = progress or (lambda done, total: None)
        images = self.encode_pixels(pairs.pixels, lambda done, _: tell(done, total))
        texts = self.encode_text(captions, lambda done, _: tell(len(pairs) + done, total))
        return images, texts[which], owner

    def _counted(
        self, made: Iterable[np.ndarray], total: int, progress: Progress | None
    ) -> np.ndarray:
        """Batches that are made one after the other, as one."""
        batches, done = [], 0
        for batch in made:
            batches.append(batch)
            done += len(batch)
            if progress:
                progress(done, total)
        return self._joined(batches)

    def _joined(self, batches: list[np.ndarray]) -> np.ndarray:
        return (
            np.concatenate(batches) if batches else np.zeros((0, self.embedding), dtype=np.float32)
        )

    def summary(self) -> dict[str, str]:
        """What a person wants to know of it at a glance."""
        about = {"from": self.source} if self.source else {}
        return about | {
            "sees": f"{self.view.side} x {self.view.side} pixels",
            "reads": f"captions of up to {self.context} tokens",
            "gives": f"vectors of {self.embedding} numbers",
        }

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {', '.join(f'{name} {text}' for name, text in self.summary().items())}>"


def _texts(where: str, given: Any, each: str) -> list[str]:
    """One text or several, as a list. A file may have numbers or nothing where a text should be."""
    texts = (
        [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else None
    )
    if texts is None or isinstance(given, bytes):
        raise ConfigError(
            f"{where}: a {type(given).__name__} is neither a text nor several.",
            hint='["a cat", "a dog"]',
        )
    for at, text in enumerate(texts):
        if not isinstance(text, str):
            raise ConfigError(
                f"{where}: item {at} is {text!r:.60}, and {each} is a text.", hint="str(ITEM)"
            )
    return texts


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
        """What config.json holds: everything but the weights."""
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
        # Threads that spin between two calls take the cores from whoever decodes the next images.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.log_severity_level = 3
        try:
            check_plain(path)
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
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
            _exported_view(about),
            _exported_tokenizer(folder, about),
            about["tokenizer"]["longest"],
            about["embedding"],
        )
        self.files = {
            tower: folder / Path(about["towers"][tower]["file"]).name for tower in ("image", "text")
        }
        """Each tower's ONNX file."""
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
        return (
            Logits(self.about["logit_scale"], self.about.get("logit_bias"))
            if "logit_scale" in self.about
            else None
        )

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


def load(path: str | os.PathLike[str], device: str = "cpu") -> Encoder:
    """A trained model, ready to embed images and captions.

    Parameters
    ----------
    path
        A run's name or folder, a folder with a model, an exported folder, a file of published weights, a short name
        that `lapclip models` lists, or a name on the Hugging Face hub (`hf:org/name`).
    device
        Where to compute: `auto`, `cpu`, `cuda`, `mps` or `xpu`. What was exported for ONNX Runtime runs on the CPU.
    """
    try:
        path = _path_of(os.fspath(path))
    except TypeError:
        raise ConfigError(
            f"A {type(path).__name__} is no path of a model.", hint='"runs/first-run"'
        ) from None
    found = open_exported(path) if is_exported(Path(path)) else load_torch(path, device)
    found.source = path
    return found


def _path_of(name: str) -> str:
    """Where the model of that name is: a run's name comes first, as the rule of `lapclip.which_model` is. All else is
    read as it is named, whatever it ends with."""
    path = Path(name)
    in_runs, is_plain_name = (RUNS / path).exists(), path.parent == Path()
    if not path.is_absolute() and (in_runs or (is_plain_name and not path.exists())):
        return str(which_model(name).path)
    return name


@contextmanager
def naming_device_flag() -> Iterator[None]:
    """Name the flag --device, not the setting train.device, in errors about a device that is not here."""
    try:
        yield
    except ConfigError as error:
        message = error.message.replace("train.device", "--device")
        if message == error.message:
            raise
        raise ConfigError(message, hint="--device auto") from None


def load_torch(path: str | os.PathLike[str], device: str = "cpu") -> Embedder:
    """The same, for what needs the model in torch; folders exported for another engine are refused."""
    with torch.device(
        "cpu"
    ):  # a program may have another default, to which earlier releases of safetensors read
        shape, tensors, tokenizer, towers = read_model(path)
    networks = {tower: (build_network(spec), spec) for tower, spec in towers.items()}
    # No first values: the saved ones take their place. A foreign network has to run once to be known.
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
    """The model in a folder exported for ONNX Runtime. `threads` is for each tower; 0 takes a thread a core."""
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
    """What the lapclip.json of an exported folder says."""
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
