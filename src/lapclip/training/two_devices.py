"""One update with a tower on each of two devices, which compute at the same time.

Each tower has a thread of its own, with its weights, their rounded copy and its optimiser on its own device. A step has
three stretches in which both towers compute and neither waits for the other: forward, backward, update. In between the
thread that takes the step does what needs both: embeddings cross over to where the loss is computed, their gradients
cross back, and the length of all gradients is known only when both towers have theirs. Nothing else crosses.

The backward pass of a tower begins at its embeddings, as in gradient caching: torch computes the gradients of tensors
on the CPU in the thread that asks for them, so that each tower has to ask by itself.

All that crosses is moved by the thread that takes the step, while both towers rest. A copy from a GPU waits for
everything that the GPU was asked for before it, and a copy while a step is recorded would break the recording.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from lapclip.config import TrainConfig
from lapclip.data.batches import Batch
from lapclip.machine.choose_device import use_threads
from lapclip.machine.device import Device
from lapclip.machine.device_pair import DevicePair
from lapclip.machine.timing import Stopwatch
from lapclip.model.clip import CLIP
from lapclip.training.inputs import Inputs, Sent
from lapclip.training.optimizer import TowerOptimizers, apply_gradients, belongs_to
from lapclip.training.step import Losses, StepMetrics, TrainStep, norms_of

TOWERS = ("image", "text")
Embeddings = dict[str, tuple[Tensor, ...]]
"""Of each tower: of images; of captions, and of phrases where there are some."""

Result = TypeVar("Result")


class AnyHalf(Protocol):
    """A tower at work on its own device: plainly (`Half`), or recorded (`cuda_graph.RecordedHalf`)."""

    tower: str
    device: Device

    def forward(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """The embeddings of a batch: of images, or of captions and of phrases where there are some."""
        ...

    def backward(self, inputs: Inputs, gradients: Sequence[Tensor]) -> Tensor:
        """Carry the gradients of the embeddings to the weights; the length of each weight's comes back."""
        ...

    def update(self, divisor: Tensor | None, overflowed: Tensor | None) -> None:
        """Update the weights with their gradients divided by something; not where float16's overflowed."""
        ...


