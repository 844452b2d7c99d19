"""The parts that lapclip trains with, for loops of your own (`examples/own_loop.py` is one).

What is imported from here is stable: a release that changes how one of these is called says so in CHANGELOG.md and lets
the old way work for one release more. All else inside lapclip may be used and may change without notice, above all the
step itself (`lapclip.training.step.TrainStep`), which holds what is measured and chosen for a machine: micro-batches,
half precision, recorded graphs, several computers.

    data        load_data, DataConfig, View     images and captions of a path or of the built-in scenes, by split
    tokens      choose_tokenizer                the tokenizer for some captions, and why it is that one
    batches     BatchPlan, Batch, prefetch      which pairs come in which step: a function of the seed and the step
    towers      CLIP, ModelConfig, named_shape  the model; `encode_image` and `encode_text` give unit-length rows
    pixels      normalise                       uint8 images as the image tower sees them
    loss        contrastive_loss, LOSSES        the loss and its logits; pairs that share a caption are all true
                batch_accuracy                  the shares of right answers in a batch, both ways
    schedule    learning_rate, TrainConfig      warm-up and cosine
    device      choose_device                   the device for "auto", "cpu", "cuda", "mps" or "xpu", and why
    metrics     Embedder, retrieval             embeddings of held-out pairs, and recall with intervals
    files       save_model                      a folder that `lapclip.load` and every command reads
"""

from lapclip.config import DataConfig, ModelConfig, TrainConfig
from lapclip.data.batches import Batch, BatchPlan, prefetch
from lapclip.data.loading import load_data
from lapclip.data.pixels import View, normalise
from lapclip.data.tokenizers import choose_tokenizer
from lapclip.embedder import Embedder
from lapclip.evaluation.retrieval import retrieval
from lapclip.machine.choose_device import choose_device
from lapclip.model.clip import CLIP
from lapclip.model.shapes import named_shape
from lapclip.training.checkpoint import save_model
from lapclip.training.objectives.contrastive import LOSSES, batch_accuracy, contrastive_loss
from lapclip.training.schedule import learning_rate

__all__ = [
    "CLIP",
    "LOSSES",
    "Batch",
    "BatchPlan",
    "DataConfig",
    "Embedder",
    "ModelConfig",
    "TrainConfig",
    "View",
    "batch_accuracy",
    "choose_device",
    "choose_tokenizer",
    "contrastive_loss",
    "learning_rate",
    "load_data",
    "named_shape",
    "normalise",
    "prefetch",
    "retrieval",
    "save_model",
]
