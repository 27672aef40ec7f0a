"""Triton kernels of ``sals::score``: what every cached token is worth to this call's queries, read from the latents.

``block_rotary`` needs, for each block of tokens, the query un-rotated by the block's mean rotation and projected on the decoder.
Done as written that is a product of ``[blocks, E] x [E, Rs]``. All heads share the rotation, so it is folded the other way
round: with ``u[d] = q[d] cos[d] + sign(d) q[p(d)] sin[p(d)]``, where ``p(d)`` is the other dim of ``d``'s rotated pair,

    fold   A[d, r] = sum_n q[n, d] decoder[r, n, d],   A'[d, r] = sign(d) sum_n q[n, p(d)] decoder[r, n, d]
    project   projected[block, r] = sum_d cos[block, d] A[d, r] + sin[block, p(d)] A'[d, r]

which is ``N`` times less arithmetic in the second, larger product. Then one pass over the codes, bounded by memory:

    score   s[t] = scale[t] sum_r codes[t, r] projected[block of t, r]

and, when a selection follows, the counts of its first radix digit (``select.py``) while the scores are in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import codegen
from .encode import _batch_stride, launch_options, next_power_of_2, require_contiguous, row_major, wait_for_previous
from .index_expr import Modifier
from .reference import BLOCK

#: Bits of the order-preserving integer form of a score that its first histogram counts: sign, exponent, 3 of the mantissa.
BIN_BITS = 12
BINS = tl.constexpr(1 << BIN_BITS)
BIN_SHIFT = tl.constexpr(32 - BIN_BITS)


@triton.jit
def order_of(x):
    """An int32 that orders as fp32 ``x`` does; NaN and -inf get the least value of all. Both zeros are one value."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x > float("-inf"), ordered, -2147483648)


@triton.jit
def bin_of(ordered):
    """The first digit of :func:`order_of`, from 0."""
    return (ordered >> BIN_SHIFT) + BINS // 2


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
    query, decoder, folded, zeroed, zeroed_size, rows, queries, query_b, query_l, query_h,
    N: tl.constexpr, N_PAD: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DR: tl.constexpr, RS: tl.constexpr,
    INTERLEAVED: tl.constexpr, TILE_R: tl.constexpr, TILE_D: tl.constexpr, ROWS: tl.constexpr, ZERO: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of dims, tile of latent coordinates, ROWS query tokens); also zeroes the workspace of later kernels."""
    wait_for_previous(PDL)
    d = tl.program_id(0) * TILE_D + tl.arange(0, TILE_D)
    r = tl.program_id(1) * TILE_R + tl.arange(0, TILE_R)
    n = tl.arange(0, N_PAD)
    if ZERO > 0:
        program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
        programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
        for start in range(program * ZERO, zeroed_size, programs * ZERO):
            at = start + tl.arange(0, ZERO)
            tl.store(zeroed + at, tl.zeros((ZERO,), tl.int32), mask=at < zeroed_size)
    other, sign = _partner(d, DR, INTERLEAVED)
    known = (n < N)[:, None] & (d < D)[None, :]
    basis = tl.load(
        decoder + r[:, None, None] * (N * D) + n[None, :, None] * D + d[None, None, :],
        mask=(r < RS)[:, None, None] & known[None, :, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    for i in tl.static_range(ROWS):
        row = tl.program_id(2) * ROWS + i
        if row < rows:
            own = query + (row // queries).to(tl.int64) * query_b + (row % queries) * query_l
            direct = tl.zeros((N_PAD, TILE_D), tl.float32)
            across = tl.zeros((N_PAD, TILE_D), tl.float32)
            for g in tl.static_range(G):
                heads = own + (n * G + g)[:, None] * query_h
                direct += tl.load(heads + d[None, :], mask=known, other=0.0).to(tl.float32)
                if DR > 0:
                    across += tl.load(heads + other[None, :], mask=known, other=0.0).to(tl.float32)
            at = folded + row.to(tl.int64) * (2 * D * RS) + d[None, :] * RS + r[:, None]
            inside = (r < RS)[:, None] & (d < D)[None, :]
            product = tl.sum(basis * direct[None, :, :], axis=1)
            tl.store(at, product.to(folded.dtype.element_ty), mask=inside)
            if DR > 0:
                product = tl.sum(basis * across[None, :, :], axis=1) * sign[None, :]
                tl.store(at + D * RS, product.to(folded.dtype.element_ty), mask=inside)


@triton.jit
def _project_kernel(
    folded, block_cos, block_sin, projected, queries, blocks, capacity, rows_p, args,
    D: tl.constexpr, D_PAD: tl.constexpr, DR: tl.constexpr, RS: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr, UPPER_FN: tl.constexpr, PRECISION: tl.constexpr,
    TILE_B: tl.constexpr, TILE_R: tl.constexpr, TILE_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of blocks, tile of latent coordinates, query token): projected queries, fp32."""
    wait_for_previous(PDL)
    row = tl.program_id(2)
    b = row // queries
    block = tl.program_id(0) * TILE_B + tl.arange(0, TILE_B)
    r = tl.program_id(1) * TILE_R + tl.arange(0, TILE_R)
    if tl.program_id(0) * TILE_B * BLOCK < UPPER_FN(b, row % queries, capacity, args):
        live = (block < blocks)[:, None]
        total = tl.zeros((TILE_B, TILE_R), tl.float32)
        means = (b.to(tl.int64) * rows_p + block[:, None]) * DR
        at = folded + row.to(tl.int64) * (2 * D * RS) + r[None, :]
        for start in tl.static_range(0, D_PAD, TILE_D):
            d = start + tl.arange(0, TILE_D)
            inside = (d < D)[:, None] & (r < RS)[None, :]
            direct = tl.load(at + d[:, None] * RS, mask=inside, other=0.0)
            if DR == 0:
                cos = tl.full((TILE_B, TILE_D), 1.0, tl.float32)
            else:
                turned = live & (d < DR)[None, :]
                cos = tl.load(block_cos + means + d[None, :], mask=turned, other=0.0).to(tl.float32)
                cos = tl.where((d < DR)[None, :], cos, 1.0)
            total = tl.dot(cos.to(direct.dtype), direct, total, input_precision=PRECISION)
            if DR > 0 and start < DR:
                other, _ = _partner(d, DR, INTERLEAVED)
                across = tl.load(at + D * RS + d[:, None] * RS, mask=inside, other=0.0)
                sin = tl.load(block_sin + means + other[None, :], mask=turned, other=0.0).to(direct.dtype)
                total = tl.dot(sin, across, total, input_precision=PRECISION)
        tl.store(
            projected + (row.to(tl.int64) * blocks + block[:, None]) * RS + r[None, :],
            total,
            mask=live & (r < RS)[None, :],
        )


