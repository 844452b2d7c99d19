"""The canary, run on the CPU: it sings there, and falls silent when a kernel is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lapclip.errors import ConfigError
from lapclip.machine import canary
from lapclip.machine.adamw import AdamW
from lapclip.machine.canary import ATTENTIONS, Result
from lapclip.machine.choose_device import choose_device, trusts_is_causal
from lapclip.machine.cpu import Cpu
from lapclip.machine.device import ESSENTIAL, EXAMINED, UNTRUSTED
from lapclip.machine.gpus import Cuda, Mps
from lapclip.training.image_views import view_images

from ..small_runs import events, train_small
from ..training.test_step import batch_of, step_of

CPU = torch.device("cpu")
REAL_ATTENTION = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def forgetful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of its own, and nothing remembered in the process."""
    monkeypatch.setenv("LAPCLIP_CACHE", str(tmp_path))
    known = set(UNTRUSTED)
    yield
    EXAMINED.clear()
    UNTRUSTED.clear()
    UNTRUSTED.update(known)


def examine_all() -> list[Result]:
    return [result for precision in canary.PRECISIONS for result in canary.examine(CPU, precision)]


def failed(results: list[Result]) -> set[str]:
    return {result.operation for result in results if not result.ok}


def test_the_cpu_computes_what_the_formulas_say() -> None:
    results = examine_all()
    assert failed(results) == set(), [result.sentence() for result in results if not result.ok]
    operations = {result.operation for result in results}
    assert operations >= {*ATTENTIONS, *ESSENTIAL, "fused adamw", "crops", "interpolate"}
    assert {result.precision for result in results} == {"float32", "bfloat16", "float16"}
    assert len({result.name for result in results}) == len(results)
    # Rounding alone stays below half the tolerance, so that a sound device never fails by chance.
    assert all(
        result.error is not None and result.error < result.tolerance / 2 for result in results
    )


def leaks(query, key, value, attn_mask=None, is_causal=False, **options):
    """`is_causal` that is ignored in half precision, as in pytorch issue 195910."""
    return REAL_ATTENTION(
        query,
        key,
        value,
        attn_mask=attn_mask,
        is_causal=is_causal and query.dtype == torch.float32,
        **options,
    )


def misreads_strides(query, key, value, **options):
    """Inputs read as if they were contiguous, as in pytorch issues 163597 and 181133."""
    query, key, value = (
        part if part.is_contiguous() else part.transpose(1, 2).reshape(part.shape)
        for part in (query, key, value)
    )
    return REAL_ATTENTION(query, key, value, **options)


def forgets_the_mask(query, key, value, attn_mask=None, **options):
    return REAL_ATTENTION(query, key, value, **options)


def wrong_backward(query, key, value, **options):
    """Right without gradients, wrong with them: training and inference take different kernels."""
    return REAL_ATTENTION(query, key.detach(), value, **options)


@pytest.mark.parametrize(
    ("kernel", "silent"),
    [
        (leaks, {"causal attention"}),
        (misreads_strides, {"permuted attention"}),
        (forgets_the_mask, {"masked attention", "attention of one query"}),
        (wrong_backward, set(ATTENTIONS)),
    ],
    ids=lambda part: part.__name__ if callable(part) else "",
)
def test_a_wrong_attention_kernel_is_found(
    kernel, silent: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    results = examine_all()
    assert failed(results) == silent
    if kernel is wrong_backward:
        assert all(
            ("gradients" in result.name) == (not result.ok)
            for result in results
            if result.operation in silent
        )
    if kernel is leaks:
        assert {result.precision for result in results if not result.ok} == {"bfloat16", "float16"}


def test_an_optimiser_that_ignores_overflows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = AdamW.step

    def step(self, *arguments):
        self.found_inf = None if getattr(self, "found_inf", None) is None else torch.zeros(())
        return real(self, *arguments)

    monkeypatch.setattr(AdamW, "step", step)
    assert failed(examine_all()) == {"fused adamw with an overflow"}


def test_what_does_not_run_fails_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_, **__):
        raise NotImplementedError("gelu is not implemented here\nmore words")

    monkeypatch.setattr(F, "gelu", missing)
    silent = [result for result in examine_all() if not result.ok]
    assert {result.operation for result in silent} == {"gelu"}
    assert silent[0].error is None
    assert "does not run (gelu is not implemented here)" in silent[0].sentence()


