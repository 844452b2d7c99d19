"""The fastest correct settings for a model and batch on this machine, found within a budget of seconds.

In stages, cheapest first: what products of the model's size cost rules out the hopeless; kernels are chosen by timing
them alone; the rest races with real steps, and whoever is clearly behind stops after one. The effective batch and the
number of updates are the recipe's: a larger batch chosen for speed would be another experiment.
"""

from __future__ import annotations

import statistics
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
    prepare_device,
)
from lapclip.machine.device import DTYPES, Device
from lapclip.machine.other_programs import describe_busy_cores
from lapclip.measure.timing import MIN_SPEEDUP, Clock
from lapclip.progress import Status
from lapclip.text import short_duration
from lapclip.training.fallback import MEMORY, cause_of, smaller
from lapclip.training.memory import SHARE_OF_MEMORY, check_memory, predict_bytes
from lapclip.tuning.choose_kernels import SECONDS as KERNEL_SECONDS
from lapclip.tuning.choose_kernels import choose_kernels
from lapclip.tuning.compiling import predict_compiling, time_compiling
from lapclip.tuning.flops import least_seconds
from lapclip.tuning.measure import Setting, Workshop

ROUNDS = 5
HOPELESS = 1.25
"""A setting whose step takes this many times the best one's stops at once."""
ENOUGH = 0.5
"""Seconds of steps after which a setting has been timed well enough."""
MOMENT = 0.1
"""Seconds of steps without which nothing is called hopeless: a single step of a millisecond says little."""
CERTAIN = 1.5
"""A setting whose products alone are measured to take this many times the best one's whole step is not tried."""
TIME_TO_COMPILE = 300.0
"""Compiling takes a minute or two, so it is measured only with a budget of this many seconds, else predicted."""
LONG_RUN = 2400.0
"""Seconds of a run from which on it is measured whatever the budget: that takes a twentieth of them at most."""


@dataclass(frozen=True)
class Tuning:
    """What was chosen, why, and what was not."""

    setting: Setting
    reasons: dict[str, str]
    """One line for each field of the setting."""
    seconds_a_step: float
    pairs_per_second: float
    rejected: list[dict[str, Any]]
    tried: list[dict[str, Any]]
    seconds: float
    """What the tuning took."""
    warnings: list[str] = field(default_factory=list)

    @property
    def worth_remembering(self) -> bool:
        """Whether something was compared with something, and nothing disturbed it."""
        timed = len(self.tried) + sum(1 for entry in self.rejected if entry["ms"] or entry["bound"])
        return timed > 1 and not self.warnings


class NothingWorks(ConfigError):
    """No setting could be tried to its end."""