@triton.jit
def _score_kernel(
    codes, scales, projected, ring_slots, slots, scores, counts,
    total, queries, heads, capacity, window, sinks, blocks, ring_p, slots_p, args,
    R: tl.constexpr, RS: tl.constexpr, TILE_R: tl.constexpr, TILE_T: tl.constexpr, BLOCK: tl.constexpr,
    QUANTIZED: tl.constexpr, BLOCKWISE: tl.constexpr, HISTOGRAM: tl.constexpr,
    MASK_FN: tl.constexpr, UPPER_FN: tl.constexpr, LOWER_FN: tl.constexpr, MASKS: tl.constexpr, PER_HEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of tokens within one block, batch): scores for every query token of the call."""
    wait_for_previous(PDL)
    b = tl.program_id(1)
    first = tl.program_id(0) * TILE_T
    t = first + tl.arange(0, TILE_T)
    stop = UPPER_FN(b, 0, capacity, args)
    start = LOWER_FN(b, 0, args)
    for q in range(1, queries):
        stop = tl.maximum(stop, UPPER_FN(b, q, capacity, args))
        start = tl.minimum(start, LOWER_FN(b, q, args))
    never = tl.full((TILE_T,), float("-inf"), tl.float32)
    if (first >= stop) | (first + TILE_T <= start):
        for q in range(queries):
            tl.store(scores + (b * queries + q).to(tl.int64) * total + t, never)
    else:
        held = tl.load(ring_slots + b.to(tl.int64) * ring_p + t % window) == t
        token = b.to(tl.int64) * total + t
        kv = tl.minimum(t, capacity - 1)
        # A tile lies in one block, so one projected query serves it.
        block = first // BLOCK if BLOCKWISE else 0
        scale = tl.full((TILE_T,), 1.0, tl.float32)
        if QUANTIZED:
            scale = tl.load(scales + token).to(tl.float32)
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
            value *= scale
            slot = tl.load(slots + b.to(tl.int64) * slots_p + q)
            kept = (t < sinks) | ((t > slot - window) & (t <= slot))
            value = tl.where(kept, float("inf"), value)
            allowed = (t < capacity) & (held == 0)
            if MASKS:
                if PER_HEAD:
                    any_head = MASK_FN(b, 0, q, kv, args)
                    for h in range(1, heads):
                        any_head = any_head | MASK_FN(b, h, q, kv, args)
                    allowed = allowed & any_head
                else:
                    allowed = allowed & MASK_FN(b, 0, q, kv, args)
            value = tl.where(allowed, value, never)
            tl.store(scores + row * total + t, value)
            if HISTOGRAM:
                ordered = order_of(value)
                at = counts + row * BINS + bin_of(ordered)
                tl.atomic_add(at, 1, mask=value > float("-inf"), sem="relaxed")


@dataclass(frozen=True)
class Workspace:
    """Zeroed scratch of the select kernel: counts per bin and arrival counters, one int32 buffer."""

    buffer: Tensor
    counts: Tensor  # [rows, BINS]
    counters: Tensor  # [rows]

    @staticmethod
    def allocate(rows: int, device: torch.device, zero: bool, extra: int = 0) -> Workspace:
        """``zero=False`` leaves the zeroing to the fold kernel; ``extra`` more integers follow (for a later kernel)."""
        make = torch.zeros if zero else torch.empty
        buffer = make(rows * (BINS.value + 1) + extra, dtype=torch.int32, device=device)
        split = rows * BINS.value
        return Workspace(buffer, buffer[:split], buffer[split : split + rows])


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
    workspace: Workspace | None = None,
) -> Tensor:
    """See ``reference.score``. With a ``workspace``: zeroes it, and counts the scores' first digits into it."""
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

    folded = torch.empty((rows, 2, dim, score_rank), dtype=query.dtype, device=device)
    n_pad = next_power_of_2(kv_heads)
    tile_d = 16 if n_pad <= 32 else 8
    tile_r = max(4, min(16, 8192 // (n_pad * tile_d)))
    # A row of the fold reads the decoder once, from L2: share it among rows where it is large.
    shared = min(4, rows) if kv_heads * dim * score_rank >= 1 << 20 else 1
    zeroed = workspace.buffer if workspace is not None else ring_slots
    _fold_kernel[(triton.cdiv(dim, tile_d), triton.cdiv(score_rank, tile_r), triton.cdiv(rows, shared))](
        query, decoder, folded, zeroed, zeroed.numel(), rows, queries, query.stride(0), query.stride(1), query.stride(2),
        N=kv_heads, N_PAD=n_pad, G=heads // kv_heads, D=dim, DR=rotary_dim, RS=score_rank, INTERLEAVED=interleaved,
        TILE_R=tile_r, TILE_D=tile_d, ROWS=shared, ZERO=0 if workspace is None else 1024, num_warps=4,
        **launch_options(device),
    )  # fmt: skip

    blocks = total // BLOCK if rotary_dim else 1
    projected = torch.empty((rows, blocks, score_rank), dtype=torch.float32, device=device)
    tile_b = 64 if rows * blocks >= 2048 else 32 if blocks > 16 else 16
    tile_r = min(64, max(16, next_power_of_2(score_rank)))
    d_pad = max(16, next_power_of_2(dim))
    _project_kernel[(triton.cdiv(blocks, tile_b), triton.cdiv(score_rank, tile_r), rows)](
        folded, block_cos, block_sin, projected, queries, blocks, capacity,
        block_cos.shape[1] if block_cos.shape[0] > 1 else 0, args,
        D=dim, D_PAD=d_pad, DR=rotary_dim, RS=score_rank, BLOCK=BLOCK, INTERLEAVED=interleaved,
        UPPER_FN=generated.upper_fn, PRECISION="tf32" if half_precision else "ieee",
        TILE_B=tile_b, TILE_R=tile_r, TILE_D=min(64, d_pad), num_warps=4, **launch_options(device),
    )  # fmt: skip

    scores = torch.empty((batch, queries, total), dtype=torch.float32, device=device)
    tile_r = max(16, min(256, next_power_of_2(score_rank)))
    _score_kernel[(total // TILE_T, batch)](
        codes, scales, projected, ring_slots, slots, scores, zeroed if workspace is None else workspace.counts,
        total, queries, heads, capacity, ring_slots.shape[1], sinks, blocks,
        _batch_stride(ring_slots), _batch_stride(slots), args,
        R=rank, RS=score_rank, TILE_R=tile_r, TILE_T=TILE_T, BLOCK=BLOCK,
        QUANTIZED=codes.dtype == torch.int8, BLOCKWISE=rotary_dim > 0, HISTOGRAM=workspace is not None,
        MASK_FN=generated.mask_fn, UPPER_FN=generated.upper_fn, LOWER_FN=generated.lower_fn, MASKS=generated.masks,
        PER_HEAD=Modifier.parse(modifier).mask.uses("h"), num_warps=SCORE_WARPS, **launch_options(device),
    )  # fmt: skip
    return scores


#: Tokens of one program of the score kernel; divides BLOCK.
TILE_T = 64
SCORE_WARPS = 4
