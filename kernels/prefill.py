"""Every cached token rebuilt on a GPU: into memory (``sals::materialize``) or into attention (``sals::reconstruct``).

The head dim is handled as ``D/2`` *pairs*, the two dims that a rotation mixes: a rebuilt key is two tiles ``[T,
D/2]``, and a logit is the sum of two dots, so that rotating is elementwise and nothing is permuted. Dims that do not
rotate pair up with cos 1 and sin 0. Values are two tiles likewise, the low and the high half of the head, which
are also the halves of a byte of 4-bit or 2-bit codes.

Fully rebuilt attention is a matrix product of depth ``R`` per token and head, far more work than attending. Programs
of all heads run over the same tokens at the same time, so that latents come from L2; a rebuilt tile lives in
registers only.

Dimensions and storage as in ``reference.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import codegen, reference
from .dense import (
    LOG2E,
    combine,
    dense_attention,
    flags,
    power_of_two,
    precision,
    rows_last,
    split_count,
)
from .launch import capability, multiprocessors

#: Query rows (tokens times heads of a group) up to which rebuilding each token once a call beats writing it out.
FUSED_ROWS = 64


@triton.jit
def pair_dims(pair, ROTARY: tl.constexpr, ROTARY_DIM: tl.constexpr, D: tl.constexpr):
    """The two dims of each pair."""
    if ROTARY == "interleaved":
        return 2 * pair, 2 * pair + 1
    rotated: tl.constexpr = ROTARY_DIM // 2
    plain: tl.constexpr = D // 2 - rotated
    turns = pair < rotated
    return tl.where(turns, pair, pair + rotated), tl.where(turns, pair + rotated, pair + rotated + plain)


@triton.jit
def _dequantised_values(
    value_codes, value_scales, inside, VALUE_BITS: tl.constexpr, VALUE_GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_T: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Low and high half of ``BLOCK_T`` values, fp32 ``[T, PAIRS]``, from pointers ``[T]`` to each token's head."""
    half: tl.constexpr = D // 2
    pair = tl.arange(0, PAIRS)
    shown = inside[:, None] & (pair < half)[None, :]
    if VALUE_BITS < 8:
        # A byte holds codes of dims `width` apart, those of the low half in its lower four bits.
        width: tl.constexpr = D * VALUE_BITS // 8
        byte = pair if width == half else pair % width
        packed = tl.load(value_codes[:, None] + byte[None, :], mask=shown, other=0).to(tl.int32)
        if width < half:
            packed >>= (VALUE_BITS * (pair // width))[None, :]
        low = (packed & (2**VALUE_BITS - 1)).to(tl.float32)
        high = ((packed >> 4) & (2**VALUE_BITS - 1)).to(tl.float32)
    else:
        low = tl.load(value_codes[:, None] + pair[None, :], mask=shown, other=0).to(tl.float32)
        high = tl.load(value_codes[:, None] + (half + pair)[None, :], mask=shown, other=0).to(tl.float32)
    if VALUE_BITS != 16:
        if half == PAIRS and PAIRS % VALUE_GROUP == 0:
            # Scales once for a group, spread over it in registers.
            groups: tl.constexpr = PAIRS // VALUE_GROUP
            group = tl.arange(0, groups)
            at = value_scales[:, None] + 2 * group[None, :]
            given = inside[:, None] & (group >= 0)[None, :]
            low_step = _spread(tl.load(at, mask=given, other=0.0), BLOCK_T, groups, VALUE_GROUP)
            low_least = _spread(tl.load(at + 1, mask=given, other=0.0), BLOCK_T, groups, VALUE_GROUP)
            high_step = _spread(tl.load(at + 2 * groups, mask=given, other=0.0), BLOCK_T, groups, VALUE_GROUP)
            high_least = _spread(tl.load(at + 2 * groups + 1, mask=given, other=0.0), BLOCK_T, groups, VALUE_GROUP)
        else:
            low_at = value_scales[:, None] + 2 * (pair // VALUE_GROUP)[None, :]
            high_at = value_scales[:, None] + 2 * ((half + pair) // VALUE_GROUP)[None, :]
            low_step = tl.load(low_at, mask=shown, other=0.0).to(tl.float32)
            low_least = tl.load(low_at + 1, mask=shown, other=0.0).to(tl.float32)
            high_step = tl.load(high_at, mask=shown, other=0.0).to(tl.float32)
            high_least = tl.load(high_at + 1, mask=shown, other=0.0).to(tl.float32)
        low = low * low_step + low_least
        high = high * high_step + high_least
    return low, high


@triton.jit
def _spread(x, BLOCK_T: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """``[T, GROUPS] -> [T, GROUPS * SIZE]`` fp32, each element repeated ``SIZE`` times."""
    return tl.reshape(tl.broadcast_to(x.to(tl.float32)[:, :, None], (BLOCK_T, GROUPS, SIZE)), (BLOCK_T, GROUPS * SIZE))


@triton.jit
def _rebuilt_keys(
    codes,
    scales,
    decoder,
    cos,
    sin,
    decoder_stride_r,
    inside,
    QUANTISED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rotated keys of ``BLOCK_T`` tokens as the two sides of each pair, fp32 ``[T, PAIRS]``.

    ``codes``, ``scales``, ``cos``, ``sin [T]`` point to each token's row, ``decoder`` to the head's first column.
    """
    pair = tl.arange(0, PAIRS)
    real = pair < D // 2
    first_dim, second_dim = pair_dims(pair, ROTARY, ROTARY_DIM, D)
    if ROTARY == "interleaved":
        # One product over adjacent columns, parted in registers: loads of every other column would not coalesce.
        column = tl.arange(0, 2 * PAIRS)
        key = tl.zeros((BLOCK_T, 2 * PAIRS), tl.float32)
        for r0 in tl.range(0, RANK, BLOCK_R, num_stages=STAGES):
            rank = r0 + tl.arange(0, BLOCK_R)
            latent = tl.load(codes[:, None] + rank[None, :], mask=inside[:, None] & (rank < RANK)[None, :], other=0)
            columns = tl.load(
                decoder + rank[:, None] * decoder_stride_r + column[None, :],
                mask=(rank < RANK)[:, None] & (column < D)[None, :],
                other=0.0,
            )
            key = tl.dot(latent.to(COMPUTE), columns.to(COMPUTE), key, input_precision=PRECISION)
        first, second = tl.split(tl.reshape(key, (BLOCK_T, PAIRS, 2)))
    else:
        first = tl.zeros((BLOCK_T, PAIRS), tl.float32)
        second = tl.zeros((BLOCK_T, PAIRS), tl.float32)
        for r0 in tl.range(0, RANK, BLOCK_R, num_stages=STAGES):
            rank = r0 + tl.arange(0, BLOCK_R)
            latent = tl.load(codes[:, None] + rank[None, :], mask=inside[:, None] & (rank < RANK)[None, :], other=0)
            latent = latent.to(COMPUTE)
            row = decoder + rank[:, None] * decoder_stride_r
            shown = (rank < RANK)[:, None] & real[None, :]
            first_columns = tl.load(row + first_dim[None, :], mask=shown, other=0.0).to(COMPUTE)
            second_columns = tl.load(row + second_dim[None, :], mask=shown, other=0.0).to(COMPUTE)
            first = tl.dot(latent, first_columns, first, input_precision=PRECISION)
            second = tl.dot(latent, second_columns, second, input_precision=PRECISION)
    if QUANTISED:
        scale = tl.load(scales, mask=inside, other=0.0).to(tl.float32)
        first *= scale[:, None]
        second *= scale[:, None]
    if ROTARY_DIM > 0:
        turns = inside[:, None] & (pair < ROTARY_DIM // 2)[None, :]
        first_cos = tl.load(cos[:, None] + first_dim[None, :], mask=turns, other=1.0).to(tl.float32)
        first_sin = tl.load(sin[:, None] + first_dim[None, :], mask=turns, other=0.0).to(tl.float32)
        second_cos = tl.load(cos[:, None] + second_dim[None, :], mask=turns, other=1.0).to(tl.float32)
        second_sin = tl.load(sin[:, None] + second_dim[None, :], mask=turns, other=0.0).to(tl.float32)
        turned = first * first_cos - second * first_sin
        second = second * second_cos + first * second_sin
        first = turned
    return first, second


@triton.jit
def _materialize_kernel(
    codes,
    scales,
    value_codes,
    value_scales,
    ring_key,
    ring_value,
    ring_slots,
    cos,
    sin,
    decoder,
    value_transform,
    out_key,
    out_value,
    codes_stride_b,
    codes_stride_s,
    scales_stride_b,
    value_codes_stride_b,
    value_codes_stride_s,
    value_codes_stride_n,
    value_scales_stride_b,
    value_scales_stride_s,
    value_scales_stride_n,
    ring_stride_b,
    ring_stride_w,
    ring_stride_n,
    rows_stride_p,
    rows_stride_s,
    slots_stride_p,
    decoder_stride_r,
    transform_stride,
    window,
    capacity,
    kv_heads,
    QUANTISED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    # The head is the fastest axis: heads share the latents.
    n, tile, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch = b.to(tl.int64)
    compute: tl.constexpr = out_key.dtype.element_ty
    kv = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = kv < capacity
    wide = kv.to(tl.int64)
    pair = tl.arange(0, PAIRS)
    real = (pair < D // 2)[None, :]
    first_dim, second_dim = pair_dims(pair, ROTARY, ROTARY_DIM, D)
    first, second = _rebuilt_keys(
        codes + batch * codes_stride_b + wide * codes_stride_s,
        scales + batch * scales_stride_b + kv,
        decoder + n * D,
        cos + batch * rows_stride_p + wide * rows_stride_s,
        sin + batch * rows_stride_p + wide * rows_stride_s,
        decoder_stride_r,
        inside,
        QUANTISED,
        ROTARY,
        ROTARY_DIM,
        RANK,
        BLOCK_R,
        D,
        PAIRS,
        BLOCK_T,
        compute,
        PRECISION,
        STAGES,
    )
    entry = kv % window
    exact = inside & (tl.load(ring_slots + batch * slots_stride_p + entry, mask=inside, other=-1) == kv)
    ring_at = batch * ring_stride_b + entry * ring_stride_w + n * ring_stride_n
    out_at = ((batch * capacity + wide) * kv_heads + n) * D
    from_ring = exact[:, None] & real
    stored = inside[:, None] & real
    ring_first = tl.load(ring_key + ring_at[:, None] + first_dim[None, :], mask=from_ring, other=0.0)
    ring_second = tl.load(ring_key + ring_at[:, None] + second_dim[None, :], mask=from_ring, other=0.0)
    first = tl.where(from_ring, ring_first.to(tl.float32), first)
    second = tl.where(from_ring, ring_second.to(tl.float32), second)
    tl.store(out_key + out_at[:, None] + first_dim[None, :], first.to(compute), mask=stored)
    tl.store(out_key + out_at[:, None] + second_dim[None, :], second.to(compute), mask=stored)

    low, high = _dequantised_values(
        value_codes + batch * value_codes_stride_b + wide * value_codes_stride_s + n * value_codes_stride_n,
        value_scales + batch * value_scales_stride_b + wide * value_scales_stride_s + n * value_scales_stride_n,
        inside,
        VALUE_BITS,
        VALUE_GROUP,
        D,
        BLOCK_T,
        PAIRS,
    )
    for column in tl.range(0, D, CHUNK, num_stages=1):
        dim = column + tl.arange(0, CHUNK)
        value = _untransformed(low, high, value_transform, transform_stride, dim, compute, D, PAIRS, PRECISION)
        value_from_ring = exact[:, None] & (dim < D)[None, :]
        ring = tl.load(ring_value + ring_at[:, None] + dim[None, :], mask=value_from_ring, other=0.0)
        value = tl.where(value_from_ring, ring.to(tl.float32), value)
        value_stored = inside[:, None] & (dim < D)[None, :]
        tl.store(out_value + out_at[:, None] + dim[None, :], value.to(compute), mask=value_stored)


@triton.jit
def _untransformed(
    low, high, value_transform, stride, dim, DTYPE: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns ``dim`` of ``[low, high] @ value_transform.T``: ``[M, PAIRS]`` twice to ``[M, dims]``."""
    pair = tl.arange(0, PAIRS)
    at = value_transform + dim[None, :] * stride + pair[:, None]
    shown = (pair < D // 2)[:, None] & (dim < D)[None, :]
    out = tl.dot(low.to(DTYPE), tl.load(at, mask=shown, other=0.0).to(DTYPE), input_precision=PRECISION)
    return tl.dot(high.to(DTYPE), tl.load(at + D // 2, mask=shown, other=0.0).to(DTYPE), out, input_precision=PRECISION)


@triton.jit
def _reconstruct_kernel(
    query,
    codes,
    scales,
    value_codes,
    value_scales,
    ring_key,
    ring_value,
    ring_slots,
    cos,
    sin,
    decoder,
    value_transform,
    partial,
    partial_stats,
    args,
    query_stride_b,
    query_stride_l,
    query_stride_h,
    codes_stride_b,
    codes_stride_s,
    scales_stride_b,
    value_codes_stride_b,
    value_codes_stride_s,
    value_codes_stride_n,
    value_scales_stride_b,
    value_scales_stride_s,
    value_scales_stride_n,
    ring_stride_b,
    ring_stride_w,
    ring_stride_n,
    rows_stride_p,
    rows_stride_s,
    slots_stride_p,
    decoder_stride_r,
    transform_stride,
    window,
    capacity,
    queries,
    heads,
    scale,
    MASK_FN: tl.constexpr,
    SCORE_FN: tl.constexpr,
    UPPER_FN: tl.constexpr,
    LOWER_FN: tl.constexpr,
    MASKS: tl.constexpr,
    MODIFIES: tl.constexpr,
    QUANTISED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    # The head is the fastest axis: heads share the latents. The last split is the exact ring.
    n, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch = b.to(tl.int64)
    compute: tl.constexpr = query.dtype.element_ty
    row = tl.arange(0, BLOCK_M)
    stored = row < queries * GROUP
    q = tl.minimum(row // GROUP, queries - 1)
    h = n * GROUP + row % GROUP
    pair = tl.arange(0, PAIRS)
    first_dim, second_dim = pair_dims(pair, ROTARY, ROTARY_DIM, D)
    real = pair < D // 2
    query_at = query + batch * query_stride_b + q * query_stride_l + h * query_stride_h
    shown = stored[:, None] & real[None, :]
    query_first = tl.load(query_at[:, None] + first_dim[None, :], mask=shown, other=0.0)
    query_second = tl.load(query_at[:, None] + second_dim[None, :], mask=shown, other=0.0)
    slots = ring_slots + batch * slots_stride_p
    ring_key += batch * ring_stride_b + n * ring_stride_n
    ring_value += batch * ring_stride_b + n * ring_stride_n
    token = tl.arange(0, BLOCK_T)
    line = ((batch * queries + q) * heads + h) * (SPLITS + 1) + split
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if split == SPLITS:
        dim = tl.arange(0, BLOCK_D)
        out = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for first_entry in range(0, window, BLOCK_T):
            entry = first_entry + token
            kv = tl.load(slots + entry, mask=entry < window, other=-1)
            held = (kv >= 0) & (kv < capacity)
            at = entry[:, None] * ring_stride_w
            key_shown = held[:, None] & real[None, :]
            first = tl.load(ring_key + at + first_dim[None, :], mask=key_shown, other=0.0)
            second = tl.load(ring_key + at + second_dim[None, :], mask=key_shown, other=0.0)
            value = tl.load(ring_value + at + dim[None, :], mask=held[:, None] & (dim < D)[None, :], other=0.0)
            weights, decay, top, total = _weigh(
                query_first, query_second, first, second, top, total, b, h, q, kv, held, args, scale, capacity,
                MASK_FN, SCORE_FN, MASKS, MODIFIES, PRECISION,
            )  # fmt: skip
            out = tl.dot(weights.to(compute), value, out * decay[:, None], input_precision=PRECISION)
        part_at = partial + line[:, None] * D + dim[None, :]
        tl.store(part_at, out, mask=stored[:, None] & (dim < D)[None, :])
    else:
        stop = tl.max(UPPER_FN(b, q, capacity, args) + q * 0)
        start = tl.min(LOWER_FN(b, q, args) + q * 0) // BLOCK_T
        tiles = tl.maximum(tl.cdiv(stop, BLOCK_T) - start, 0)
        share = tl.cdiv(tiles, SPLITS)
        first_tile = start + tl.minimum(split * share, tiles)
        last_tile = start + tl.minimum((split + 1) * share, tiles)
        low_acc = tl.zeros((BLOCK_M, PAIRS), tl.float32)
        high_acc = tl.zeros((BLOCK_M, PAIRS), tl.float32)
        codes += batch * codes_stride_b
        scales += batch * scales_stride_b
        value_codes += batch * value_codes_stride_b + n * value_codes_stride_n
        value_scales += batch * value_scales_stride_b + n * value_scales_stride_n
        cos += batch * rows_stride_p
        sin += batch * rows_stride_p
        for tile in range(first_tile, last_tile):
            kv = tile * BLOCK_T + token
            wide = kv.to(tl.int64)
            held = kv < capacity
            held = held & (tl.load(slots + kv % window, mask=held, other=-1) != kv)
            first, second = _rebuilt_keys(
                codes + wide * codes_stride_s, scales + kv, decoder + n * D, cos + wide * rows_stride_s,
                sin + wide * rows_stride_s, decoder_stride_r, held, QUANTISED, ROTARY, ROTARY_DIM, RANK, BLOCK_R,
                D, PAIRS, BLOCK_T, compute, PRECISION, STAGES,
            )  # fmt: skip
            weights, decay, top, total = _weigh(
                query_first, query_second, first.to(compute), second.to(compute), top, total, b, h, q, kv, held, args,
                scale, capacity, MASK_FN, SCORE_FN, MASKS, MODIFIES, PRECISION,
            )  # fmt: skip
            low, high = _dequantised_values(
                value_codes + wide * value_codes_stride_s, value_scales + wide * value_scales_stride_s, held,
                VALUE_BITS, VALUE_GROUP, D, BLOCK_T, PAIRS,
            )  # fmt: skip
            weights = weights.to(compute)
            low_acc = tl.dot(weights, low.to(compute), low_acc * decay[:, None], input_precision=PRECISION)
            high_acc = tl.dot(weights, high.to(compute), high_acc * decay[:, None], input_precision=PRECISION)
        for column in tl.range(0, D, CHUNK, num_stages=1):
            dim = column + tl.arange(0, CHUNK)
            out = _untransformed(
                low_acc, high_acc, value_transform, transform_stride, dim, tl.float32, D, PAIRS, PRECISION
            )
            part_at = partial + line[:, None] * D + dim[None, :]
            tl.store(part_at, out, mask=stored[:, None] & (dim < D)[None, :])
    tl.store(partial_stats + line * 2, top, mask=stored)
    tl.store(partial_stats + line * 2 + 1, total, mask=stored)


@triton.jit
def _weigh(
    query_first, query_second, first, second, top, total, b, h, q, kv, held, args, scale, capacity,
    MASK_FN: tl.constexpr, SCORE_FN: tl.constexpr, MASKS: tl.constexpr, MODIFIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Softmax weights (base 2, unnormalised) of rows against keys given as pairs; also how much earlier sums decay."""
    logits = tl.dot(query_first, tl.trans(first), input_precision=PRECISION)
    logits = tl.dot(query_second, tl.trans(second), logits, input_precision=PRECISION) * scale
    safe = tl.minimum(tl.maximum(kv, 0), capacity - 1)[None, :]
    if MODIFIES:
        logits = SCORE_FN(logits, b, h[:, None], q[:, None], safe, args)
    valid = held[None, :]
    if MASKS:
        valid = valid & MASK_FN(b, h[:, None], q[:, None], safe, args)
    logits = tl.where(valid, logits * LOG2E, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits - base[:, None])
    decay = tl.exp2(top - base)
    return weights, decay, new_top, total * decay + tl.sum(weights, 1)


def _storage(
    codes: Tensor,
    scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    ring_key: Tensor,
    ring_slots: Tensor,
    cos: Tensor,
    decoder: Tensor,
    value_transform: Tensor,
    rotary: str,
) -> tuple[list[int], dict[str, object]]:
    """The strides and the constants that describe one site's storage to both kernels."""
    head_dim = ring_key.shape[-1]
    shared = cos.shape[0] == 1  # positions shared by the batch
    strides = [
        *codes.stride()[:2],
        scales.stride(0) if scales.numel() else 0,
        *value_codes.stride()[:3],
        *(value_scales.stride()[:3] if value_scales.numel() else (0, 0, 0)),
        *ring_key.stride()[:3],
        0 if shared else cos.stride(0),
        cos.stride(1),
        0 if ring_slots.shape[0] == 1 else ring_slots.stride(0),
        decoder.stride(0),
        value_transform.stride(0),
    ]
    if value_codes.dtype != torch.uint8:
        bits = 16
    else:
        bits = 8 * value_codes.shape[-1] // head_dim
    constants: dict[str, object] = {
        "QUANTISED": codes.dtype == torch.int8,
        "ROTARY": rotary,
        "ROTARY_DIM": 0 if rotary == "none" else cos.shape[-1],
        "RANK": codes.shape[-1],
        "D": head_dim,
        "PAIRS": power_of_two(head_dim // 2),
        "BLOCK_D": power_of_two(head_dim),
        "CHUNK": min(64, power_of_two(head_dim)),
        "VALUE_BITS": bits,
        "VALUE_GROUP": reference.value_group(head_dim, bits),
        "PRECISION": precision(ring_key.dtype),
    }
    return strides, constants


def rebuild_tiling(head_dim: int, rank: int, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """Tile and launch sizes of both kernels: tokens, latent coordinates a step."""
    on_amd = capability(device) == 0
    row_bytes = power_of_two(head_dim) * dtype.itemsize
    block_t = 128 if row_bytes <= 256 else 64 if row_bytes <= 512 else 32
    return {
        "BLOCK_T": min(block_t, 8192 // row_bytes) if on_amd else block_t,
        "BLOCK_R": min(64, power_of_two(rank)),
        "STAGES": 2 if on_amd or row_bytes > 512 else 3,
        "num_warps": 8,
    }


def materialize(
    codes: Tensor,
    scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    ring_key: Tensor,
    ring_value: Tensor,
    ring_slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    decoder: Tensor,
    value_transform: Tensor,
    capacity: int,
    rotary: str,
    tiles: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``reference.materialize``."""
    batch, window, kv_heads, head_dim = ring_key.shape
    key = ring_key.new_empty((batch, capacity, kv_heads, head_dim))
    value = ring_value.new_empty((batch, capacity, kv_heads, head_dim))
    if key.numel() == 0:
        return key, value
    strides, constants = _storage(
        codes, scales, value_codes, value_scales, ring_key, ring_slots, cos, decoder, value_transform, rotary
    )
    tiles = tiles or rebuild_tiling(head_dim, codes.shape[-1], ring_key.dtype, codes.device)
    _materialize_kernel[(kv_heads, triton.cdiv(capacity, tiles["BLOCK_T"]), batch)](
        codes,
        scales if scales.numel() else codes,
        value_codes,
        value_scales if value_scales.numel() else value_codes,
        ring_key,
        ring_value,
        ring_slots,
        cos,
        sin,
        decoder,
        value_transform,
        key,
        value,
        *strides,
        window,
        capacity,
        kv_heads,
        **constants,
        **tiles,
    )
    return key, value


def reconstruct(
    query: Tensor,
    codes: Tensor,
    scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    ring_key: Tensor,
    ring_value: Tensor,
    ring_slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    decoder: Tensor,
    value_transform: Tensor,
    modifier: str,
    tensors: Sequence[Tensor],
    integers: Sequence[int],
    capacity: int,
    scale: float,
    rotary: str,
    sink_logits: Tensor | None = None,
    tiles: dict[str, int] | None = None,
) -> Tensor:
    """See ``reference.reconstruct``. Few query rows: one fused kernel. Many: tokens are rebuilt once, then attended."""
    batch, queries, heads, head_dim = query.shape
    kv_heads, window = ring_key.shape[2], ring_key.shape[1]
    group = heads // kv_heads
    if queries * group > FUSED_ROWS:
        key, value = materialize(
            codes, scales, value_codes, value_scales, ring_key, ring_value, ring_slots, cos, sin, decoder,
            value_transform, capacity, rotary,
        )  # fmt: skip
        return dense_attention(query, key, value, modifier, tensors, integers, scale, sink_logits)
    out = query.new_empty(query.shape)
    if out.numel() == 0:
        return out
    query = rows_last(query)
    strides, constants = _storage(
        codes, scales, value_codes, value_scales, ring_key, ring_slots, cos, decoder, value_transform, rotary
    )
    tiles = tiles or rebuild_tiling(head_dim, codes.shape[-1], query.dtype, codes.device)
    splits = split_count(
        batch * kv_heads, triton.cdiv(capacity, tiles["BLOCK_T"]), 2 * multiprocessors(query.device), 1
    )
    parts = splits + 1
    partial = torch.empty((batch, queries, heads, parts, head_dim), dtype=torch.float32, device=query.device)
    stats = torch.empty((batch, queries, heads, parts, 2), dtype=torch.float32, device=query.device)
    generated = flags(modifier, tensors)
    del generated["INTERVAL"]  # each tile is masked: next to rebuilding, the mask costs nothing
    _reconstruct_kernel[(kv_heads, parts, batch)](
        query,
        codes,
        scales if scales.numel() else codes,
        value_codes,
        value_scales if value_scales.numel() else value_codes,
        ring_key,
        ring_value,
        ring_slots,
        cos,
        sin,
        decoder,
        value_transform,
        partial,
        stats,
        codegen.arguments(tensors, integers),
        *query.stride()[:3],
        *strides,
        window,
        capacity,
        queries,
        heads,
        float(scale),
        **generated,
        **constants,
        GROUP=group,
        BLOCK_M=power_of_two(queries * group),
        SPLITS=splits,
        **tiles,
    )
    combine(partial, stats, out, sink_logits)
    return out
