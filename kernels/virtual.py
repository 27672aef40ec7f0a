"""``sals::virtual_buffer``: the KV buffer of a cache that has none, known inside traced graphs alone.

It is what ``sals_compile.integrations.transformers.SalsCache`` shows to the model where a static cache shows its
buffer. The rewrite takes every one of them out of the graph; one that is run all the same raises, so that nothing is
ever read from a buffer that does not exist.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.library import Library, register_fake

UNTOUCHABLE = (
    "this KV cache (SalsCache, LatentCache) holds no keys and values that could be read: they exist only as latents, "
    "for the graphs that backend='sals' compiles. Run every forward pass, the prefill too, through the compiled model "
    "(model.forward = torch.compile(model.forward, backend='sals'), or generate(..., compile_config=..., "
    "prefill_chunk_size=...)), or use a static cache (transformers: StaticCache)"
)


def virtual_buffer(handle: Tensor, new: Tensor, batch: int, capacity: int) -> Tensor:
    """The whole KV buffer ``[B, N, capacity, D]`` that ``new [B, N, L, D]`` is about to be written to; ``handle`` says
    of which cache and layer. Raises ``RuntimeError``: it has no value outside of a rewritten graph."""
    if _blank.get():
        return new.new_zeros((batch, new.shape[1], capacity, new.shape[3]))
    raise RuntimeError(UNTOUCHABLE)


_blank: ContextVar[bool] = ContextVar("sals_blank_buffers", default=False)


@contextlib.contextmanager
def blank_buffers() -> Iterator[None]:
    """Virtual buffers read as zeros: for a run whose results nobody looks at (``explain``)."""
    token = _blank.set(True)
    try:
        yield
    finally:
        _blank.reset(token)


def write(handle: Tensor, new: Tensor, slots: Tensor, capacity: int) -> Tensor:
    """The virtual buffer ``[B, N, capacity, D]`` of ``handle``, with ``new [B, N, L, D]`` at ``slots [L]``."""
    buffer = torch.ops.sals.virtual_buffer(handle, new, int(new.shape[0]), capacity)
    return torch.index_copy(buffer, 2, slots, new)


def _fake_virtual_buffer(handle: Tensor, new: Tensor, batch: int, capacity: int) -> Tensor:
    return new.new_empty((batch, new.shape[1], capacity, new.shape[3]))


_library = Library("sals", "FRAGMENT")
_library.define("virtual_buffer(Tensor handle, Tensor new, int batch, int capacity) -> Tensor")
_library.impl("virtual_buffer", virtual_buffer, "CompositeExplicitAutograd")
register_fake("sals::virtual_buffer", _fake_virtual_buffer, lib=_library)

VIRTUAL_BUFFER = torch.ops.sals.virtual_buffer.default
