"""Triton kernel of ``sals::select``: the exact top-k of each row of scores, as ascending indices.

The k-th largest *maximum* of disjoint groups of tokens is a lower bound on the k-th largest score: k groups reach it,
each with a token. With several times as many groups as wanted tokens, hardly more tokens than wanted reach it. So:

1. the maxima of groups of a few tokens are left by the score kernel's epilogue (or found here by a kernel of their
   own);
2. every program of a row, which has a chunk of its tokens, bounds the k-th score by the leading 16 bits of the k-th
   maximum, found two bits at a time by counting, and compacts the tokens of its chunk that reach the bound;
3. the last program of the row to arrive finds the k-th largest key among them (a few hundred), gives ties to the lower
   index by counting, and writes the indices.

Compaction keeps the order of indices, so nothing is sorted, and which program is the last changes nothing: the result
is deterministic. Any row is exact: where more tokens reach the bound than registers hold (constant rows), the row is
streamed once for every two bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .encode import Jobs
from .launch import after_previous, dependent_launch, next_power_of_2
from .score import order_of, score

LEAST = tl.constexpr(-2147483648)

#: Tokens of a program, its warps, and limits of what registers hold: maxima of a row, and tokens that reach the bound.
CHUNK, SELECT_WARPS, MOST_GROUPS, MOST_HELD = 4096, 8, 8192, 4096


@triton.jit
def _maxima_kernel(scores, maxima, arrived, total, groups, TILE: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr):
    """Program (tile, row): the largest key of each group of the tile."""
    after_previous(PDL)
    if tl.program_id(0) == 0:
        tl.store(arrived + tl.program_id(1), 0)
    row = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    keys = order_of(tl.load(scores + row * total + t, mask=t < total, other=float("-inf")))
    g = tl.program_id(0) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    tl.store(maxima + row * groups + g, tl.max(tl.reshape(keys, (TILE // GROUP, GROUP)), axis=1), mask=g < groups)


@triton.jit
def _select_kernel(
    scores, maxima, pairs, counts, arrived, out, total, groups, k,
    GROUPS_PAD: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
    HELD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (chunk, row). ``pairs [rows, CHUNKS, 2, HELD]``, ``counts [rows, CHUNKS]``, ``arrived [rows]``: int32.

    ``arrived`` is zero before the launch.
    """
    after_previous(PDL)
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    scores += row * total
    pairs += row * (CHUNKS * 2 * HELD)
    counts += row * CHUNKS
    out += row * k
    keys = _row_keys(scores, chunk * CHUNK, total, CHUNK)
    g = tl.arange(0, GROUPS_PAD)
    tops = tl.load(maxima + row * groups + g, mask=g < groups, other=LEAST)
    # -- a bound that k maxima reach, two bits at a time, until hardly more do; -inf and NaN (LEAST) never count
    limit = tl.full((), LEAST, tl.int64)
    unit = tl.full((), 1 << 30, tl.int64)
    reached = groups
    largest = tl.max(tops, axis=0)
    while (unit >= 1 << 14) & (reached > k + k // 8):
        if limit + unit <= largest:
            digit, reached = _digits(tops, limit, unit, k, reached)
            limit += digit * unit
        unit = unit >> 2
    bound = tl.maximum(limit, LEAST + 1).to(tl.int32)
    # -- this chunk's tokens that reach it; what does not fit is not stored, and the row is streamed instead
    live = keys >= bound
    place = tl.cumsum(live.to(tl.int32), axis=0) - 1
    here = pairs + chunk * (2 * HELD) + place
    kept = live & (place < HELD)
    tl.store(here, keys, mask=kept)
    tl.store(here + HELD, chunk * CHUNK + tl.arange(0, CHUNK), mask=kept)
    tl.store(counts + chunk, tl.sum(live.to(tl.int32), axis=0))
    # Every thread has stored before the program says that it has arrived.
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu") == CHUNKS - 1:
        c = tl.arange(0, CHUNKS_PAD)
        found_in = tl.load(counts + c, mask=c < CHUNKS, other=0, cache_modifier=".cg")
        found = tl.sum(found_in, axis=0)
        if found <= HELD:
            # Candidate i lies in the chunk behind those that end at or before i.
            i = tl.arange(0, HELD)
            behind = (i[:, None] >= tl.cumsum(found_in, axis=0)[None, :]) & (c < CHUNKS)[None, :]
            at = pairs + i + tl.sum(tl.where(behind, (2 * HELD - found_in)[None, :], 0), axis=1)
            held = i < found
            key = tl.load(at, mask=held, other=LEAST, cache_modifier=".cg")
            index = tl.load(at + HELD, mask=held, other=-1, cache_modifier=".cg")
            _finish(key, index, out, found, bound, 4 * unit, k, HELD)
        else:
            _finish_streamed(scores, out, total, k, HELD)
        for start in range(found, k, HELD):
            pad = start + tl.arange(0, HELD)
            tl.store(out + pad, tl.full((HELD,), -1, tl.int32), mask=pad < k)


@triton.jit
def _digits(keys, limit, unit, k, reached):
    """The largest of 0 .. 3 such that ``k`` keys or more reach ``limit + digit * unit``, and how many reach that.

    ``limit`` and ``unit`` are int64, ``reached`` is the count at ``limit``. No key is 2**31 - 1.
    """
    most = tl.full((), 2147483647, tl.int64)
    # Three counts in one sum.
    packed = (keys >= tl.minimum(limit + unit, most).to(tl.int32)).to(tl.int64)
    packed += (keys >= tl.minimum(limit + 2 * unit, most).to(tl.int32)).to(tl.int64) << 20
    packed += (keys >= tl.minimum(limit + 3 * unit, most).to(tl.int32)).to(tl.int64) << 40
    packed = tl.sum(packed, axis=0)
    one = (packed & 0xFFFFF).to(tl.int32)
    two = ((packed >> 20) & 0xFFFFF).to(tl.int32)
    three = (packed >> 40).to(tl.int32)
    reached = tl.where(three >= k, three, tl.where(two >= k, two, tl.where(one >= k, one, reached)))
    return (one >= k).to(tl.int32) + (two >= k).to(tl.int32) + (three >= k).to(tl.int32), reached


@triton.jit
def _finish(key, index, out, found, bound, unit, k, HELD: tl.constexpr):
    """Choose among ``found`` candidates, all in registers, in the order of their indices."""
    live = tl.arange(0, HELD) < found
    # From the bound on, which is below them all. The k-th key is hardly ever 4 units or more above it.
    key = tl.where(live, key, LEAST)
    span = tl.max(key, axis=0)
    limit = bound.to(tl.int64)
    if tl.sum((live & (key >= limit + 4 * unit)).to(tl.int32), axis=0) >= k:
        unit = tl.full((), 1 << 30, tl.int64)
    reached = found
    while (unit >= 1) & (reached > k):
        if limit + unit <= span:
            digit, reached = _digits(key, limit, unit, k, reached)
            limit += digit * unit
        unit = unit >> 2
    # When more than k still reach the limit, the limit is the k-th key, and those equal to it are ties.
    larger = live & (key > limit)
    equal = live & (key == limit)
    ties = k - tl.sum(larger.to(tl.int32), axis=0)
    chosen = larger | (equal & ((reached <= k) | (tl.cumsum(equal.to(tl.int32), axis=0) <= ties)))
    tl.store(out + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, index, mask=chosen)


@triton.jit
def _finish_streamed(scores, out, total, k, TILE: tl.constexpr):
    """Choose among all tokens of the row, k or more of which can be chosen."""
    limit = tl.full((), LEAST, tl.int32)
    for step in range(16):
        unit = tl.full((), 1 << 30, tl.int32) >> (2 * step)
        one = 0
        two = 0
        three = 0
        for first in range(0, total, TILE):
            key = _row_keys(scores, first, total, TILE)
            one += tl.sum((key >= limit + unit).to(tl.int32), axis=0)
            two += tl.sum((key >= limit + 2 * unit).to(tl.int32), axis=0)
            three += tl.sum((key >= limit + 3 * unit).to(tl.int32), axis=0)
        limit += ((one >= k).to(tl.int32) + (two >= k).to(tl.int32) + (three >= k).to(tl.int32)) * unit
    larger = 0
    for first in range(0, total, TILE):
        larger += tl.sum((_row_keys(scores, first, total, TILE) > limit).to(tl.int32), axis=0)
    equals = 0
    written = 0
    for first in range(0, total, TILE):
        key = _row_keys(scores, first, total, TILE)
        equal = key == limit
        chosen = (key > limit) | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) + equals <= k - larger))
        place = written + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(out + place, first + tl.arange(0, TILE), mask=chosen)
        equals += tl.sum(equal.to(tl.int32), axis=0)
        written += tl.sum(chosen.to(tl.int32), axis=0)


