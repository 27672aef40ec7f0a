"""What every launcher asks: how tensors lie, what the device has, and how one kernel follows another.

**Programmatic dependent launch** (Hopper and later). A decode step is a chain of short kernels, and a kernel that
waits for the one before it to end loses the time of its own start. So ours are launched while their predecessor still
runs, and call :func:`after_previous` before they read what it wrote; what they load before that call overlaps with the
predecessor. ``after_previous`` first waits until the predecessor is complete and visible, and only then lets the
successor start. Two things follow, and kernels rely on them:

- when a kernel runs, everything before its immediate predecessor is complete: it may read that at once;
- nothing may be written before the call: the caching allocator gives a freed buffer to the next kernel.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def row_major(x: Tensor, dims: int) -> Tensor:
    """``x`` itself when its last ``dims`` dims are contiguous, else a contiguous copy."""
    expected = 1
    for size, stride in zip(reversed(x.shape[-dims:]), reversed(x.stride()[-dims:]), strict=True):
        if size != 1 and stride != expected:
            return x.contiguous()
        expected *= size
    return x


def batch_stride(x: Tensor) -> int:
    """Stride of dim 0, or 0 when one entry is shared by the batch."""
    return 0 if x.shape[0] == 1 else x.stride(0)


def require_contiguous(**tensors: Tensor) -> None:
    """State tensors are written in place, so they cannot be copied: say which one is laid out wrongly."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"sals kernels need a contiguous {name}; got strides {tuple(tensor.stride())}")


@lru_cache(maxsize=16)
def capability(device: torch.device) -> int:
    """Compute capability times ten; 0 on AMD; Hopper's for the interpreter, so that it runs what the GPU would."""
    if torch.version.hip is not None:
        return 0
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of ``device``; the H200's for the interpreter, so that it runs what the GPU would."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def stages(wanted: int) -> int:
    """Pipeline stages of a launch: HIP's 64 KiB of shared memory hold two of our tiles."""
    return min(wanted, 2) if torch.version.hip else wanted


def dependent_launch(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that calls :func:`after_previous`, its ``PDL`` flag among them."""
    if device.type == "cuda" and capability(device) >= 90 and os.environ.get("TRITON_INTERPRET") != "1":
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Waits for the kernel before this one; then the next one may start. Nothing without PDL."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
