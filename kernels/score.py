"""Triton kernels of ``sals::score``: what every cached token is worth to this call's queries, read from the latents.

``block_rotary`` needs, for each block of tokens, the query un-rotated by the block's mean rotation and projected on
the decoder. Done as written that is a product of ``[blocks, E] x [E, Rs]``. All heads share the rotation, so it is
folded the other way round: with ``u[d] = q[d] cos[d] + sign(d) q[p(d)] sin[p(d)]``, where ``p(d)`` is the other dim of
``d``'s rotated pair,

    fold   A[d, r] = sum_n q[n, d] decoder[r, n, d],   A'[d, r] = sign(d) sum_n q[n, p(d)] decoder[r, n, d]
    project   projected[block, r] = sum_d cos[block, d] A[d, r] + sin[block, p(d)] A'[d, r]

which is ``N`` times less arithmetic in the second, larger product. Then one pass over the codes, bounded by memory:

    score   s[t] = scale[t] sum_r codes[t, r] projected[block of t, r]

and, when a selection follows, the maxima of groups of tokens (``select.py``) while the scores are in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import codegen
from .encode import _batch_stride, next_power_of_2, require_contiguous, round_half_even, row_major, stages
from .index_expr import Modifier
from .reference import BLOCK

#: Tokens of a tile of the score kernel (divides BLOCK), programs of one multiprocessor, pipeline stages and warps.
SCORE_TOKENS, SCORE_PROGRAMS, SCORE_STAGES, SCORE_WARPS = 128, 2, 3, 4

#: Latent coordinates of one program of the fold kernel, and its warps.
FOLD_RANKS, FOLD_WARPS = 32, 4


@triton.jit
def order_of(x):
    """An int32 that orders as fp32 ``x`` does; NaN and -inf get the least value of all. Both zeros are one value."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x > float("-inf"), ordered, -2147483648)


