"""Triton kernels of ``sals::score``: what every cached token is worth to this call's queries, read from the latents.

``block_rotary`` needs, for each block of tokens, the query un-rotated by the block's mean rotation and projected on the decoder.
Done as written that is a product of ``[blocks, E] x [E, Rs]``. All heads share the rotation, so it is folded the other way
round: with ``u[d] = q[d] cos[d] + sign(d) q[p(d)] sin[p(d)]``, where ``p(d)`` is the other dim of ``d``'s rotated pair,

    fold   A[d, r] = sum_n q[n, d] decoder[r, n, d],   A'[d, r] = sign(d) sum_n q[n, p(d)] decoder[r, n, d]
    project   projected[block, r] = sum_d cos[block, d] A[d, r] + sin[block, p(d)] A'[d, r]

which is ``N`` times less arithmetic in the second, larger product. Then one pass over the codes, bounded by memory:

    score   s[t] = scale[t] sum_r codes[t, r] projected[block of t, r]

and, when a selection follows, the maxima of groups of tokens (``select.py``) while the scores are in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import codegen
from .encode import _batch_stride, next_power_of_2, require_contiguous, row_major
from .index_expr import Modifier
from .reference import BLOCK

#: Tokens of a tile of the score kernel (divides BLOCK), programs of one multiprocessor, pipeline stages and warps.
SCORE_TOKENS, SCORE_PROGRAMS, SCORE_STAGES, SCORE_WARPS = 64, 3, 3, 4

#: Latent coordinates of one program of the fold kernel.
FOLD_TILE = 16


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
    query, decoder, folded, rows, shared, queries, query_b, query_l, query_h,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, DR: tl.constexpr, RS: tl.constexpr,
    INTERLEAVED: tl.constexpr, TILE_R: tl.constexpr,
):  # fmt: skip
    """Program (tile of latent coordinates, ``shared`` query tokens): ``folded [rows, 2, RS, D]``, A and A'."""
    r = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)
    d = tl.arange(0, D_PAD)
    known = d < D
    other, sign = _partner(d, DR, INTERLEAVED)
    inside = (r < RS)[:, None] & known[None, :]
    basis_at = decoder + r[:, None] * (N * D) + d[None, :]
    # The tile of the decoder is read again for every row, from the L1 cache.
    for row in range(tl.program_id(1) * shared, tl.minimum(tl.program_id(1) * shared + shared, rows)):
        own = query + tl.cast(row // queries, tl.int64) * query_b + (row % queries) * query_l
        direct = tl.zeros((TILE_R, D_PAD), tl.float32)
        across = tl.zeros((TILE_R, D_PAD), tl.float32)
        for n in tl.range(0, N, loop_unroll_factor=4):
            summed = tl.zeros((D_PAD,), tl.float32)
            partner = tl.zeros((D_PAD,), tl.float32)
            for g in tl.static_range(G):
                head = own + (n * G + g) * query_h
                summed += tl.load(head + d, mask=known, other=0.0).to(tl.float32)
                if DR > 0:
                    partner += tl.load(head + other, mask=known, other=0.0).to(tl.float32)
            basis = tl.load(basis_at + n * D, mask=inside, other=0.0).to(tl.float32)
            direct += basis * summed[None, :]
            if DR > 0:
                across += basis * partner[None, :]
        at = folded + tl.cast(row, tl.int64) * (2 * RS * D) + r[:, None] * D + d[None, :]
        tl.store(at, direct.to(folded.dtype.element_ty), mask=inside)
        if DR > 0:
            tl.store(at + RS * D, (across * sign[None, :]).to(folded.dtype.element_ty), mask=inside)


@triton.jit
def _project_kernel(
    folded, block_cos, block_sin, projected, queries, blocks, capacity, rows_p, args,
    D: tl.constexpr, D_PAD: tl.constexpr, DR: tl.constexpr, RS: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr, UPPER_FN: tl.constexpr, PRECISION: tl.constexpr,
    TILE_B: tl.constexpr, TILE_R: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Program (tile of blocks, tile of latent coordinates, query token): projected queries, fp32."""
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
        tl.store(
            projected + (row.to(tl.int64) * blocks + block[:, None]) * RS + r[None, :],
            total,
            mask=live & (r < RS)[None, :],
        )


@triton.jit
def _score_kernel(
    codes, scales, projected, ring_slots, slots, scores, maxima,
    total, queries, heads, capacity, window, sinks, blocks, tiles, ring_p, slots_p, args,
    R: tl.constexpr, RS: tl.constexpr, TILE_R: tl.constexpr, TILE_T: tl.constexpr,
    BLOCK: tl.constexpr, QUANTIZED: tl.constexpr, BLOCKWISE: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
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
        block = tile // BLOCK if BLOCKWISE else 0
        for q in range(queries):
            row = (b * queries + q).to(tl.int64)
            value = tl.zeros((TILE_T,), tl.float32)
            for part in tl.static_range(0, RS, TILE_R):
                r = part + tl.arange(0, TILE_R)
                weight = tl.load(projected + (row * blocks + block) * RS + r, mask=r < RS, other=0.0)
                # No mask when the tile fits: 16-byte loads.
                if RS % TILE_R == 0:
                    latent = tl.load(codes + token[:, None] * R + r[None, :])
                else:
                    latent = tl.load(codes + token[:, None] * R + r[None, :], mask=(r < RS)[None, :], other=0)
                value += tl.sum(latent.to(tl.float32) * weight[None, :], axis=1)
            if QUANTIZED:
                value *= tl.load(scales + token).to(tl.float32)
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


@lru_cache(maxsize=None)
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
    """See ``reference.score``. ``maxima [B*L, S/group]`` int32, when given, gets each group's largest :func:`order_of`."""
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

    folded = torch.empty((rows, 2, score_rank, dim), dtype=query.dtype, device=device)
    d_pad = max(16, next_power_of_2(dim))
    # A program reads its tile of the decoder from L2 once, for all its rows.
    shared = max(1, min(4, rows * decoder.numel() * score_rank // rank >> 23))
    _fold_kernel[(triton.cdiv(score_rank, FOLD_TILE), triton.cdiv(rows, shared))](
        query, decoder, folded, rows, shared, queries, query.stride(0), query.stride(1), query.stride(2),
        N=kv_heads, G=heads // kv_heads, D=dim, D_PAD=d_pad, DR=rotary_dim, RS=score_rank, INTERLEAVED=interleaved,
        TILE_R=FOLD_TILE, num_warps=4,
    )  # fmt: skip

    blocks = total // BLOCK if rotary_dim else 1
    projected = torch.empty((rows, blocks, score_rank), dtype=torch.float32, device=device)
    tile_b = 64 if rows * blocks >= 2048 else 32 if blocks > 16 else 16
    tile_r = min(64, max(16, next_power_of_2(score_rank)))
    _project_kernel[(triton.cdiv(blocks, tile_b), triton.cdiv(score_rank, tile_r), rows)](
        folded, block_cos, block_sin, projected, queries, blocks, capacity,
        block_cos.shape[1] if block_cos.shape[0] > 1 else 0, args,
        D=dim, D_PAD=d_pad, DR=rotary_dim, RS=score_rank, BLOCK=BLOCK, INTERLEAVED=interleaved,
        UPPER_FN=generated.upper_fn, PRECISION="tf32" if half_precision else "ieee",
        TILE_B=tile_b, TILE_R=tile_r, TILE_D=min(64, d_pad), num_warps=4,
    )  # fmt: skip

    scores = torch.empty((batch, queries, total), dtype=torch.float32, device=device)
    tile_r = max(16, min(256, next_power_of_2(score_rank)))
    # One wave of programs, each of which reads its tiles through a pipeline.
    programs = max(1, SCORE_PROGRAMS * multiprocessors(device) // batch)
    tiles = triton.cdiv(total // SCORE_TOKENS, programs)
    _score_kernel[(triton.cdiv(total, SCORE_TOKENS * tiles), batch)](
        codes, scales, projected, ring_slots, slots, scores, scores if maxima is None else maxima,
        total, queries, heads, capacity, ring_slots.shape[1], sinks, blocks, tiles,
        _batch_stride(ring_slots), _batch_stride(slots), args,
        R=rank, RS=score_rank, TILE_R=tile_r, TILE_T=SCORE_TOKENS, BLOCK=BLOCK,
        QUANTIZED=codes.dtype == torch.int8, BLOCKWISE=rotary_dim > 0, GROUP=group, STAGES=SCORE_STAGES,
        MASK_FN=generated.mask_fn, UPPER_FN=generated.upper_fn, LOWER_FN=generated.lower_fn, MASKS=generated.masks,
        PER_HEAD=Modifier.parse(modifier).mask.uses("h"), num_warps=SCORE_WARPS,
    )  # fmt: skip
    return scores