class SplitStep(TrainStep):
    """Stands in for a TrainStep where each tower has a device of its own."""

    def __init__(
        self, model: CLIP, optimizer: TowerOptimizers, config: TrainConfig, device: DevicePair
    ) -> None:
        super().__init__(model, optimizer, config, device)
        self.halves: dict[str, AnyHalf] = {
            tower: Half(self, tower, optimizer.each[tower], device.of(tower)) for tower in TOWERS
        }
        self._threads = {tower: TowerThread(tower, device) for tower in TOWERS}
        self._outside = [
            p for n, p in model.named_parameters() if p.requires_grad and belongs_to(n) == "loss"
        ]
        self._optimizer_of_loss = optimizer.each["loss"]

    def __call__(
        self, batch: Batch | Sent, step: int, lr: float, watch: Stopwatch
    ) -> Callable[[], StepMetrics]:
        """Update the model. The function returned reads the metrics: at once, that would make a device wait."""
        assert isinstance(batch, Batch), "what goes to two devices is not sent ahead"
        with watch.phase("transfer"):
            inputs = self.inputs(batch, step).on(self.device)
        self.set_learning_rate(lr)
        return self.reader(self.update(inputs, watch))

    def update(self, inputs: Inputs, watch: Stopwatch) -> Tensor:
        """Gradients, clipping and the optimisers."""
        assert not inputs.shards, "towers on two devices take a batch as a whole"
        with watch.phase("forward"):
            embeddings = self.forward(inputs, watch)
        with watch.phase("exchange"):
            losses, gradients = self.judge(inputs, embeddings)
        with watch.phase("backward"):
            norms = self._at_once(watch, lambda half: half.backward(inputs, gradients[half.tower]))
        with watch.phase("optimizer"):
            grad_norm, part_norms = self._by_part(self._all_norms(norms))
            scalars = self._scalars(losses, grad_norm)
            self._update_all(grad_norm, watch)
        return torch.cat([scalars, part_norms])

    def forward(self, inputs: Inputs, watch: Stopwatch) -> Embeddings:
        """The embeddings of a batch, by both towers at once."""
        return self._at_once(watch, lambda half: half.forward(inputs))

    def judge(
        self, inputs: Inputs, embeddings: Embeddings
    ) -> tuple[Losses, dict[str, list[Tensor]]]:
        """The loss, with what crosses over for it, and the gradients of each tower's embeddings, on its device."""
        home = self.device.of("loss").torch
        for parameter in self._outside:
            parameter.grad = None
        leaves = {
            tower: [one.to(home).detach().requires_grad_() for one in own]
            for tower, own in embeddings.items()
        }
        losses = self.loss(inputs, *leaves["image"], *leaves["text"])
        self.scaled(losses.learnt).backward()
        return losses, {tower: self._crossed(tower, own) for tower, own in leaves.items()}

    def _all_norms(self, norms: dict[str, Tensor]) -> Tensor:
        """The length of each gradient, in the order of the model's parameters: what is outside both towers is first."""
        home = self.device.of("loss").torch
        return torch.cat([norms_of(self._outside), *(norms[tower].to(home) for tower in TOWERS)])

    def encode_tower(self, tower: str, inputs: Inputs) -> tuple[Tensor, ...]:
        """Embeddings of images, or of captions and of phrases where there are some, on the tower's device."""
        if tower == "image":
            pixels_BCSS = self._view_images(inputs) if inputs.image_features is None else None
            with self._dropout.applied(inputs.tensors(), tower):
                return (self._encode_image(inputs, pixels_BCSS),)
        with self._dropout.applied(inputs.tensors(), tower):
            captions_BE = self._encode_text(inputs)
        phrases = inputs.of_phrases()
        if phrases is None:
            return (captions_BE,)
        with self._dropout.applied(phrases.tensors(), tower):
            return captions_BE, self._encode_text(phrases)

    def _crossed(self, tower: str, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of a tower's embeddings, on its device."""
        found = [leaf.grad for leaf in leaves if leaf.grad is not None]
        assert len(found) == len(leaves)
        return [gradient.to(self.device.of(tower).torch) for gradient in found]

    def _update_all(self, grad_norm: Tensor, watch: Stopwatch) -> None:
        """Update the weights where they are: by gradients as long as both towers' together allow."""
        self.touched = True
        overflowed = ~grad_norm.isfinite() if self.loss_scale is not None else None
        divisor = self._divisor(grad_norm)
        crossed = {
            tower: [
                None if found is None else found.to(self.device.of(tower).torch)
                for found in (divisor, overflowed)
            ]
            for tower in TOWERS
        }
        self._at_once(watch, lambda half: half.update(*crossed[half.tower]))
        gradients = [parameter.grad for parameter in self._outside if parameter.grad is not None]
        apply_gradients(
            self._optimizer_of_loss, gradients, self.device.of("loss"), divisor, overflowed
        )
        if self.loss_scale is not None and overflowed is not None:
            self.loss_scale.update(overflowed)
        self.model.hold_temperature()

    def _at_once(self, watch: Stopwatch, work: Callable[[AnyHalf], Result]) -> dict[str, Result]:
        """Let both towers do something, each in its thread, and wait for both; seconds of each go on the stopwatch."""
        count = torch.get_num_threads()

        def run(half: AnyHalf) -> tuple[Result, float]:
            began = time.perf_counter()
            result = work(half)
            if watch.on:
                half.device.synchronise()
            return result, time.perf_counter() - began

        futures = {
            tower: self._threads[tower].begin(count, lambda half=half: run(half))
            for tower, half in self.halves.items()
        }
        wait(
            futures.values()
        )  # also where one has failed: the other is still at work on what would be thrown away
        done = {tower: future.result() for tower, future in futures.items()}
        if watch.on:
            watch.add_towers({tower: seconds for tower, (_, seconds) in done.items()})
        return {tower: result for tower, (result, _) in done.items()}

    def alone(self, tower: str, work: Callable[[AnyHalf], Result]) -> Result:
        """Let one tower do something in its thread while the other rests."""
        return (
            self._threads[tower]
            .begin(torch.get_num_threads(), lambda: work(self.halves[tower]))
            .result()
        )


class TowerThread:
    """Where a tower's work is done, with the number of torch's threads that the tower is to have there."""

    def __init__(self, tower: str, device: DevicePair) -> None:
        self._shared = device.image.is_cpu and device.text.is_cpu
        self._count = 0
        self._executor = ThreadPoolExecutor(1, f"lapclip-{tower}")

    def begin(self, count: int, work: Callable[[], Result]) -> Future[Result]:
        """Begin something. `count` is what the caller computes with: a tower on the CPU takes as many, or half of them
        where both are there."""
        threads = max(1, count // 2) if self._shared else count

        def run() -> Result:
            if threads != self._count:
                use_threads(threads)
                self._count = threads
            return work()

        return self._executor.submit(run)


class Half:
    """A tower with its weights and its optimiser, at work on its own device, in whatever thread asks it."""

    def __init__(
        self, step: SplitStep, tower: str, optimizer: torch.optim.AdamW, device: Device
    ) -> None:
        self.tower, self.device = tower, device
        self._step, self._optimizer = step, optimizer
        self._parameters = [
            p
            for name, p in step.model.named_parameters()
            if p.requires_grad and belongs_to(name) == tower
        ]
        self._with_graph: tuple[Tensor, ...] | None = None

    def forward(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """The embeddings of a batch. What the backward pass needs is held until then; of a batch that is cut in
        micro-batches it is computed again."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._step.rounded:
            self._step.rounded.refresh(self._parameters)
        if self._step.is_cut(inputs):
            with torch.no_grad():
                found = [
                    self._step.encode_tower(self.tower, part)
                    for part in self._step.micro_batches(inputs)
                ]
            return tuple(map(torch.cat, zip(*found, strict=True)))
        self._with_graph = self._step.encode_tower(self.tower, inputs)
        return tuple(embedding.detach() for embedding in self._with_graph)

    def backward(self, inputs: Inputs, gradients: Sequence[Tensor]) -> Tensor:
        """Carry the gradients of the embeddings to the weights; the length of each weight's comes back."""
        if self._step.is_cut(inputs):
            by_micro_batch = zip(
                *(each.split(self._step.config.micro_batch) for each in gradients), strict=True
            )
            for part, its_gradients in zip(
                self._step.micro_batches(inputs), by_micro_batch, strict=True
            ):
                self._carry(self._step.encode_tower(self.tower, part), its_gradients)
        else:
            embeddings, self._with_graph = self._with_graph, None
            assert embeddings is not None, "forward comes before backward"
            self._carry(embeddings, gradients)
        return norms_of(self._parameters)

    def update(self, divisor: Tensor | None, overflowed: Tensor | None) -> None:
        """Update the weights with their gradients divided by something; not where float16's overflowed."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        apply_gradients(self._optimizer, gradients, self.device, divisor, overflowed)

    def _carry(self, embeddings: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        torch.autograd.backward(embeddings, gradients)
        if self._step.rounded:
            self._step.rounded.hand_over_some(self._parameters)
