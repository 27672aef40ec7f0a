"""Triton kernels of ``sals::select``: the exact top-k of each row of scores, as ascending indices.

The k-th largest *maximum* of disjoint groups of tokens is a lower bound on the k-th largest score: k groups reach it,
each with a token. With twice as many groups as wanted tokens, or more, hardly more tokens than wanted reach it. So:

1. the maxima of groups of a few tokens are left by the score kernel's epilogue (or found here by a kernel of their
   own);
2. one program a row bounds the k-th score by the leading 16 bits of the k-th maximum, found two bits at a time by
   counting;
3. it reads the scores of the groups that reach the bound (about k), compacts the tokens that do (a few hundred), finds
   the k-th largest key among them, gives ties to the lower index by counting, and writes the indices.

Compaction keeps the order of indices, so nothing is sorted, and nothing is atomic, so the result is deterministic. Any
row is exact: where more groups or tokens reach the bound than registers hold (constant rows), the row is streamed once
for every two bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .encode import next_power_of_2
from .score import order_of, score

LEAST = tl.constexpr(-2147483648)
SELECT_WARPS = 8


@triton.jit
def _maxima_kernel(scores, maxima, total, groups, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Program (tile, row): the largest key of each group of the tile."""
    row = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    keys = order_of(tl.load(scores + row * total + t, mask=t < total, other=float("-inf")))
    g = tl.program_id(0) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    tl.store(maxima + row * groups + g, tl.max(tl.reshape(keys, (TILE // GROUP, GROUP)), axis=1), mask=g < groups)


@triton.jit
def _select_kernel(
    scores, maxima, scratch, out, total, groups, k,
    GROUP: tl.constexpr, GROUPS_PAD: tl.constexpr, PICKS: tl.constexpr, HELD: tl.constexpr, K_PAD: tl.constexpr,
):  # fmt: skip
    """Program (row). ``scratch [rows, PICKS + 2 * HELD]`` int32."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * total
    scratch += row * (PICKS + 2 * HELD)
    out += row * k
    g = tl.arange(0, GROUPS_PAD)
    tops = tl.load(maxima + row * groups + g, mask=g < groups, other=LEAST)
    # -- a bound that k maxima reach, two bits at a time, until hardly more do; -inf and NaN (LEAST) never count
    bound = tl.full((), LEAST, tl.int32)
    unit = tl.full((), 1 << 30, tl.int32)
    reached = total
    while (unit >= 1 << 14) & (reached > k + k // 8):
        digit, reached = _digits(tops, bound, unit, k, reached)
        bound += digit * unit
        unit = unit >> 2
    bound = tl.maximum(bound, LEAST + 1)
    picked = tops >= bound
    picks = tl.sum(picked.to(tl.int32), axis=0)
    found = 0
    if picks <= PICKS:
        found = _gather(scores, scratch, picked, picks, bound, total, GROUP, GROUPS_PAD, PICKS, HELD)
    if (picks <= PICKS) & (found <= HELD):
        _finish(scratch + PICKS, out, found, bound, k, HELD)
    else:
        _finish_streamed(scores, out, total, k, HELD)
        found = k
    pad = tl.arange(0, K_PAD)
    tl.store(out + pad, tl.full((K_PAD,), -1, tl.int32), mask=(pad >= found) & (pad < k))


@triton.jit
def _digits(keys, limit, unit, k, reached):
    """The largest of 0 .. 3 such that ``k`` keys or more reach ``limit + digit * unit``, and how many reach that.

    Three counts packed in one sum; ``reached`` is the count at ``limit``.
    """
    packed = (keys >= limit + unit).to(tl.int64)
    packed += (keys >= limit + 2 * unit).to(tl.int64) << 20
    packed += (keys >= limit + 3 * unit).to(tl.int64) << 40
    packed = tl.sum(packed, axis=0)
    one = (packed & 0xFFFFF).to(tl.int32)
    two = ((packed >> 20) & 0xFFFFF).to(tl.int32)
    three = (packed >> 40).to(tl.int32)
    reached = tl.where(three >= k, three, tl.where(two >= k, two, tl.where(one >= k, one, reached)))
    return (one >= k).to(tl.int32) + (two >= k).to(tl.int32) + (three >= k).to(tl.int32), reached


@triton.jit
def _gather(scores, scratch, picked, picks, bound, total, GROUP: tl.constexpr, GROUPS_PAD: tl.constexpr,
            PICKS: tl.constexpr, HELD: tl.constexpr):  # fmt: skip
    """Compact the (key, index) of every token that reaches the bound behind the PICKS group numbers; their number."""
    tl.store(scratch + tl.cumsum(picked.to(tl.int32), axis=0) - 1, tl.arange(0, GROUPS_PAD), mask=picked)
    tl.debug_barrier()
    i = tl.arange(0, PICKS)
    group = tl.load(scratch + i, mask=i < picks, other=0, cache_modifier=".cg")
    t = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    keys = order_of(tl.load(scores + t, mask=(i < picks)[:, None] & (t < total), other=float("-inf")))
    keys = tl.reshape(keys, (PICKS * GROUP,))
    t = tl.reshape(t, (PICKS * GROUP,))
    reached = keys >= bound
    place = tl.cumsum(reached.to(tl.int32), axis=0) - 1
    found = tl.sum(reached.to(tl.int32), axis=0)
    # More than fit are not stored: the caller streams the row instead.
    held = reached & (place < HELD)
    tl.store(scratch + PICKS + 2 * place, keys, mask=held)
    tl.store(scratch + PICKS + 2 * place + 1, t, mask=held)
    tl.debug_barrier()
    return found


@triton.jit
def _finish(pairs, out, found, bound, k, HELD: tl.constexpr):
    """Choose among at most HELD candidates, all in registers."""
    i = tl.arange(0, HELD)
    live = i < found
    # Distances from the bound, which is below them all: few leading bits to try.
    key = tl.load(pairs + 2 * i, mask=live, other=LEAST, cache_modifier=".cg").to(tl.int64) - bound
    index = tl.load(pairs + 2 * i + 1, mask=live, other=-1, cache_modifier=".cg")
    span = tl.max(key, axis=0)
    limit = tl.full((), 0, tl.int64)
    unit = tl.full((), 1 << 30, tl.int64)
    reached = found
    while (unit >= 1) & (reached > k):
        if unit <= span:
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
    """Tokens of a group: as many maxima to search as tokens to gather afterwards, more or less; at most 64."""
    size = 1
    while size < 64 and 2 * k * (2 * size) ** 2 <= 2 * total:
        size *= 2
    return size


def _select(scores: Tensor, maxima: Tensor, group: int, k: int) -> Tensor:
    total, groups = scores.shape[-1], maxima.shape[1]
    rows = maxima.shape[0]
    picks = next_power_of_2(k + k // 4)
    held = 2 * picks
    scratch = torch.empty((rows, picks + 2 * held), dtype=torch.int32, device=scores.device)
    out = torch.empty((*scores.shape[:-1], k), dtype=torch.int32, device=scores.device)
    _select_kernel[(rows,)](
        scores, maxima, scratch, out, total, groups, k,
        GROUP=group, GROUPS_PAD=next_power_of_2(groups), PICKS=picks, HELD=held, K_PAD=next_power_of_2(k),
        num_warps=SELECT_WARPS if groups > 2048 else 4,
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
    _maxima_kernel[(triton.cdiv(total, 1024), rows)](scores, maxima, total, groups, TILE=1024, GROUP=group, num_warps=4)
    return _select(scores, maxima, group, k)


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
) -> Tensor:
    """See ``reference.score_select``: the score kernel leaves the maxima."""
    group = group_size(codes.shape[1], k)
    rows = query.shape[0] * query.shape[1]
    maxima = torch.empty((rows, codes.shape[1] // group), dtype=torch.int32, device=query.device)
    scores = score(
        query, codes, scales, decoder, block_cos, block_sin, ring_slots, slots, modifier, tensors, integers,
        capacity, score_rank, sinks, rotary, head_score, scale, maxima, group,
    )  # fmt: skip
    return _select(scores, maxima, group, k)
