"""Triton kernels of ``sals::record_rows`` and ``sals::encode``: what a call's new tokens leave in the cache.

Dimensions and storage are those of ``reference.py``. The first launch splits its programs between *latent* jobs (a
tile of tokens x a tile of latent coordinates x a part of ``E``: a decode call is bound by the encoder's bytes, so it
is cut fine) and *value* jobs (a tile of (token, KV head) rows: Hadamard transform, quantisation, exact ring). A
latent's int8 scale needs its whole row, so a second launch sums the parts, in a fixed order, and quantises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import (
    after_previous,
    batch_stride,
    dependent_launch,
    next_power_of_2,
    require_contiguous,
    row_major,
    stages,
)
from .reference import BLOCK, value_group


@triton.jit
def round_half_even(x):
    """As ``torch.round``, for |x| < 2**22."""
    return (x + 12582912.0) - 12582912.0


# ---- record_rows -----------------------------------------------------------------------------------------------------


@triton.jit
def _record_rows_kernel(
    cos, sin, block_cos, block_sin, ring_slots, new_cos, new_sin, slots,
    total, queries, window, cos_b, cos_l, sin_b, sin_l, slots_p,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr, MEANS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, position batch): writes the token's row and ring entry; with MEANS also the mean of its block."""
    after_previous(PDL)
    token = tl.program_id(0)
    p = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + p * slots_p + token)
    if token >= queries - window:
        tl.store(ring_slots + p * window + slot % window, slot.to(tl.int32))
    if DIM > 0:
        d = tl.arange(0, DIM_PAD)
        inside = d < DIM
        row = (p * total + slot) * DIM
        tl.store(cos + row + d, tl.load(new_cos + p * cos_b + token * cos_l + d, mask=inside), mask=inside)
        tl.store(sin + row + d, tl.load(new_sin + p * sin_b + token * sin_l + d, mask=inside), mask=inside)
        if MEANS:
            # Rows of this call are taken from the inputs: other programs may not have stored them yet.
            first = slot // BLOCK * BLOCK
            t = first + tl.arange(0, BLOCK)
            stored = (p * total + t[:, None]) * DIM + d[None, :]
            rows_cos = tl.load(cos + stored, mask=inside[None, :], other=0.0).to(tl.float32)
            rows_sin = tl.load(sin + stored, mask=inside[None, :], other=0.0).to(tl.float32)
            for other in range(queries):
                here = t == tl.load(slots + p * slots_p + other)
                fresh_cos = tl.load(new_cos + p * cos_b + other * cos_l + d, mask=inside, other=0.0)
                fresh_sin = tl.load(new_sin + p * sin_b + other * sin_l + d, mask=inside, other=0.0)
                fresh_cos = fresh_cos.to(cos.dtype.element_ty).to(tl.float32)
                fresh_sin = fresh_sin.to(sin.dtype.element_ty).to(tl.float32)
                rows_cos = tl.where(here[:, None], fresh_cos[None, :], rows_cos)
                rows_sin = tl.where(here[:, None], fresh_sin[None, :], rows_sin)
            _store_means(block_cos, block_sin, rows_cos, rows_sin, p * (total // BLOCK) + first // BLOCK, d, DIM)


@triton.jit
def _block_means_kernel(
    cos, sin, block_cos, block_sin,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of any position batch): the means over its rows."""
    after_previous(PDL)
    block = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DIM_PAD)
    stored = (block * BLOCK + tl.arange(0, BLOCK)[:, None]) * DIM + d[None, :]
    inside = (d < DIM)[None, :]
    rows_cos = tl.load(cos + stored, mask=inside, other=0.0).to(tl.float32)
    rows_sin = tl.load(sin + stored, mask=inside, other=0.0).to(tl.float32)
    _store_means(block_cos, block_sin, rows_cos, rows_sin, block, d, DIM)


@triton.jit
def _store_means(block_cos, block_sin, rows_cos, rows_sin, block, d, DIM: tl.constexpr):
    """Means over the rows that were written: an unwritten row is all zeros, which no rotation is."""
    written = (tl.max(tl.maximum(tl.abs(rows_cos), tl.abs(rows_sin)), axis=1) > 0).to(tl.float32)
    count = tl.maximum(tl.sum(written, axis=0), 1.0)
    tl.store(block_cos + block * DIM + d, tl.sum(rows_cos, axis=0) / count, mask=d < DIM)
    tl.store(block_sin + block * DIM + d, tl.sum(rows_sin, axis=0) / count, mask=d < DIM)


def record_rows(
    cos: Tensor,
    sin: Tensor,
    block_cos: Tensor,
    block_sin: Tensor,
    ring_slots: Tensor,
    new_cos: Tensor,
    new_sin: Tensor,
    slots: Tensor,
) -> None:
    """See ``reference.record_rows``."""
    require_contiguous(cos=cos, sin=sin, block_cos=block_cos, block_sin=block_sin, ring_slots=ring_slots)
    batch, queries = slots.shape
    new_cos, new_sin, slots = row_major(new_cos, 1), row_major(new_sin, 1), row_major(slots, 1)
    total, dim = cos.shape[1], cos.shape[2]
    pad = next_power_of_2(max(dim, 1))
    means = queries <= 16
    _record_rows_kernel[(queries, batch)](
        cos, sin, block_cos, block_sin, ring_slots, new_cos, new_sin, slots,
        total, queries, ring_slots.shape[1],
        batch_stride(new_cos), new_cos.stride(1), batch_stride(new_sin), new_sin.stride(1), batch_stride(slots),
        DIM=dim, DIM_PAD=pad, BLOCK=BLOCK, MEANS=means, num_warps=8,
        **dependent_launch(cos.device),
    )  # fmt: skip
    if not means and dim:
        _block_means_kernel[(cos.shape[0] * (total // BLOCK),)](
            cos, sin, block_cos, block_sin, DIM=dim, DIM_PAD=pad, BLOCK=BLOCK, num_warps=4,
            **dependent_launch(cos.device),
        )  # fmt: skip


# ---- encode ----------------------------------------------------------------------------------------------------------


@triton.jit
def _encode_kernel(
    value_codes, value_scales, ring_key, ring_value, key_pre, key, value, encoder, value_transform, slots, parts,
    tokens, queries, total, window, slots_p,
    pre_b, pre_l, key_b, key_l, key_n, value_b, value_l, value_n,
    E: tl.constexpr, R: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_R: tl.constexpr, TILE_E: tl.constexpr, SPLIT_E: tl.constexpr, TILE_V: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (job)."""
    after_previous(PDL)
    encode_job(
        value_codes, value_scales, ring_key, ring_value, key_pre, key, value, encoder, value_transform, slots, parts,
        tl.program_id(0), tokens, queries, total, window, slots_p,
        pre_b, pre_l, key_b, key_l, key_n, value_b, value_l, value_n,
        E, R, N, D, D_PAD, GROUP, BITS, TILE_M, TILE_R, TILE_E, SPLIT_E, TILE_V, PRECISION,
    )  # fmt: skip


@triton.jit
def encode_job(
    value_codes, value_scales, ring_key, ring_value, key_pre, key, value, encoder, value_transform, slots, parts,
    job, tokens, queries, total, window, slots_p,
    pre_b, pre_l, key_b, key_l, key_n, value_b, value_l, value_n,
    E: tl.constexpr, R: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_R: tl.constexpr, TILE_E: tl.constexpr, SPLIT_E: tl.constexpr, TILE_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """First the latent jobs, then the value jobs."""
    R_TILES: tl.constexpr = (R + TILE_R - 1) // TILE_R
    latent_jobs = tl.cdiv(tokens, TILE_M) * (R_TILES * SPLIT_E)
    if job < latent_jobs:
        _encode_latents(
            key_pre, encoder, parts, job, tokens, queries, pre_b, pre_l,
            E, R, R_TILES, TILE_M, TILE_R, TILE_E, SPLIT_E, PRECISION,
        )  # fmt: skip
    else:
        _encode_values(
            value_codes, value_scales, ring_key, ring_value, key, value, value_transform, slots,
            (job - latent_jobs) * TILE_V + tl.arange(0, TILE_V),
            tokens, queries, total, window, slots_p, key_b, key_l, key_n, value_b, value_l, value_n,
            N, D, D_PAD, GROUP, BITS, TILE_V, PRECISION,
        )  # fmt: skip


@triton.jit
def _encode_latents(
    key_pre, encoder, parts, program, tokens, queries, pre_b, pre_l,
    E: tl.constexpr, R: tl.constexpr, R_TILES: tl.constexpr,
    TILE_M: tl.constexpr, TILE_R: tl.constexpr, TILE_E: tl.constexpr, SPLIT_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of a tile of latents."""
    job = program % (R_TILES * SPLIT_E)
    m = program // (R_TILES * SPLIT_E) * TILE_M + tl.arange(0, TILE_M)
    live = m < tokens
    r = (job % R_TILES) * TILE_R + tl.arange(0, TILE_R)
    part = job // R_TILES
    E_PART: tl.constexpr = ((E + SPLIT_E - 1) // SPLIT_E + TILE_E - 1) // TILE_E * TILE_E
    row = key_pre + (m // queries).to(tl.int64) * pre_b + (m % queries) * pre_l
    latent = tl.zeros((TILE_M, TILE_R), tl.float32)
    for start in range(0, E_PART, TILE_E):
        e = part * E_PART + start + tl.arange(0, TILE_E)
        rows = tl.load(row[:, None] + e[None, :], mask=live[:, None] & (e < E)[None, :], other=0.0)
        basis = tl.load(encoder + e[:, None] * R + r[None, :], mask=(e < E)[:, None] & (r < R)[None, :], other=0.0)
        latent = tl.dot(rows, basis.to(rows.dtype), latent, input_precision=PRECISION)
    here = parts + (part * tokens + m[:, None]).to(tl.int64) * R + r[None, :]
    tl.store(here, latent, mask=live[:, None] & (r < R)[None, :])


@triton.jit
def _quantize_kernel(
    parts, codes, scales, slots, tokens, queries, total, slots_p,
    R: tl.constexpr, R_PAD: tl.constexpr, SPLIT_E: tl.constexpr, QUANTIZED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token)."""
    after_previous(PDL)
    quantize(
        parts, codes, scales, slots, tl.program_id(0), tokens, queries, total, slots_p, R, R_PAD, SPLIT_E, QUANTIZED
    )


@triton.jit
def quantize(
    parts, codes, scales, slots, m, tokens, queries, total, slots_p,
    R: tl.constexpr, R_PAD: tl.constexpr, SPLIT_E: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """A token's latent: the sum of its parts, quantised."""
    b = (m // queries).to(tl.int64)
    slot = tl.load(slots + b * slots_p + m % queries)
    r = tl.arange(0, R_PAD)
    latent = tl.zeros((R_PAD,), tl.float32)
    for part in tl.static_range(SPLIT_E):
        latent += tl.load(parts + (part * tokens + m).to(tl.int64) * R + r, mask=r < R, other=0.0)
    target = b * total + slot
    if QUANTIZED:
        scale = tl.maximum(tl.max(tl.abs(latent), axis=0) / 127.0, 5.9604644775390625e-08).to(tl.float16)
        latent = round_half_even(latent / scale.to(tl.float32))
        latent = tl.minimum(tl.maximum(latent, -127.0), 127.0)
        tl.store(scales + target, scale)
    tl.store(codes + target * R + r, latent.to(codes.dtype.element_ty), mask=r < R)


@triton.jit
def _encode_values(
    value_codes, value_scales, ring_key, ring_value, key, value, value_transform, slots, rows,
    tokens, queries, total, window, slots_p, key_b, key_l, key_n, value_b, value_l, value_n,
    N: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    TILE_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows are (token, KV head): the exact ring, and the transformed and quantised values."""
    m = rows // N
    n = rows % N
    live = m < tokens
    b = (m // queries).to(tl.int64)
    token = m % queries
    slot = tl.load(slots + b * slots_p + token, mask=live, other=0)
    d = tl.arange(0, D_PAD)
    inside = live[:, None] & (d < D)[None, :]
    exact_value = tl.load(
        value + (b * value_b + token * value_l + n * value_n)[:, None] + d[None, :], mask=inside, other=0.0
    )
    # -- the exact ring: the call's last `window` tokens
    in_ring = inside & (token >= queries - window)[:, None]
    exact_key = tl.load(key + (b * key_b + token * key_l + n * key_n)[:, None] + d[None, :], mask=in_ring, other=0.0)
    ring_row = ((b * window + slot % window) * N + n)[:, None] * D + d[None, :]
    tl.store(ring_key + ring_row, exact_key.to(ring_key.dtype.element_ty), mask=in_ring)
    tl.store(ring_value + ring_row, exact_value.to(ring_value.dtype.element_ty), mask=in_ring)
    # -- transform and quantise
    both = (d < D)[:, None] & (d < D)[None, :]
    transform = tl.load(value_transform + d[:, None] * D + d[None, :], mask=both, other=0.0).to(tl.float32)
    moved = tl.dot(exact_value.to(tl.float32), transform, input_precision=PRECISION)
    stored = (b * total + slot) * N + n
    if BITS == 0:
        tl.store(value_codes + stored[:, None] * D + d[None, :], moved.to(value_codes.dtype.element_ty), mask=inside)
    else:
        GROUPS: tl.constexpr = D_PAD // GROUP
        grouped = tl.reshape(moved, (TILE_V, GROUPS, GROUP))
        LEVELS: tl.constexpr = 2.0**BITS - 1.0
        low, high = tl.min(grouped, axis=2), tl.max(grouped, axis=2)
        if BITS == 2:
            low, high = _fit_levels(grouped, low, high, GROUP)
        low, step = _scale(low, high, LEVELS)
        levels = tl.reshape(_nearest(grouped, low, step, LEVELS), (TILE_V, D_PAD))
        g = tl.arange(0, GROUPS)
        scale_at = value_scales + (stored[:, None] * (D // GROUP) + g[None, :]) * 2
        has_scale = live[:, None] & (g < D // GROUP)[None, :]
        tl.store(scale_at, step, mask=has_scale)
        tl.store(scale_at + 1, low, mask=has_scale)
        if BITS == 8:
            tl.store(value_codes + stored[:, None] * D + d[None, :], levels.to(tl.uint8), mask=inside)
        else:
            # Dims WIDTH apart share byte j. A product with a matrix of 0, 1 and powers of 2**BITS brings them together
            # wherever a part begins among the groups; levels and bytes are exact in fp16 with fp32 sums.
            PARTS: tl.constexpr = 8 // BITS
            WIDTH: tl.constexpr = D // PARTS
            WIDTH_PAD: tl.constexpr = D_PAD // PARTS if D_PAD // PARTS > 16 else 16
            j = tl.arange(0, WIDTH_PAD)
            packing = tl.where(d[:, None] == j[None, :], 1.0, 0.0)
            for part in tl.static_range(1, PARTS):
                packing += tl.where(d[:, None] == j[None, :] + part * WIDTH, 2.0 ** (BITS * part), 0.0)
            packed = tl.dot(levels.to(tl.float16), packing.to(tl.float16))
            at = value_codes + stored[:, None] * WIDTH + j[None, :]
            tl.store(at, packed.to(tl.int32).to(tl.uint8), mask=live[:, None] & (j < WIDTH)[None, :])


@triton.jit
def _scale(low, high, LEVELS: tl.constexpr):
    """Lowest level and step, in the fp16 that is stored, so that codes fit it."""
    low = low.to(tl.float16)
    step = (high - low.to(tl.float32)) / LEVELS
    return low, tl.maximum(step, 5.9604644775390625e-08).to(tl.float16)


@triton.jit
def _nearest(grouped, low, step, LEVELS: tl.constexpr):
    """Codes of ``grouped [M, groups, GROUP]``, as fp32."""
    codes = (grouped - low.to(tl.float32)[:, :, None]) / step.to(tl.float32)[:, :, None]
    return tl.minimum(tl.maximum(round_half_even(codes), 0.0), LEVELS)


@triton.jit
def _fit_levels(grouped, low, high, GROUP: tl.constexpr):
    """The lowest and the highest of four levels, fitted as by ``reference._two_bit_levels``."""
    margin = (high - low) / 8.0
    low, step = _scale(low + margin, high - margin, 3.0)
    codes = _nearest(grouped, low, step, 3.0)
    code_mean = tl.sum(codes, axis=2) / GROUP
    mean = tl.sum(grouped, axis=2) / GROUP
    off = codes - code_mean[:, :, None]
    spread = tl.sum(off * off, axis=2)
    slope = tl.sum(off * (grouped - mean[:, :, None]), axis=2) / tl.maximum(spread, 1.0 / 32)
    slope = tl.where(spread > 0, slope, step.to(tl.float32))
    low = mean - slope * code_mean
    return low, low + 3.0 * slope


@dataclass(frozen=True)
class Jobs:
    """How a call's encoding is cut: the programs of its two launches, and their arguments."""

    jobs: int
    tokens: int
    parts: Tensor
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    quantize_arguments: tuple[Any, ...]
    quantize_constants: dict[str, Any]
    stages: int

    def own_constants(self) -> dict[str, Any]:
        """The constants of an encoding job that a projection does not share, by their names in a common kernel."""
        shared = {"N", "D", "D_PAD", "PRECISION"}
        renamed = {"TILE_M": "ENCODE_M", "TILE_R": "ENCODE_R", "TILE_E": "ENCODE_E"}
        return {renamed.get(name, name): value for name, value in self.constants.items() if name not in shared}


def plan_encode(
    codes: Tensor,
    scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    ring_key: Tensor,
    ring_value: Tensor,
    key_pre: Tensor,
    key: Tensor,
    value: Tensor,
    encoder: Tensor,
    value_transform: Tensor,
    slots: Tensor,
) -> Jobs:
    """Arguments as of ``reference.encode``."""
    require_contiguous(
        codes=codes, scales=scales, value_codes=value_codes, value_scales=value_scales, ring_key=ring_key,
        ring_value=ring_value,
    )  # fmt: skip
    batch, queries, kv_heads, dim = key_pre.shape
    joint, rank = encoder.shape
    tokens = batch * queries
    key_pre, key, value = row_major(key_pre, 2), row_major(key, 1), row_major(value, 1)
    encoder, value_transform, slots = encoder.contiguous(), value_transform.contiguous(), row_major(slots, 1)
    bits = 8 * value_codes.shape[-1] // dim if value_codes.dtype == torch.uint8 else 0
    half_precision = key_pre.dtype != torch.float32
    decode = tokens <= 64
    tile_m = 16 if tokens <= 16 else 32 if decode else 64
    tile_r = min(32 if decode else 64, max(16, next_power_of_2(rank)))
    tile_e = max(16, min(128 if decode else 64, next_power_of_2(joint)))
    split = max(1, min(8, joint // 256)) if decode else 1
    tiles = -(-tokens // tile_m)
    tile_v = 16 if decode else 32
    parts = torch.empty((split, tokens, rank), dtype=torch.float32, device=codes.device)
    total, slots_p = codes.shape[1], batch_stride(slots)
    return Jobs(
        jobs=tiles * (-(-rank // tile_r)) * split + -(-tokens * kv_heads // tile_v),
        tokens=tokens,
        parts=parts,
        arguments=(
            value_codes, value_scales, ring_key, ring_value, key_pre, key, value, encoder, value_transform, slots,
            parts, tokens, queries, total, ring_key.shape[1], slots_p,
            key_pre.stride(0), key_pre.stride(1), key.stride(0), key.stride(1), key.stride(2),
            value.stride(0), value.stride(1), value.stride(2),
        ),
        constants={
            "E": joint, "R": rank, "N": kv_heads, "D": dim, "D_PAD": max(16, next_power_of_2(dim)),
            "GROUP": value_group(dim, bits), "BITS": bits, "TILE_M": tile_m, "TILE_R": tile_r, "TILE_E": tile_e,
            "SPLIT_E": split, "TILE_V": tile_v, "PRECISION": "tf32" if half_precision else "ieee",
        },
        quantize_arguments=(parts, codes, scales, slots, tokens, queries, total, slots_p),
        quantize_constants={
            "R": rank, "R_PAD": next_power_of_2(rank), "SPLIT_E": split, "QUANTIZED": codes.dtype == torch.int8,
        },
        stages=stages(3) if decode else 2,
    )  # fmt: skip


def encode(
    codes: Tensor,
    scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    ring_key: Tensor,
    ring_value: Tensor,
    key_pre: Tensor,
    key: Tensor,
    value: Tensor,
    encoder: Tensor,
    value_transform: Tensor,
    slots: Tensor,
) -> None:
    """See ``reference.encode``."""
    plan = plan_encode(
        codes, scales, value_codes, value_scales, ring_key, ring_value, key_pre, key, value, encoder, value_transform,
        slots,
    )  # fmt: skip
    after = dependent_launch(codes.device)
    _encode_kernel[(plan.jobs,)](*plan.arguments, **plan.constants, num_warps=4, num_stages=plan.stages, **after)
    _quantize_kernel[(plan.tokens,)](*plan.quantize_arguments, **plan.quantize_constants, num_warps=4, **after)