@triton.jit
def _row_keys(scores, first, total, TILE: tl.constexpr):
    t = first + tl.arange(0, TILE)
    return order_of(tl.load(scores + t, mask=t < total, other=float("-inf")))


def group_size(total: int, k: int) -> int:
    """Tokens of a group: four times as many groups as wanted tokens, or what registers hold; at most 64."""
    size = 1
    while size < 64 and (total // (2 * size) >= 4 * k or total > size * MOST_GROUPS):
        size *= 2
    return size


def _select(scores: Tensor, maxima: Tensor, arrived: Tensor, k: int) -> Tensor:
    total, groups = scores.shape[-1], maxima.shape[1]
    rows = maxima.shape[0]
    held = min(MOST_HELD, next_power_of_2(2 * k))
    chunk = min(CHUNK, next_power_of_2(total))
    chunks = triton.cdiv(total, chunk)
    pairs = torch.empty((rows, chunks, 2, held), dtype=torch.int32, device=scores.device)
    counts = torch.empty((rows, chunks), dtype=torch.int32, device=scores.device)
    out = torch.empty((*scores.shape[:-1], k), dtype=torch.int32, device=scores.device)
    _select_kernel[(chunks, rows)](
        scores, maxima, pairs, counts, arrived, out, total, groups, k,
        GROUPS_PAD=next_power_of_2(groups), CHUNK=chunk, CHUNKS=chunks, CHUNKS_PAD=next_power_of_2(chunks), HELD=held,
        num_warps=SELECT_WARPS, **dependent_launch(scores.device),
    )  # fmt: skip
    return out


def select(scores: Tensor, k: int) -> Tensor:
    """See ``reference.select``."""
    scores = scores.contiguous()
    total = scores.shape[-1]
    rows = scores.numel() // total
    group = group_size(total, k)
    groups = triton.cdiv(total, group)
    maxima = torch.empty((rows, groups), dtype=torch.int32, device=scores.device)
    arrived = torch.empty((rows,), dtype=torch.int32, device=scores.device)
    _maxima_kernel[(triton.cdiv(total, 1024), rows)](
        scores, maxima, arrived, total, groups, TILE=1024, GROUP=group, num_warps=4, **dependent_launch(scores.device)
    )  # fmt: skip
    return _select(scores, maxima, arrived, k)


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
    head_score: str = "sum",
    scale: float = 1.0,
    encoding: Jobs | None = None,
    cleared: Tensor | None = None,
) -> Tensor:
    """See ``reference.score_select``: the score kernel leaves the maxima. The rest is for :func:`score`."""
    group = group_size(codes.shape[1], k)
    rows = query.shape[0] * query.shape[1]
    maxima = torch.empty((rows, codes.shape[1] // group), dtype=torch.int32, device=query.device)
    arrived = torch.empty((rows,), dtype=torch.int32, device=query.device)
    scores = score(
        query, codes, scales, decoder, block_cos, block_sin, ring_slots, slots, modifier, tensors, integers,
        capacity, score_rank, sinks, rotary, head_score, scale, maxima, arrived, group, encoding, cleared,
    )  # fmt: skip
    return _select(scores, maxima, arrived, k)