def test_results_are_remembered_for_this_torch_and_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(
        canary,
        "examine",
        lambda device, *_: made.append(device) or [Result("gelu, float32", True, 0.0, 1e-4)],
    )
    first = canary.consult(CPU, "a chip", "float32")
    assert canary.consult(CPU, "a chip", "float32") == first
    assert len(made) == 1
    (key,) = json.loads((tmp_path / "canary.json").read_text())
    assert torch.__version__ in key
    canary.consult(CPU, "another chip", "float32")
    canary.consult(CPU, "a chip", "bfloat16")
    monkeypatch.setattr(torch, "__version__", "9.9")
    canary.consult(CPU, "a chip", "float32")
    assert len(made) == 4
    assert len(json.loads((tmp_path / "canary.json").read_text())) == 4


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_cache_is_ignored_with_a_warning(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "canary.json").write_text(text)
    monkeypatch.setattr(canary, "examine", lambda *_: [Result("gelu, float32", True, 0.0, 1e-4)])
    assert canary.consult(CPU, "a chip", "float32")[0].ok
    assert "canary.json is damaged" in capsys.readouterr().err
    assert canary.consult(CPU, "a chip", "float32")[0].ok
    assert capsys.readouterr().err == ""  # it is whole again


@pytest.mark.parametrize("page", [[{"nonsense": 1}], 3, "no"])
def test_a_page_that_says_something_else_is_written_anew(
    page: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "examine", lambda *_: [Result("gelu, float32", True, 0.0, 1e-4)])
    canary.consult(CPU, "a chip", "float32")
    (key,) = json.loads((tmp_path / "canary.json").read_text())
    (tmp_path / "canary.json").write_text(json.dumps({key: page}))
    assert canary.consult(CPU, "a chip", "float32")[0].ok
    assert json.loads((tmp_path / "canary.json").read_text())[key][0]["name"] == "gelu, float32"


def with_results(monkeypatch: pytest.MonkeyPatch, *results: Result) -> None:
    """A machine whose torch finds an accelerator of which the canary says this."""
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=True: torch.device("mps")
    )
    monkeypatch.setattr(
        canary,
        "examine",
        lambda device, precision, run: [r for r in results if r.precision == precision],
    )


def result(name: str, *, ok: bool) -> Result:
    return Result(name, ok, 0.0 if ok else 0.5, 1e-4)


@pytest.mark.parametrize("operation", ["attention", "layer norm"])
def test_auto_takes_the_cpu_where_the_accelerator_is_wrong(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_results(monkeypatch, result(f"{operation}, float32", ok=False))
    device, reason = choose_device("auto")
    assert device.is_cpu
    assert (
        reason
        == f"mps computes wrongly here: {operation}, float32: off by 5.0e-01, tolerance 1e-04"
    )
    device, reason = choose_device("mps")
    assert device.kind == "mps"
    assert "asked for, although" in reason


def test_auto_takes_an_accelerator_that_fails_only_what_can_be_avoided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_results(
        monkeypatch,
        result("attention, float32", ok=True),
        result("layer norm, float16", ok=False),
        result("fused adamw, float32", ok=True),
        result("fused adamw with an overflow, float32", ok=False),
    )
    device, _ = choose_device("auto")
    assert device.kind == "mps"
    assert not device.fused_adamw
    assert device.unfit("float32") is None
    assert "layer norm, float16" in (device.unfit("float16") or "")
    assert len(device.warnings()) == 2


def test_the_fused_optimiser_is_used_on_mps_only_where_the_canary_has_seen_it_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not Mps().fused_adamw
    assert Cpu().fused_adamw
    assert Cuda().fused_adamw
    overflow = result("fused adamw with an overflow, float32", ok=True)
    with_results(monkeypatch, result("fused adamw, float32", ok=True), overflow)
    assert choose_device("auto")[0].fused_adamw


def test_attention_on_mps_is_guarded_whatever_the_canary_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_results(monkeypatch, *(result(f"{name}, float16", ok=True) for name in ATTENTIONS))
    choose_device("auto")
    assert not trusts_is_causal(torch.device("mps"))
    assert trusts_is_causal(CPU)


def test_a_run_tells_what_failed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        EXAMINED, "cpu", {"float16": [result("causal attention, float16", ok=False)]}
    )
    train_small("train.steps=1")
    (started,) = events("started")
    assert started["notes"] == [
        "cpu fails a check, so this is avoided where it can be: "
        "causal attention, float16: off by 5.0e-01, tolerance 1e-04"
    ]
    assert "causal attention, float16" in Path("runs/run/log.txt").read_text()


def test_crops_are_cut_on_the_cpu_where_the_device_would_get_them_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, batch = step_of(crop=0.5), batch_of()
    seen = step.inputs(batch, 1), step.config, step.model.shape, step.device
    right = view_images(*seen)
    assert right is not None
    UNTRUSTED.add(("cpu", "crops"))
    moved: list[bool] = []
    real = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: moved.append(True) or real(tensor))
    again = view_images(*seen)
    assert again is not None
    assert torch.equal(again, right)
    assert moved


def test_a_device_that_is_not_there_is_still_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_results(monkeypatch)
    with pytest.raises(ConfigError, match="cuda is not here"):
        choose_device("cuda")