class Search:
    """One tuning: a model, a batch, and seconds to spend."""

    def __init__(
        self,
        config: Config,
        batch: Batch,
        seconds: float,
        status: Status = lambda text: None,
        *,
        briefly: bool = False,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Set up a search. `briefly` leaves out what would not change the choice; `clock` measures the budget."""
        self._briefly = briefly
        self.model, self.train, self._status = config.model, config.train, status
        self.workshop = Workshop(config, batch)
        self.caption_tokens = batch.tokens_BL.shape[1]
        self.devices = candidates(self.train)
        self.threads = default_threads() if self.train.threads == AUTO else int(self.train.threads)
        self._clock, self._budget = clock, seconds
        self._began = clock()
        self.times: dict[Setting, float] = {}
        self.rejected: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self._reasons: dict[Setting, dict[str, str]] = {}

    def run(self) -> Tuning:
        """All stages. Something is always chosen: the first setting is timed whatever the budget."""
        self.warnings = [warning] if (warning := describe_busy_cores()) else []
        for device, dtype, least in self._by_promise():
            self._enter(device, dtype, least)
        if not self.times:
            raise NothingWorks(
                f"{self.model.name} could not be tuned here: {self.rejected[0]['reason']}.",
                hint="close other programs, or a smaller model: --set model.name=mini",
            )
        chosen, reasons = self._choose_precision()
        chosen, reasons["threads"] = self._choose_threads(chosen)
        chosen, reasons["compile"] = self._choose_compiling(chosen)
        return Tuning(
            setting=chosen,
            reasons=reasons,
            seconds_a_step=self.times[chosen],
            pairs_per_second=self.train.batch_size / self.times[chosen],
            rejected=self.rejected,
            tried=[
                {**asdict(setting), "ms": seconds * 1e3} for setting, seconds in self.times.items()
            ],
            seconds=self._clock() - self._began,
            warnings=self.warnings,
        )

    def status(self, what: str) -> None:
        """Say what is being tried, and how much of the budget is left."""
        left = (
            f"; about {short_duration(self.left)} left"
            if self.left > 0 and not self._briefly
            else ""
        )
        self._status(f"{what}{left}")

    @property
    def left(self) -> float:
        """Seconds of the budget that remain."""
        return self._budget - (self._clock() - self._began)

    @property
    def _fastest(self) -> Setting:
        return min(self.times, key=self.times.__getitem__)

    def _by_promise(self) -> list[tuple[Device, str, float]]:
        """Devices and precisions with the seconds that a step's products take at least, most promising first."""
        self.status("products of the model's size")
        found = []
        sizes = (self.model, self.train.batch_size, self.caption_tokens)
        for device in self.devices:
            prepare_device(device, self.threads)
            for dtype in DTYPES if self.train.dtype == AUTO else [self.train.dtype]:
                if self.train.dtype == AUTO and (fault := device.unfit(dtype)):
                    self._reject(Setting(device.kind, dtype), fault)
                    continue
                try:
                    found.append((device, dtype, least_seconds(*sizes, device, DTYPES[dtype])))
                except Exception as error:  # a library's own error: this machine cannot do it
                    self._reject(
                        Setting(device.kind, dtype), f"does not compute here ({first_line(error)})"
                    )
        return sorted(found, key=lambda entry: entry[2])

    def _enter(
        self,
        device: Device,
        dtype: str,
        least: float,
        micro_batch: int | None = None,
    ) -> None:
        """Let a device and precision race, if it has a chance, fits into memory and computes the right thing."""
        setting = Setting(device.kind, dtype, self.threads)
        if self.times and least > CERTAIN * self.times[self._fastest]:
            rival = (
                f"a whole step takes {_ms(self.times[self._fastest])} with {self._fastest.text()}"
            )
            return self._reject(
                setting, f"its products alone take {_ms(least)}, {rival}", bound=least
            )
        if self.times and self.left < 5 * least:
            return self._reject(
                setting, f"not tried: {max(0.0, self.left):.0f} s of the budget are left"
            )
        try:
            micro_batch, why_micro_batch = (
                fitting_micro_batch(
                    self.model, replace(self.train, dtype=dtype), self.caption_tokens, device
                )
                if micro_batch is None
                else (micro_batch, f"twice as many ran out of memory on {device.kind}")
            )
            how, _ = choose_compile(self.train.compile, device)
            setting = replace(setting, micro_batch=micro_batch, compile=how)
            self.status(f"kernels, {setting.text()}")
            prepare_device(device, setting.threads)
            asked = replace(self.train, dtype=dtype, micro_batch=micro_batch)
            forms, why_forms = choose_kernels(
                self.model,
                asked,
                self.caption_tokens,
                device,
                anew=not self._briefly,
                remember=lambda: not self.warnings,
                seconds=max(0.0, min(KERNEL_SECONDS, self.left / 10)),
            )
            # Some forms take more memory than others.
            asked = replace(asked, **forms, micro_batch=self.train.micro_batch or micro_batch)
            check_memory(self.model, asked, self.caption_tokens, device)
            setting = replace(setting, **forms)
            self.status(f"is it right, {setting.text()}")
            agreement = self.workshop.agreement(setting)
        except Exception as error:
            return self._failed(error, setting, device, least)
        if fault := agreement.fault(dtype):
            return self._reject(setting, f"{fault}, compared with float32 on the CPU")
        self._reasons[setting] = {
            "micro_batch": why_micro_batch,
            "agreement": f"gradients agree with float32 on the CPU (cosine {agreement.gradients:.4f})",
            **{name.removeprefix("train."): text for name, text in why_forms.items()},
        }
        try:
            return self._race(setting)
        except Exception as error:
            return self._failed(error, setting, device, least)

    def _failed(self, error: Exception, setting: Setting, device: Device, least: float) -> None:
        """Out of memory is tried again with half of the pairs at once, as in training; other failures are final."""
        half = smaller(setting.applied(self.train))
        if cause_of(error) == MEMORY and half and not self.train.micro_batch:
            return self._enter(device, setting.dtype, least, half)
        return self._reject(setting, f"does not run here ({first_line(error)})")

    def _race(self, setting: Setting) -> None:
        """Real steps, until there are enough or the setting is clearly behind."""
        self.status(f"steps, {setting.text()}")
        rival = self._fastest if self.times else None
        limit = HOPELESS * self.times[rival] if rival else float("inf")
        times: list[float] = []
        contender = self.workshop.contender(setting)
        contender.warm_up()
        while len(times) < ROUNDS or (sum(times) < ENOUGH and len(times) < 50):
            times.append(contender.take())
            if (sum(times) > MOMENT and min(times) > limit) or self.left < sum(times):
                break
        seconds = statistics.median(times)
        if rival and seconds > limit:
            reason = f"{_ms(seconds)} a step against {_ms(self.times[rival])} with {rival.text()}"
            return self._reject(setting, reason, seconds)
        self.times[setting] = seconds
        return None

    def _choose_precision(self) -> tuple[Setting, dict[str, str]]:
        """The fastest device and precision; of those as fast as each other the plainest: float32, then bfloat16."""
        near = [
            setting
            for setting in self.times
            if self.times[setting] < MIN_SPEEDUP * self.times[self._fastest]
        ]
        chosen = min(
            near, key=lambda setting: (list(DTYPES).index(setting.dtype), self.times[setting])
        )
        reasons = dict(self._reasons[chosen])
        reasons["device"] = self._why_device(chosen)
        agreement = reasons.pop("agreement")
        rivals = {
            dtype: seconds
            for setting, dtype, seconds in self._known()
            if setting.device == chosen.device
        }
        reasons["dtype"] = (
            "asked for"
            if self.train.dtype != AUTO
            else f"{self._against(chosen, rivals, 'dtype')}; {agreement}"
        )
        return chosen, reasons

    def _why_device(self, chosen: Setting) -> str:
        if self.train.device == chosen.device:
            return "asked for"
        if len(self.devices) == 1:
            return only_device(chosen.device)
        rivals: dict[str, float] = {}
        for setting, _, seconds in self._known():
            rivals[setting.device] = min(seconds, rivals.get(setting.device, seconds))
        return self._against(chosen, rivals, "device")

    def _choose_threads(self, chosen: Setting) -> tuple[Setting, str]:
        """Other numbers of CPU threads than torch's own. An accelerator is fed by one."""
        if self.train.threads != AUTO:
            return chosen, "asked for"
        if not chosen.where.is_cpu:
            return chosen, "torch's own choice; the accelerator does the work"
        rivals: dict[str, float] = {}
        best = chosen
        for threads in sorted(
            {facts.logical_cores(), max(1, chosen.threads // 2)} - {chosen.threads}, reverse=True
        ):
            other = replace(chosen, threads=threads)
            if self.left < 3 * self.times[chosen]:
                self._reject(
                    other, f"not tried: {max(0.0, self.left):.0f} s of the budget are left"
                )
                continue
            try:
                self._race(other)
            except Exception as error:
                self._reject(other, f"does not run here ({first_line(error)})")
            rivals |= {
                _threads(threads): seconds
                for setting, _, seconds in self._known()
                if setting == other
            }
            if self.times.get(other, float("inf")) * MIN_SPEEDUP < self.times[best]:
                best = other
        rivals[_threads(chosen.threads)] = self.times[chosen]
        return best, self._against(best, rivals, "threads")

    def _choose_compiling(self, chosen: Setting) -> tuple[Setting, str]:
        """Compile only where that was measured and the run is long enough to pay it back."""
        device, before = chosen.where, self.times[chosen]
        if self.train.compile != AUTO:
            return chosen, choose_compile(self.train.compile, device)[1]
        steps = planned_steps(self.train, before)
        long = is_long(steps, before) and not self.warnings  # other programs make any run look long
        if self._briefly and not long:
            return chosen, f"{chosen.compile}; lapclip tune --seconds 300 tries compiling"
        if long or self._budget >= TIME_TO_COMPILE:
            compiling = time_compiling(self.workshop, chosen, device, before, self._status)
        else:
            self.status("does compiling pay")
            compiling = predict_compiling(self.workshop, chosen, device, before, self.left)
        if compiling.pays(steps):
            chosen = replace(chosen, compile=compiling.compile)
            self.times[chosen] = compiling.after
        return chosen, compiling.text(steps)

    def _known(self) -> list[tuple[Setting, str, float]]:
        """Every setting that was timed, also those that stopped early."""
        timed = [(setting, setting.dtype, seconds) for setting, seconds in self.times.items()]
        for entry in self.rejected:
            if entry["ms"] is not None:
                setting = Setting(**entry["choices"])
                timed.append((setting, setting.dtype, entry["ms"] / 1e3))
        return timed

    def _against(self, chosen: Setting, rivals: dict[str, float], field: str) -> str:
        """How much faster than the best of the others, or than what the others cannot be faster than."""
        own = _threads(chosen.threads) if field == "threads" else getattr(chosen, field)
        seconds = self.times[chosen]
        others = {name: time for name, time in rivals.items() if name != own}
        if others:
            name = min(others, key=others.__getitem__)
            return f"{others[name] / seconds:.2f}x {name} here ({_ms(seconds)} a step against {_ms(others[name])})"
        bounded = [
            entry for entry in self.rejected if entry["bound"] and entry["choices"][field] != own
        ]
        if field == "threads" or not bounded:
            return f"{_ms(seconds)} a step; nothing else was timed"
        least = min(bounded, key=lambda entry: entry["bound"])
        name = f"{least['choices']['device']} {least['choices']['dtype']}"
        return f"{_ms(seconds)} a step; the products of {name} alone take {_ms(least['bound'])}"

    def _reject(
        self,
        setting: Setting,
        reason: str,
        seconds: float | None = None,
        bound: float | None = None,
    ) -> None:
        """Write down what was not chosen, with the seconds it took or must take at least, where they are known."""
        ms = None if seconds is None else seconds * 1e3
        text = f"{setting.text()}: {reason}"
        self.rejected.append({"choices": asdict(setting), "reason": text, "ms": ms, "bound": bound})


def only_device(kind: str) -> str:
    """Return the reason for a device that has no rival."""
    return "no GPU found" if kind == "cpu" else f"the only device here is {kind}"


def planned_steps(train: TrainConfig, seconds_a_step: float) -> int:
    """How many updates a run has; minutes become steps only once a step has been timed."""
    return train.steps or int(60 * train.minutes / seconds_a_step)


def is_long(steps: int, seconds_a_step: float) -> bool:
    """Whether a run is so long that it is worth the time to try compiling."""
    return steps * seconds_a_step >= LONG_RUN


def fitting_micro_batch(
    model: ModelConfig, train: TrainConfig, caption_tokens: int, device: Device
) -> tuple[int, str]:
    """The largest that is predicted to fit; 0, the whole batch, where that fits: micro-batches cost a second pass."""
    if train.micro_batch:
        check_memory(model, train, caption_tokens, device)
        return train.micro_batch, "asked for"
    free, size = device.free_bytes(), train.batch_size
    while True:
        micro_batch = 0 if size == train.batch_size else size
        tried = replace(train, micro_batch=micro_batch, device=device.kind)
        needed = predict_bytes(model, tried, caption_tokens).total
        memory = f"predicted {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB free"
        if needed <= SHARE_OF_MEMORY * free:
            return (
                micro_batch,
                f"{'a part of the batch' if micro_batch else 'the whole batch'} fits: {memory}",
            )
        if size == 1:
            raise LapclipError(f"too large for memory: {memory}, one pair at a time")
        size = (size + 1) // 2


def describe(tuning: Tuning, loader_threads: int, why_loader_threads: str) -> dict[str, Any]:
    """A tuning as `lapclip tune --json` prints it; `attention` sums up that of both towers."""
    choices, reasons = asdict(tuning.setting), dict(tuning.reasons)
    image, text = choices["image_attention"], choices["text_attention"]
    choices["attention"] = image if image == text else f"image {image}, text {text}"
    reasons["attention"] = (
        f"image {image}: {reasons['image_attention']}; text {text}: {reasons['text_attention']}"
    )
    choices["loader_threads"], reasons["loader_threads"] = loader_threads, why_loader_threads
    rest = {
        name: value for name, value in asdict(tuning).items() if name not in ("setting", "reasons")
    }
    return {"choices": choices, "reasons": reasons, **rest}


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count != 1)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
