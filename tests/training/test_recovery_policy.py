"""Which failures are which, and what is changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lapclip.config import TrainConfig
from lapclip.errors import TrainingError
from lapclip.machine.cpu import Cpu
from lapclip.training.recovery import DEVICE, MEMORY, OPERATION, SWAP, SwapGrew, cause_of, decide
from lapclip.tuning.kernels import check_kernels

AcceleratorError = getattr(torch, "AcceleratorError", RuntimeError)

CAUSES: dict[str | None, list[Exception]] = {
    MEMORY: [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"),
        torch.OutOfMemoryError("XPU out of memory. Tried to allocate 9.31 GiB."),
        AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("MPS backend out of memory (MPS allocated: 5.10 GB, other allocations: 384"),
        RuntimeError("Invalid buffer size: 12.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:75] data. DefaultCPUAllocator: not enough memory: you"),
        RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("could not create a primitive"),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
    ],
    OPERATION: [
        NotImplementedError("The operator 'aten::x' is not currently implemented for the MPS device."),
        NotImplementedError("Could not run 'aten::x' with arguments from the 'XPU' backend."),
        RuntimeError("\"grid_sampler\" not implemented for 'Half'"),
        RuntimeError("MPS: Unsupported Border padding mode"),
        TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."),
    ],
    DEVICE: [
        AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
        RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"),
        RuntimeError("MPS backend: command buffer exited with an error"),
    ],
    SWAP: [SwapGrew("swap has grown by 2.0 GB")],
    None: [
        OSError(28, "No space left on device"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)"),
        RuntimeError("clamps and dumps and jumps"),
        ValueError("out of memory"),
        TrainingError("The loss is not a number; this has nothing to do with out of memory."),
        KeyError("cuda error"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_errors_are_told_apart_by_type_and_words(cause: str | None) -> None:
    for error in CAUSES[cause]:
        assert cause_of(error) == cause, error


def test_real_errors_of_this_machine_are_recognised() -> None:
    with pytest.raises(RuntimeError) as no_memory:
        torch.empty(1 << 50)
    assert cause_of(no_memory.value) == MEMORY
    with pytest.raises(MemoryError) as no_array:
        np.empty(1 << 55)
    assert cause_of(no_array.value) == MEMORY
    with pytest.raises(RuntimeError) as no_kernel:
        torch.linalg.cholesky(torch.ones(3, 3, dtype=torch.half))
    assert cause_of(no_kernel.value) == OPERATION
    with pytest.raises(RuntimeError) as wrong:
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert cause_of(wrong.value) is None


def test_the_allocators_own_words_are_shortened_to_what_a_user_can_read() -> None:
    with pytest.raises(RuntimeError) as no_memory:
        torch.empty(1 << 50)
    change = decide(no_memory.value, TrainConfig(batch_size=16, device="cpu"), step=3)
    assert change is not None
    assert "allocat" in change.text
    assert "enforce" not in change.text
    assert "4503599627370496 bytes" in change.text
    assert len(change.text) < 300


def test_what_an_error_arose_from_counts() -> None:
    """Ending the recording of a graph that ran out of memory raises a device error of its own."""

    def record() -> None:
        try:
            torch.empty(1 << 50)
        finally:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )

    with pytest.raises(RuntimeError, match="during capture") as caught:
        record()
    assert cause_of(caught.value) == MEMORY


@pytest.mark.parametrize(("micro", "half"), [(0, 8), (16, 8), (64, 8), (5, 2), (2, 1)])
def test_out_of_memory_halves_what_is_in_memory_at_once(micro: int, half: int) -> None:
    change = decide(
        MemoryError(), TrainConfig(batch_size=16, micro_batch=micro, device="cpu"), step=3
    )
    assert change is not None
    assert change.settings == {"micro_batch": half}
    assert f"becomes {half}" in change.text


def test_nothing_is_left_to_change_for_one_pair_or_on_the_cpu() -> None:
    assert (
        decide(MemoryError(), TrainConfig(batch_size=16, micro_batch=1, device="cuda"), step=3)
        is None
    )
    for error in (
        NotImplementedError("not implemented for 'Half'"),
        RuntimeError("CUDA error: unknown"),
    ):
        assert decide(error, TrainConfig(device="cpu"), step=3) is None


def test_a_device_that_fails_is_left_for_the_cpu_in_float32() -> None:
    train = TrainConfig(
        device="cuda",
        dtype="float16",
        compile="graph",
        image_attention="fused",
        text_attention="fused",
        linear="torch",
    )
    change = decide(
        AcceleratorError("CUDA error: device-side assert triggered\nmore"), train, step=1200
    )
    assert change is not None
    assert change.settings == {"device": "cpu", "dtype": "float32", "compile": "none"}
    assert change.text == (
        "cuda failed at step 1,200 (CUDA error: device-side assert triggered); the CPU takes over"
    )


def test_forms_that_only_the_device_has_are_left_with_it() -> None:
    """A run that goes on on the CPU can be stopped and resumed there, which refuses forms that cannot be had."""
    forms = dict.fromkeys(("image_attention", "text_attention", "linear"), "triton")
    own = TrainConfig(device="cuda", dtype="bfloat16", **forms)
    change = decide(AcceleratorError("CUDA error: unspecified launch failure"), own, step=7)
    assert change is not None
    check_kernels(replace(own, **change.settings), Cpu())
