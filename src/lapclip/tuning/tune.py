"""Find the fastest correct settings for a model and batch on this machine, within a time budget.

Cheapest first: the arithmetic of a step rules out hopeless devices and precisions, kernels are
timed alone, and the rest takes real steps. A setting that is clearly slower stops early. The batch
and the number of updates are the recipe's: another batch would be another experiment.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lapclip.config import AUTO, Config, ModelConfig, TrainConfig
from lapclip.data.batches import Batch
from lapclip.errors import ConfigError, LapclipError, first_line
from lapclip.machine import facts
from lapclip.machine.choose_device import (
    candidates,
    choose_compile,
    default_threads,
    device_of,
    prepare_device,
)
from lapclip.machine.device import Device
from lapclip.machine.other_programs import describe_busy_cores
from lapclip.measure.timing import MIN_SPEEDUP, Clock, Timing
from lapclip.progress import Status
from lapclip.text import counted, short_duration
from lapclip.training.memory import (
    SHARE_OF_MEMORY,
    check_memory,
    largest_micro_batch,
    predict_bytes,
)
from lapclip.training.recovery import MEMORY, cause_of, half_micro_batch
from lapclip.tuning.compiling import time_compiling
from lapclip.tuning.kernels import MAX_SECONDS as KERNEL_SECONDS
from lapclip.tuning.kernels import choose_kernels
from lapclip.tuning.model_size import estimate_step_seconds
from lapclip.tuning.trial import Setting, TrialBench

PRECISIONS = ("float32", "bfloat16", "float16")  # the plainest first
MIN_STEPS = 5
MAX_STEPS = 50
TIMED_SECONDS = 0.5  # of steps, after which a setting has been timed well enough
MIN_TIMED_SECONDS = 0.1  # before which no setting counts as slow: a single short step varies
SLOW_RATIO = 1.25  # a setting this many times as slow as the fastest stops early
HOPELESS_RATIO = 1.5  # a setting is not tried if its products alone take this many whole steps
COMPILING_BUDGET_SECONDS = 300.0  # compiling takes a minute or two
LONG_RUN_SECONDS = 2400.0  # compiling is tried for such a run whatever the budget


class NothingWorks(ConfigError):
    """Raised if no setting could be timed."""


@dataclass(frozen=True)
class Rejection:
    """A setting that was not chosen."""

    choices: Setting
    reason: str
    step_seconds: float | None = None
    """Time of a step, if it was timed."""
    least_seconds: float | None = None
    """Time that the products of a step take, if that was the reason."""


@dataclass(frozen=True)
class Tuning:
    """The setting that was chosen, the reasons, and what was not chosen."""

    setting: Setting
    reasons: dict[str, str]
    """Reason for each field of the setting."""
    step_seconds: float
    pairs_per_second: float
    tried: list[dict[str, Any]]
    """Settings that were timed to the end, with their `step_seconds`."""
    rejected: list[dict[str, Any]]
    seconds: float
    """Time that the tuning took."""
    warnings: list[str] = field(default_factory=list)

    @property
    def is_worth_remembering(self) -> bool:
        """Whether several settings were compared, and no other program disturbed that."""
        compared = len(self.tried)
        for rejection in self.rejected:
            if rejection["step_seconds"] or rejection["least_seconds"]:
                compared += 1
        return compared > 1 and not self.warnings


@dataclass(frozen=True)
class Promise:
    """A device and a precision, with the time that the products of a step take there."""

    device: Device
    dtype: str
    least_seconds: float


class Tuner:
    """One tuning of a model and a batch."""

    def __init__(
        self,
        config: Config,
        batch: Batch,
        budget_seconds: float,
        status: Status = lambda text: None,
        *,
        briefly: bool = False,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Prepare a tuning. `briefly` recalls kernels; `clock` measures the budget."""
        self.model, self.train = config.model, config.train
        self.bench = TrialBench(config, batch)
        self.caption_tokens = batch.tokens_BL.shape[1]
        self.devices = candidates(self.train)
        self.threads = default_threads() if self.train.threads == AUTO else int(self.train.threads)
        self.warnings: list[str] = []
        self._briefly = briefly
        self._status = status
        self._clock, self._budget, self._start = clock, budget_seconds, clock()
        self._step_seconds: dict[Setting, float] = {}
        self._reasons: dict[Setting, dict[str, str]] = {}
        self._rejections: list[Rejection] = []

    def run(self) -> Tuning:
        """Tune. Something is always chosen: the first setting is timed whatever the budget."""
        if warning := describe_busy_cores():
            self.warnings.append(warning)
        for promise in self._rank_promises():
            self._try(promise)
        if not self._step_seconds:
            raise NothingWorks(
                f"{self.model.name} could not be tuned here: {self._rejections[0].reason}.",
                hint="close other programs, or a smaller model: --set model.name=mini",
            )
        setting, reasons = self._choose_precision()
        setting, reasons["threads"] = self._choose_threads(setting)
        setting, reasons["compile"] = self._choose_compiling(setting)
        step_seconds = self._step_seconds[setting]
        return Tuning(
            setting,
            reasons,
            step_seconds,
            pairs_per_second=self.train.batch_size / step_seconds,
            tried=[
                {**asdict(setting), "step_seconds": seconds}
                for setting, seconds in self._step_seconds.items()
            ],
            rejected=[asdict(rejection) for rejection in self._rejections],
            seconds=self._clock() - self._start,
            warnings=self.warnings,
        )

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._budget - (self._clock() - self._start))

    @property
    def _fastest(self) -> Setting:
        return min(self._step_seconds, key=self._step_seconds.__getitem__)

    def _show(self, what: str) -> None:
        if self.seconds_left and not self._briefly:
            what = f"{what}; about {short_duration(self.seconds_left)} left"
        self._status(what)

    def _reject(self, setting: Setting, reason: str, **seconds: float) -> None:
        self._rejections.append(Rejection(setting, f"{setting}: {reason}", **seconds))

    def _reject_for_time(self, setting: Setting) -> None:
        self._reject(setting, f"not tried: {self.seconds_left:.0f} s of the budget are left")

    def _rank_promises(self) -> list[Promise]:
        """Return the devices and precisions that compute here, the most promising first."""
        self._show("products of the model's size")
        promises = []
        for device in self.devices:
            prepare_device(device, self.threads)
            dtypes = PRECISIONS if self.train.dtype == AUTO else [self.train.dtype]
            for dtype in dtypes:
                setting = Setting(device.kind, dtype, self.threads)
                if self.train.dtype == AUTO and (fault := device.unfit(dtype)):
                    self._reject(setting, fault)
                    continue
                try:
                    least_seconds = estimate_step_seconds(
                        self.model, self.train.batch_size, self.caption_tokens, device, dtype
                    )
                except Exception as error:  # a library's own error: this machine cannot compute it
                    self._reject(setting, f"does not compute here ({first_line(error)})")
                    continue
                promises.append(Promise(device, dtype, least_seconds))
        return sorted(promises, key=lambda promise: promise.least_seconds)

    def _try(self, promise: Promise, micro_batch: int | None = None) -> None:
        """Check and time a device and precision, unless it is hopeless or time is short."""
        setting = Setting(promise.device.kind, promise.dtype, self.threads)
        if self._step_seconds:
            fastest_seconds = self._step_seconds[self._fastest]
            if promise.least_seconds > HOPELESS_RATIO * fastest_seconds:
                reason = (
                    f"its products alone take {milliseconds(promise.least_seconds)}, "
                    f"a whole step takes {milliseconds(fastest_seconds)} with {self._fastest}"
                )
                self._reject(setting, reason, least_seconds=promise.least_seconds)
                return
            if self.seconds_left < MIN_STEPS * promise.least_seconds:
                self._reject_for_time(setting)
                return
        try:
            setting, reasons = self._complete(setting, promise.device, micro_batch)
            self._show(f"is it right, {setting}")
            agreement = self.bench.check(setting)
            if fault := agreement.find_fault(setting.dtype):
                self._reject(setting, f"{fault}, compared with float32 on the CPU")
                return
            reasons["dtype"] = (
                f"gradients agree with float32 on the CPU (cosine {agreement.gradient_cosine:.4f})"
            )
            self._reasons[setting] = reasons
            self._time(setting)
        except Exception as error:
            half = half_micro_batch(setting.apply_to(self.train))
            if cause_of(error) == MEMORY and half and not self.train.micro_batch:
                self._try(promise, half)
            else:
                self._reject(setting, f"does not run here ({first_line(error)})")

    def _complete(
        self, setting: Setting, device: Device, micro_batch: int | None
    ) -> tuple[Setting, dict[str, str]]:
        """Add micro-batch, compiling and kernels to a setting. Returns the reasons too."""
        reasons = {}
        if micro_batch is None:
            train = replace(self.train, dtype=setting.dtype)
            micro_batch, reasons["micro_batch"] = find_micro_batch(
                self.model, train, self.caption_tokens, device
            )
        else:
            reasons["micro_batch"] = f"twice as many ran out of memory on {device.kind}"
        compile, _ = choose_compile(self.train.compile, device)
        setting = replace(setting, micro_batch=micro_batch, compile=compile)
        self._show(f"kernels, {setting}")
        prepare_device(device, setting.threads)
        train = replace(
            self.train, device=device.kind, dtype=setting.dtype, micro_batch=micro_batch
        )
        forms, why_forms = choose_kernels(
            self.model,
            train,
            self.caption_tokens,
            device,
            measure_again=not self._briefly,
            max_seconds=min(KERNEL_SECONDS, self.seconds_left / 10),
        )
        for name, reason in why_forms.items():
            reasons[name.removeprefix("train.")] = reason
        # Some forms take more memory than others.
        check_memory(self.model, replace(train, **forms), self.caption_tokens, device)
        return replace(setting, **forms), reasons

    def _time(self, setting: Setting) -> None:
        """Take real steps until they are enough, or the setting is clearly slower."""
        self._show(f"steps, {setting}")
        limit = float("inf")
        if self._step_seconds:
            limit = SLOW_RATIO * self._step_seconds[self._fastest]

        def is_enough(timing: Timing) -> bool:
            steps = len(timing.seconds)
            is_slow = timing.total > MIN_TIMED_SECONDS and min(timing.seconds) > limit
            is_timed = steps >= MIN_STEPS and (timing.total >= TIMED_SECONDS or steps >= MAX_STEPS)
            return is_slow or is_timed or self.seconds_left < timing.total

        trial = self.bench.start(setting)
        trial.warm_up()
        seconds = trial.timer.time_until(trial.step_once, is_enough).median
        if seconds > limit:
            fastest = f"{milliseconds(self._step_seconds[self._fastest])} with {self._fastest}"
            reason = f"{milliseconds(seconds)} a step against {fastest}"
            self._reject(setting, reason, step_seconds=seconds)
        else:
            self._step_seconds[setting] = seconds

    def _choose_precision(self) -> tuple[Setting, dict[str, str]]:
        """Choose the fastest device and precision. Among equals, the plainest precision wins."""
        limit = MIN_SPEEDUP * self._step_seconds[self._fastest]
        equals = [setting for setting, seconds in self._step_seconds.items() if seconds < limit]
        chosen = min(
            equals,
            key=lambda setting: (PRECISIONS.index(setting.dtype), self._step_seconds[setting]),
        )
        reasons = dict(self._reasons[chosen])
        agreement = reasons["dtype"]
        reasons["device"] = self._explain_device(chosen)
        reasons["dtype"] = "asked for"
        if self.train.dtype == AUTO:
            rivals = {
                setting.dtype: seconds
                for setting, seconds in self._list_timed()
                if setting.device == chosen.device
            }
            comparison = self._compare(chosen, chosen.dtype, rivals)
            reasons["dtype"] = f"{comparison}; {agreement}"
        return chosen, reasons

    def _explain_device(self, chosen: Setting) -> str:
        if self.train.device == chosen.device:
            return "asked for"
        if len(self.devices) == 1:
            return "no GPU found" if device_of(chosen.device).is_cpu else "the only device here"
        rivals: dict[str, float] = {}
        for setting, seconds in self._list_timed():
            rivals[setting.device] = min(seconds, rivals.get(setting.device, seconds))
        return self._compare(chosen, chosen.device, rivals)

    def _choose_threads(self, chosen: Setting) -> tuple[Setting, str]:
        """Try other numbers of CPU threads than torch's own. An accelerator is fed by one."""
        if self.train.threads != AUTO:
            return chosen, "asked for"
        if not device_of(chosen.device).is_cpu:
            return chosen, "torch's own choice; the accelerator does the work"
        best = chosen
        counts = {facts.logical_cores(), max(1, chosen.threads // 2)} - {chosen.threads}
        for threads in sorted(counts, reverse=True):
            setting = replace(chosen, threads=threads)
            if self.seconds_left < 3 * self._step_seconds[chosen]:
                self._reject_for_time(setting)
                continue
            try:
                self._time(setting)
            except Exception as error:
                self._reject(setting, f"does not run here ({first_line(error)})")
            seconds = self._step_seconds.get(setting, float("inf"))
            if seconds * MIN_SPEEDUP < self._step_seconds[best]:
                best = setting
        rivals = {
            counted(setting.threads, "thread"): seconds
            for setting, seconds in self._list_timed()
            if replace(setting, threads=chosen.threads) == chosen
        }
        return best, self._compare(best, counted(best.threads, "thread"), rivals)

    def _choose_compiling(self, chosen: Setting) -> tuple[Setting, str]:
        """Compile only if that was measured, and the run is long enough to pay it back."""
        device, seconds = device_of(chosen.device), self._step_seconds[chosen]
        if self.train.compile != AUTO:
            return chosen, choose_compile(self.train.compile, device)[1]
        steps = planned_steps(self.train, seconds)
        # Beside other programs any run looks long.
        is_worth_trying = is_long(steps, seconds) and not self.warnings
        if not is_worth_trying and (self._briefly or self._budget < COMPILING_BUDGET_SECONDS):
            return chosen, f"{chosen.compile}; lapclip tune --seconds 300 tries compiling"
        compiling = time_compiling(self.bench, chosen, device, seconds, self._status)
        if compiling.pays(steps):
            chosen = replace(chosen, compile=compiling.compile)
            self._step_seconds[chosen] = compiling.seconds_after
        return chosen, compiling.describe(steps)

    def _list_timed(self) -> list[tuple[Setting, float]]:
        """Return every setting with the seconds of a step, those that stopped early included."""
        timed = list(self._step_seconds.items())
        for rejection in self._rejections:
            if rejection.step_seconds is not None:
                timed.append((rejection.choices, rejection.step_seconds))
        return timed

    def _compare(self, chosen: Setting, own_name: str, rivals: dict[str, float]) -> str:
        """Compare a setting with the best rival of another name."""
        seconds = self._step_seconds[chosen]
        others = {name: rival for name, rival in rivals.items() if name != own_name}
        if not others:
            return f"{milliseconds(seconds)} a step; nothing else was timed"
        name = min(others, key=others.__getitem__)
        times = f"{milliseconds(seconds)} a step against {milliseconds(others[name])}"
        return f"{others[name] / seconds:.2f}x {name} here ({times})"


def planned_steps(train: TrainConfig, step_seconds: float) -> int:
    """Return the updates of a run. Minutes become steps once a step has been timed."""
    return train.steps or int(60 * train.minutes / step_seconds)


def is_long(steps: int, step_seconds: float) -> bool:
    """Return whether a run is so long that it is worth the time to try compiling."""
    return steps * step_seconds >= LONG_RUN_SECONDS


def find_micro_batch(
    model: ModelConfig, train: TrainConfig, caption_tokens: int, device: Device
) -> tuple[int, str]:
    """Return the largest micro-batch that is predicted to fit, and why.

    0 is the whole batch: micro-batches cost a second pass.
    """
    if train.micro_batch:
        check_memory(model, train, caption_tokens, device)
        return train.micro_batch, "asked for"
    free = device.free_bytes()
    pairs = largest_micro_batch(
        model, train, caption_tokens, device, free=round(SHARE_OF_MEMORY * free)
    )
    trial = replace(train, device=device.kind, micro_batch=pairs or 1)
    needed = predict_bytes(model, trial, caption_tokens).total
    memory = f"predicted {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB free"
    if pairs is None:
        raise LapclipError(f"too large for memory: {memory}, one pair at a time")
    if pairs == train.batch_size:
        return 0, f"the whole batch fits: {memory}"
    return pairs, f"a part of the batch fits: {memory}"


def describe_tuning(tuning: Tuning, loader_threads: int, loader_reason: str) -> dict[str, Any]:
    """Return a tuning as `lapclip tune --json` prints it. `attention` is that of both towers."""
    result = asdict(tuning)
    choices, reasons = result.pop("setting"), result["reasons"]
    image, text = choices["image_attention"], choices["text_attention"]
    choices["attention"] = image if image == text else f"image {image}, text {text}"
    reasons["attention"] = (
        f"image {image}: {reasons['image_attention']}; text {text}: {reasons['text_attention']}"
    )
    choices["loader_threads"], reasons["loader_threads"] = loader_threads, loader_reason
    return {"choices": choices, **result}


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
