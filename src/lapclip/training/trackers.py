"""A run's metrics in the form of tools that people already use. Each is a listener of the run's events."""

from __future__ import annotations

from pathlib import Path

from lapclip.errors import ConfigError
from lapclip.runs import events
from lapclip.runs.events import Event, Listener
from lapclip.suggest import install


def check_tracker(track: str) -> None:
    """Refuse what is not installed before a run begins."""
    if track == "tensorboard":
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError:
            raise ConfigError(
                "work.track tensorboard needs the package tensorboard.", hint=install("tensorboard")
            ) from None


def trackers(track: str, folder: Path) -> list[Listener]:
    """The listeners that a setting asks for."""
    return [TensorBoard(folder / "tensorboard")] if track == "tensorboard" else []


class TensorBoard:
    """Scalars by step: `tensorboard --logdir runs`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def __call__(self, event: Event) -> None:
        match event:
            case events.Step():
                metrics = {
                    "loss": event.loss,
                    "temperature": event.temperature,
                    "learning rate": event.lr,
                }
                metrics |= {
                    "accuracy/text to image": event.t2i_accuracy,
                    "accuracy/image to text": event.i2t_accuracy,
                }
                metrics |= {
                    f"gradient norm/{part}": norm for part, norm in event.grad_norms.items()
                }
                metrics |= {"gradient norm": event.grad_norm} if event.grad_norm is not None else {}
                metrics |= {name.replace("_", " "): value for name, value in event.metrics.items()}
                self._write(metrics, event.step)
            case events.Evaluation():
                scores = {
                    name: value
                    for name, value in event.evaluation.items()
                    if isinstance(value, float)
                }
                self._write(
                    {f"held out/{name}": value for name, value in scores.items()}, event.step
                )
            case events.Memory():
                self._write(
                    {"memory/process": event.process_bytes, "memory/peak": event.peak_bytes},
                    event.step,
                )
            case events.Finished() | events.Stopped() | events.Failed():
                self._writer.close()

    def _write(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
