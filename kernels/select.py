"""Triton kernels of ``sals::select``: the exact top-k of each row of scores, as ascending indices.

Radix selection on the order-preserving integer form of fp32. The first digit (12 bits: sign, exponent, three mantissa bits) is
counted by the score kernel's epilogue, or here by a kernel of its own. Then one launch of several programs per row:

1. each program finds the *threshold bin* (the bin of the k-th largest) from the counts, and compacts the tokens of its tile whose bin
   is at least that one into its own segment, in index order;
2. the last program of a row to arrive reads the segments, a few hundred tokens in all, finds the k-th largest key bit by bit,
   gives ties to the lower index by counting, and writes the indices in order.

Nothing depends on the order of arrival, so the result is deterministic. Rows of any content are exact: when the threshold
bin holds more tokens than fit in registers (constant rows), step 2 reads the segments repeatedly instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .encode import launch_options, next_power_of_2, wait_for_previous
from .score import BIN_SHIFT, BINS, Workspace, bin_of, order_of, score

LEAST = tl.constexpr(-2147483648)
#: Distance of the keys of neighbouring bins.
UNIT = tl.constexpr(1 << BIN_SHIFT.value)


@triton.jit
def _count_kernel(scores, counts, total, TILE: tl.constexpr, PDL: tl.constexpr):
    """Program (tile, row): adds the tile's first digits to the row's counts."""
    wait_for_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ordered = order_of(tl.load(scores + row * total + t, mask=t < total, other=float("-inf")))
    tl.atomic_add(counts + row * BINS + bin_of(ordered), 1, mask=ordered != LEAST, sem="relaxed")


@triton.jit
def _select_kernel(
    scores, counts, counters, keys, sizes, out, total, k,
    TILE: tl.constexpr, TILES_PAD: tl.constexpr, HELD: tl.constexpr, K_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, row). ``keys [rows, tiles, TILE, 2]`` int32 (key, index) and ``sizes [rows, tiles]`` are scratch."""
    wait_for_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    tiles = tl.num_programs(0)
    t = tile * TILE + tl.arange(0, TILE)
    ordered = order_of(tl.load(scores + row * total + t, mask=t < total, other=float("-inf")))
    # -- the threshold bin: the largest whose tokens, with those of the bins above, number k or more (or bin 0)
    above = tl.cumsum(tl.load(counts + row * BINS + tl.arange(0, BINS)), axis=0, reverse=True)
    threshold = tl.maximum(tl.sum((above >= k).to(tl.int32), axis=0) - 1, 0)
    candidate = (bin_of(ordered) >= threshold) & (ordered != LEAST)
    place = tl.cumsum(candidate.to(tl.int32), axis=0) - 1
    segment = keys + (row * tiles + tile) * (2 * TILE)
    tl.store(segment + 2 * place, ordered, mask=candidate)
    tl.store(segment + 2 * place + 1, t, mask=candidate)
    tl.store(sizes + row * tiles + tile, tl.sum(candidate.to(tl.int32), axis=0))
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + row, 1, sem="acq_rel", scope="gpu")
    if arrived == tiles - 1:
        tl.debug_barrier()
        which = tl.arange(0, TILES_PAD)
        size = tl.load(sizes + row * tiles + which, mask=which < tiles, other=0, cache_modifier=".cg")
        ends = tl.cumsum(size, axis=0)
        found = tl.sum(size, axis=0)
        # The k-th largest key has the threshold bin for its first digit; its other bits are found below.
        base = (threshold - BINS // 2) << BIN_SHIFT
        out_row = out + row * k
        if found <= HELD:
            _finish_held(keys, size, ends, found, base, out_row, row, tiles, k, TILE, TILES_PAD, HELD)
        else:
            _finish_streamed(keys, sizes, base, out_row, row, tiles, k, TILE)
        pad = tl.arange(0, K_PAD)
        tl.store(out_row + pad, tl.full((K_PAD,), -1, tl.int32), mask=(pad >= found) & (pad < k))


@triton.jit
def _finish_held(
    keys, size, ends, found, base, out_row, row, tiles, k,
    TILE: tl.constexpr, TILES_PAD: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Choose among at most HELD candidates, all in registers."""
    which = tl.arange(0, TILES_PAD)
    i = tl.arange(0, HELD)
    # Candidate i lies in the segment before which fewer than or exactly i candidates end.
    source = tl.sum((ends[None, :] <= i[:, None]).to(tl.int32), axis=1)
    source = tl.minimum(source, tiles - 1)
    before = tl.sum(tl.where(which[None, :] < source[:, None], size[None, :], 0), axis=1)
    at = keys + ((row * tiles + source) * TILE + i - before) * 2
    key = tl.load(at, mask=i < found, other=LEAST, cache_modifier=".cg")
    index = tl.load(at + 1, mask=i < found, other=-1, cache_modifier=".cg")
    limit = base
    # Two bits a step: three counts, packed in one sum.
    unit = UNIT
    for _ in range(BIN_SHIFT // 2):
        unit = unit // 4
        packed = (key >= limit + unit).to(tl.int64)
        packed += (key >= limit + 2 * unit).to(tl.int64) << 20
        packed += (key >= limit + 3 * unit).to(tl.int64) << 40
        packed = tl.sum(packed, axis=0)
        digits = ((packed & 0xFFFFF) >= k).to(tl.int32)
        digits += (((packed >> 20) & 0xFFFFF) >= k).to(tl.int32)
        digits += ((packed >> 40) >= k).to(tl.int32)
        limit += digits * unit
    equal = (key == limit) & (i < found)
    ties = k - tl.sum(((key > limit) & (i < found)).to(tl.int32), axis=0)
    chosen = ((key > limit) & (i < found)) | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= ties))
    if found <= k:
        chosen = i < found
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(out_row + place, index, mask=chosen)


@triton.jit
def _finish_streamed(keys, sizes, base, out_row, row, tiles, k, TILE: tl.constexpr):
    """Choose among any number of candidates, read again for every bit."""
    limit = base
    unit = UNIT
    for _ in range(BIN_SHIFT):
        unit = unit // 2
        reached = 0
        for s in range(tiles):
            key, index, live = _segment(keys, sizes, row, tiles, s, TILE)
            reached += tl.sum(((key >= limit + unit) & live).to(tl.int32), axis=0)
        if reached >= k:
            limit += unit
    larger = 0
    for s in range(tiles):
        key, index, live = _segment(keys, sizes, row, tiles, s, TILE)
        larger += tl.sum(((key > limit) & live).to(tl.int32), axis=0)
    ties = k - larger
    equals = 0
    written = 0
    for s in range(tiles):
        key, index, live = _segment(keys, sizes, row, tiles, s, TILE)
        equal = (key == limit) & live
        chosen = ((key > limit) & live) | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) + equals <= ties))
        place = written + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(out_row + place, index, mask=chosen & (place < k))
        equals += tl.sum(equal.to(tl.int32), axis=0)
        written += tl.sum(chosen.to(tl.int32), axis=0)


@triton.jit
def _segment(keys, sizes, row, tiles, s, TILE: tl.constexpr):
    i = tl.arange(0, TILE)
    live = i < tl.load(sizes + row * tiles + s, cache_modifier=".cg")
    at = keys + ((row * tiles + s) * TILE + i) * 2
    key = tl.load(at, mask=live, other=LEAST, cache_modifier=".cg")
    index = tl.load(at + 1, mask=live, other=-1, cache_modifier=".cg")
    return key, index, live


def _finish(scores: Tensor, k: int, workspace: Workspace) -> Tensor:
    """Indices from scores whose first digits are counted in ``workspace``."""
    total = scores.shape[-1]
    rows = scores.numel() // total
    device = scores.device
    out = torch.empty((*scores.shape[:-1], k), dtype=torch.int32, device=device)
    tile = 1024 if total <= 16384 else 2048 if total <= 1 << 18 else 4096
    tiles = triton.cdiv(total, tile)
    keys = torch.empty((rows, tiles, tile, 2), dtype=torch.int32, device=device)
    sizes = torch.empty((rows, tiles), dtype=torch.int32, device=device)
    _select_kernel[(tiles, rows)](
        scores, workspace.counts, workspace.counters, keys, sizes, out, total, k,
        TILE=tile, TILES_PAD=max(2, next_power_of_2(tiles)), HELD=max(2048, 2 * next_power_of_2(k)),
        K_PAD=next_power_of_2(k), num_warps=8, **launch_options(scores.device),
    )  # fmt: skip
    return out


def select(scores: Tensor, k: int) -> Tensor:
    """See ``reference.select``."""
    scores = scores.contiguous()
    total = scores.shape[-1]
    rows = scores.numel() // total
    workspace = Workspace.allocate(rows, scores.device, zero=True)
    _count_kernel[(triton.cdiv(total, 1024), rows)](
        scores, workspace.counts, total, TILE=1024, num_warps=4, **launch_options(scores.device)
    )
    return _finish(scores, k, workspace)


def score_select(
    query: Tensor,
    codes: Tensor,
    scales: Tensor,
    decoder: Tensor,
    block_cos: Tensor,
    block_sin: Tensor,
    ring_slots: Tensor,
    slots: Tensor,
    modifier: str,
    tensors: Sequence[Tensor],
    integers: Sequence[int],
    capacity: int,
    score_rank: int,
    sinks: int,
    rotary: str,
    k: int,
    workspace: Workspace | None = None,
) -> Tensor:
    """See ``reference.score_select``. The fold kernel zeroes the workspace and the score kernel counts the first digits."""
    if workspace is None:
        workspace = Workspace.allocate(query.shape[0] * query.shape[1], query.device, zero=False)
    scores = score(
        query, codes, scales, decoder, block_cos, block_sin, ring_slots, slots, modifier, tensors, integers,
        capacity, score_rank, sinks, rotary, workspace,
    )  # fmt: skip
    return _finish(scores, k, workspace)