@triton.jit
def _partner(d, DR: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The other dim of the rotated pair of ``d`` and the sign that ``Rot^T`` gives it."""
    if INTERLEAVED:
        other = d ^ 1
        first = (d & 1) == 0
    else:
        other = tl.where(d < DR // 2, d + DR // 2, d - DR // 2)
        first = d < DR // 2
    rotated = d < DR
    return tl.where(rotated, other, d), tl.where(rotated, tl.where(first, 1.0, -1.0), 0.0)


@triton.jit
def _fold_kernel(
    query, decoder, folded, rows, queries, query_b, query_l, query_h,
    N: tl.constexpr, N_PAD: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DR: tl.constexpr, RS: tl.constexpr,
    INTERLEAVED: tl.constexpr, TILE_R: tl.constexpr, TILE_D: tl.constexpr, TILE_M: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile of dims, of latent coordinates, of query tokens): ``folded [rows, 2, RS, D]``, A and A'.

    One small product a dim, ``[query tokens, N] x [N, coordinates]``, so that each element of the decoder is read once.
    """
    d = tl.program_id(0) * TILE_D + tl.arange(0, TILE_D)
    r = tl.program_id(1) * TILE_R + tl.arange(0, TILE_R)
    m = tl.program_id(2) * TILE_M + tl.arange(0, TILE_M)
    n = tl.arange(0, N_PAD)
    row = tl.minimum(m, rows - 1)
    basis = tl.load(
        decoder + r[:, None, None] * (N * D) + n[None, :, None] * D + d[None, None, :],
        mask=(r < RS)[:, None, None] & (n < N)[None, :, None] & (d < D)[None, None, :], other=0.0,
    )  # fmt: skip
    basis = tl.permute(basis, (2, 1, 0)).to(query.dtype.element_ty)  # [TILE_D, N_PAD, TILE_R]
    own = query + (row // queries).to(tl.int64) * query_b + (row % queries) * query_l
    known = (n < N)[None, :, None] & (d < D)[None, None, :]
    other, sign = _partner(d, DR, INTERLEAVED)
    at = folded + m.to(tl.int64)[:, None, None] * (2 * RS * D) + r[None, :, None] * D + d[None, None, :]
    inside = (m < rows)[:, None, None] & (r < RS)[None, :, None] & (d < D)[None, None, :]
    summed = _group_sums(own, n, d, known, query_h, G, TILE_M, N_PAD, TILE_D)
    product = tl.dot(tl.permute(summed, (2, 0, 1)).to(basis.dtype), basis, input_precision=PRECISION)
    tl.store(at, tl.permute(product, (1, 2, 0)).to(folded.dtype.element_ty), mask=inside)
    if DR > 0:
        summed = _group_sums(own, n, other, known, query_h, G, TILE_M, N_PAD, TILE_D) * sign[None, None, :]
        product = tl.dot(tl.permute(summed, (2, 0, 1)).to(basis.dtype), basis, input_precision=PRECISION)
        tl.store(at + RS * D, tl.permute(product, (1, 2, 0)).to(folded.dtype.element_ty), mask=inside)


@triton.jit
def _group_sums(own, n, d, known, query_h, G: tl.constexpr, TILE_M: tl.constexpr, N_PAD: tl.constexpr,
                TILE_D: tl.constexpr):  # fmt: skip
    """Queries ``[TILE_M, N_PAD, TILE_D]`` at dims ``d``, summed over the heads that share a KV head."""
    total = tl.zeros((TILE_M, N_PAD, TILE_D), tl.float32)
    for g in tl.static_range(G):
        at = own[:, None, None] + (n * G + g)[None, :, None] * query_h + d[None, None, :]
        total += tl.load(at, mask=known, other=0.0).to(tl.float32)
    return total


@triton.jit
def _project_kernel(
    folded, block_cos, block_sin, projected, steps, queries, blocks, capacity, rows_p, args,
    D: tl.constexpr, D_PAD: tl.constexpr, DR: tl.constexpr, RS: tl.constexpr, TILE_R: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr, INT8: tl.constexpr, UPPER_FN: tl.constexpr, PRECISION: tl.constexpr,
    TILE_B: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Program (tile of blocks, part of TILE_R coordinates, query token): the projected query of each block.

    Either fp32 ``[rows, blocks, RS]``, or int8 ``[rows, blocks, 2, RS]`` with ``steps [rows, blocks, parts]``: two
    terms of a number, ``step * (first + second / 254)``, which is 15 bits of it.
    """
    row = tl.program_id(2)
    b = row // queries
    block = tl.program_id(0) * TILE_B + tl.arange(0, TILE_B)
    r = tl.program_id(1) * TILE_R + tl.arange(0, TILE_R)
    if tl.program_id(0) * TILE_B * BLOCK < UPPER_FN(b, row % queries, capacity, args):
        live = (block < blocks)[:, None]
        total = tl.zeros((TILE_B, TILE_R), tl.float32)
        means = (b.to(tl.int64) * rows_p + block[:, None]) * DR
        at = folded + row.to(tl.int64) * (2 * RS * D) + r[None, :] * D
        for start in tl.static_range(0, D_PAD, TILE_D):
            d = start + tl.arange(0, TILE_D)
            inside = (d < D)[:, None] & (r < RS)[None, :]
            direct = tl.load(at + d[:, None], mask=inside, other=0.0)
            if DR == 0:
                cos = tl.full((TILE_B, TILE_D), 1.0, tl.float32)
            else:
                turned = live & (d < DR)[None, :]
                cos = tl.load(block_cos + means + d[None, :], mask=turned, other=0.0).to(tl.float32)
                cos = tl.where((d < DR)[None, :], cos, 1.0)
            total = tl.dot(cos.to(direct.dtype), direct, total, input_precision=PRECISION)
            if DR > 0 and start < DR:
                other, _ = _partner(d, DR, INTERLEAVED)
                across = tl.load(at + RS * D + d[:, None], mask=inside, other=0.0)
                sin = tl.load(block_sin + means + other[None, :], mask=turned, other=0.0).to(direct.dtype)
                total = tl.dot(sin, across, total, input_precision=PRECISION)
        cell = row.to(tl.int64) * blocks + block
        stored = live & (r < RS)[None, :]
        if INT8:
            step = tl.maximum(tl.max(tl.abs(total), axis=1) / 127.0, 1e-30)
            scaled = total / step[:, None]
            first = round_half_even(scaled)
            second = round_half_even((scaled - first) * 254.0)
            at = projected + cell[:, None] * (2 * RS) + r[None, :]
            tl.store(at, first.to(tl.int8), mask=stored)
            tl.store(at + RS, second.to(tl.int8), mask=stored)
            tl.store(steps + cell * tl.num_programs(1) + tl.program_id(1), step, mask=block < blocks)
        else:
            tl.store(projected + cell[:, None] * RS + r[None, :], total, mask=stored)


@triton.jit
def _score_kernel(
    codes, scales, projected, steps, ring_slots, slots, scores, maxima,
    total, queries, heads, capacity, window, sinks, blocks, tiles, ring_p, slots_p, args,
    R: tl.constexpr, RS: tl.constexpr, TILE_R: tl.constexpr, TILE_T: tl.constexpr,
    BLOCK: tl.constexpr, INT8: tl.constexpr, COLUMNS: tl.constexpr, BLOCKWISE: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr,
    MASK_FN: tl.constexpr, UPPER_FN: tl.constexpr, LOWER_FN: tl.constexpr, MASKS: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Program (``tiles`` tiles of TILE_T tokens, batch): scores for every query token of the call."""
    b = tl.program_id(1)
    first = tl.program_id(0) * TILE_T * tiles
    last = tl.minimum(first + TILE_T * tiles, total)
    stop = UPPER_FN(b, 0, capacity, args)
    start = LOWER_FN(b, 0, args)
    for q in range(1, queries):
        stop = tl.maximum(stop, UPPER_FN(b, q, capacity, args))
        start = tl.minimum(start, LOWER_FN(b, q, args))
    # Tiles from `begin` to `end` hold tokens that the mask can allow; the others' codes are not read.
    begin = tl.minimum(tl.maximum(first, start // TILE_T * TILE_T), last)
    end = tl.maximum(tl.minimum(last, tl.cdiv(stop, TILE_T) * TILE_T), begin)
    _never(scores, maxima, b * queries, queries, total, first, begin, TILE_T, GROUP)
    _never(scores, maxima, b * queries, queries, total, end, last, TILE_T, GROUP)
    for tile in tl.range(begin, end, TILE_T, num_stages=STAGES):
        t = tile + tl.arange(0, TILE_T)
        token = b.to(tl.int64) * total + t
        # A tile lies in one block, so one projected query serves it.
        cell = (b * queries).to(tl.int64) * blocks + (tile // BLOCK if BLOCKWISE else 0)
        if INT8:
            # Columns 2q and 2q + 1 are the two terms of query q.
            column = tl.arange(0, COLUMNS)
            asked = (column < 2 * queries)[None, :]
            at = projected + (cell + column // 2 * blocks) * (2 * RS) + column % 2 * RS
            step_at = steps + (cell + column // 2 * blocks) * PARTS
            terms = tl.zeros((TILE_T, COLUMNS), tl.float32)
            for part in tl.static_range(PARTS):
                r = part * TILE_R + tl.arange(0, TILE_R)
                if RS % TILE_R == 0:
                    latent = tl.load(codes + token[:, None] * R + r[None, :])
                    weight = tl.load(at[None, :] + r[:, None], mask=asked, other=0)
                else:
                    latent = tl.load(codes + token[:, None] * R + r[None, :], mask=(r < RS)[None, :], other=0)
                    weight = tl.load(at[None, :] + r[:, None], mask=asked & (r < RS)[:, None], other=0)
                step = tl.load(step_at + part, mask=column < 2 * queries, other=0.0)
                terms += tl.dot(latent, weight, out_dtype=tl.int32).to(tl.float32) * step[None, :]
        for q in range(queries):
            row = (b * queries + q).to(tl.int64)
            if INT8:
                share = tl.where(column == 2 * q, 1.0, tl.where(column == 2 * q + 1, 1.0 / 254.0, 0.0))
                value = tl.sum(terms * share[None, :], axis=1) * tl.load(scales + token).to(tl.float32)
            else:
                value = tl.zeros((TILE_T,), tl.float32)
                for part in tl.static_range(PARTS):
                    r = part * TILE_R + tl.arange(0, TILE_R)
                    weight = tl.load(projected + (cell + q * blocks) * RS + r, mask=r < RS, other=0.0)
                    latent = tl.load(codes + token[:, None] * R + r[None, :], mask=(r < RS)[None, :], other=0.0)
                    value += tl.sum(latent.to(tl.float32) * weight[None, :], axis=1)
            slot = tl.load(slots + b.to(tl.int64) * slots_p + q)
            kept = (t < sinks) | ((t > slot - window) & (t <= slot))
            value = tl.where(kept, float("inf"), value)
            held = tl.load(ring_slots + b.to(tl.int64) * ring_p + t % window) == t
            allowed = (t < capacity) & (held == 0)
            if MASKS:
                kv = tl.minimum(t, capacity - 1)
                if PER_HEAD:
                    any_head = MASK_FN(b, 0, q, kv, args)
                    for h in range(1, heads):
                        any_head = any_head | MASK_FN(b, h, q, kv, args)
                    allowed = allowed & any_head
                else:
                    allowed = allowed & MASK_FN(b, 0, q, kv, args)
            value = tl.where(allowed, value, float("-inf"))
            tl.store(scores + row * total + t, value)
            if GROUP > 0:
                g = tile // GROUP + tl.arange(0, TILE_T // GROUP)
                tops = tl.max(tl.reshape(order_of(value), (TILE_T // GROUP, GROUP)), axis=1)
                tl.store(maxima + row * (total // GROUP) + g, tops)


@triton.jit
def _never(scores, maxima, row, queries, total, begin, end, TILE_T: tl.constexpr, GROUP: tl.constexpr):
    """Tiles begin .. end score -inf."""
    for tile in range(begin, end, TILE_T):
        t = tile + tl.arange(0, TILE_T)
        for q in range(queries):
            tl.store(scores + (row + q).to(tl.int64) * total + t, tl.full((TILE_T,), float("-inf"), tl.float32))
            if GROUP > 0:
                g = tile // GROUP + tl.arange(0, TILE_T // GROUP)
                least = tl.full((TILE_T // GROUP,), -2147483648, tl.int32)
                tl.store(maxima + (row + q).to(tl.int64) * (total // GROUP) + g, least)


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; of an H200 where there is none (ahead-of-time compilation, the interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def score(
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
    head_score: str = "sum",
    scale: float = 1.0,
    maxima: Tensor | None = None,
    group: int = 0,
) -> Tensor:
    """See ``reference.score``. ``maxima [B*L, S/group]`` int32, when given, gets each group's largest key."""
    if head_score != "sum":
        raise NotImplementedError("scores that are not sums over heads run as their reference meaning")
    require_contiguous(codes=codes, scales=scales, block_cos=block_cos, block_sin=block_sin, ring_slots=ring_slots)
    query, decoder, slots = row_major(query, 1), decoder.contiguous(), row_major(slots, 1)
    batch, queries, heads, dim = query.shape
    total, rank = codes.shape[1:]
    kv_heads = decoder.shape[1] // dim
    rows = batch * queries
    rotary_dim = 0 if rotary == "none" else block_cos.shape[-1]
    interleaved = rotary == "interleaved"
    generated = codegen.generate(modifier, tensors)
    args = codegen.arguments(tensors, integers)
    device = query.device
    half_precision = query.dtype != torch.float32

    int8 = codes.dtype == torch.int8
    precision = "tf32" if half_precision else "ieee"

    folded = torch.empty((rows, 2, score_rank, dim), dtype=query.dtype, device=device)
    d_pad = max(16, next_power_of_2(dim))
    n_pad = max(16, next_power_of_2(kv_heads))
    tile_d = max(1, min(16, 512 // n_pad))
    _fold_kernel[(triton.cdiv(dim, tile_d), triton.cdiv(score_rank, FOLD_RANKS), triton.cdiv(rows, 16))](
        query, decoder, folded, rows, queries, query.stride(0), query.stride(1), query.stride(2),
        N=kv_heads, N_PAD=n_pad, G=heads // kv_heads, D=dim, DR=rotary_dim, RS=score_rank, INTERLEAVED=interleaved,
        TILE_R=FOLD_RANKS, TILE_D=tile_d, TILE_M=16, PRECISION=precision, num_warps=FOLD_WARPS,
    )  # fmt: skip

    blocks = total // BLOCK if rotary_dim else 1
    tile_r = max(32, min(128, next_power_of_2(score_rank)))
    parts = triton.cdiv(score_rank, tile_r)
    if int8:
        projected = torch.empty((rows, blocks, 2, score_rank), dtype=torch.int8, device=device)
        steps = torch.empty((rows, blocks, parts), dtype=torch.float32, device=device)
    else:
        projected = steps = torch.empty((rows, blocks, score_rank), dtype=torch.float32, device=device)
    tile_b = 32 if blocks * rows >= 2048 else 16
    _project_kernel[(triton.cdiv(blocks, tile_b), parts, rows)](
        folded, block_cos, block_sin, projected, steps, queries, blocks, capacity,
        block_cos.shape[1] if block_cos.shape[0] > 1 else 0, args,
        D=dim, D_PAD=d_pad, DR=rotary_dim, RS=score_rank, TILE_R=tile_r, BLOCK=BLOCK, INTERLEAVED=interleaved,
        INT8=int8, UPPER_FN=generated.upper_fn, PRECISION=precision, TILE_B=tile_b, TILE_D=min(64, d_pad),
        num_warps=4,
    )  # fmt: skip

    scores = torch.empty((batch, queries, total), dtype=torch.float32, device=device)
    # One wave of programs, each of which reads its tiles through a pipeline.
    programs = max(1, SCORE_PROGRAMS * multiprocessors(device) // batch)
    tiles = triton.cdiv(total // SCORE_TOKENS, programs)
    _score_kernel[(triton.cdiv(total, SCORE_TOKENS * tiles), batch)](
        codes, scales, projected, steps, ring_slots, slots, scores, scores if maxima is None else maxima,
        total, queries, heads, capacity, ring_slots.shape[1], sinks, blocks, tiles,
        _batch_stride(ring_slots), _batch_stride(slots), args,
        R=rank, RS=score_rank, TILE_R=tile_r, TILE_T=SCORE_TOKENS, BLOCK=BLOCK,
        INT8=int8, COLUMNS=max(16, next_power_of_2(2 * queries)), BLOCKWISE=rotary_dim > 0, GROUP=group,
        PARTS=parts, STAGES=stages(SCORE_STAGES),
        MASK_FN=generated.mask_fn, UPPER_FN=generated.upper_fn, LOWER_FN=generated.lower_fn, MASKS=generated.masks,
        PER_HEAD=Modifier.parse(modifier).mask.uses("h"), num_warps=SCORE_WARPS,
    )  # fmt: skip
    return scores
