"""The Triton kernel of ``sals::attend``: attention over the ring and a few hundred tokens rebuilt from latents.

One launch. A program is (KV head, split, query token); a split is a tile of selected tokens, or of the ring.

A *latent* program gathers its tokens' latents and rebuilds the head's keys (``latents @ decoder``, ``2 R D`` FLOPs a
token, on the int8 tensor cores with ``decoder_codes``), rotates them by the recorded rows, attends with the G query
heads that share the KV head, and adds up the values, dequantised in the transformed (Hadamard) frame. Keys never leave
registers. Rows and columns alike come from L2, and every stage is a chain of dependent instructions, so several small
programs share a multiprocessor.

The last program of a (query token, KV head) to arrive adds up the splits, in their order, so the result is
deterministic. The value transform is linear, so it is undone once, there.

The columns of a rotated pair are brought together by the order in which the decoder's columns are read, so rotation is
elementwise for every rotary form; dims that do not rotate are a second product. A latent's scale is one factor a
token, so it multiplies logits and not keys; the int8 decoder's scales are equal within a rotated pair, so they
multiply the query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import codegen
from .launch import (
    after_previous,
    batch_stride,
    dependent_launch,
    multiprocessors,
    next_power_of_2,
    require_contiguous,
    row_major,
    stages,
)
from .reference import value_group


@triton.jit
def _query(head, scales, dims, known, INT8: tl.constexpr, KEY: tl.constexpr, GROW: tl.constexpr):
    """Queries ``[dims, G_PAD]``; the int8 decoder's column scales go to them, since a rotated pair shares its scale."""
    query = tl.load(head + dims[:, None], mask=known[:, None], other=0.0)
    if INT8:
        query = query.to(tl.float32) * (tl.load(scales + dims, mask=known, other=0.0) * GROW)[:, None]
    return query.to(KEY)


@triton.jit
def _steps(value_scales, at, FIRST: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
           GROUP: tl.constexpr):  # fmt: skip
    """Step and minimum of dims FIRST .. FIRST + WIDTH, ``[T, WIDTH]`` each; ``at [T]`` is a token's first pair."""
    # Scales are loaded once for RUN dims where every such run lies within a group; else each dim loads its own.
    RUN: tl.constexpr = GROUP if GROUP < WIDTH else WIDTH
    if FIRST % RUN == 0:
        RUNS: tl.constexpr = WIDTH // RUN
        g = FIRST // GROUP + tl.arange(0, RUNS)
        pairs = tl.load(value_scales + at[:, None] + g[None, :], mask=(g < D // GROUP)[None, :], other=0)
        step, low = _unpack(pairs)
        step = tl.reshape(tl.broadcast_to(step[:, :, None], (T, RUNS, RUN)), (T, WIDTH))
        low = tl.reshape(tl.broadcast_to(low[:, :, None], (T, RUNS, RUN)), (T, WIDTH))
    else:
        d = FIRST + tl.arange(0, WIDTH)
        step, low = _unpack(tl.load(value_scales + at[:, None] + (d // GROUP)[None, :], mask=(d < D)[None, :], other=0))
    return step, low


@triton.jit
def _levels(codes, VALUE: tl.constexpr):
    """Codes 0 .. 255 as numbers. In fp16 by bits, 1024 + code, since conversions are the slowest of instructions."""
    if tl.float16 == VALUE:
        levels = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    else:
        levels = codes.to(VALUE)
    return levels


@triton.jit
def _unpack(pairs):
    """Two fp16 numbers stored in an int32."""
    return (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True), (pairs >> 16).to(tl.int16).to(
        tl.float16, bitcast=True
    )


@triton.jit
def _weights(
    logits, live, b, h, q, kv, args, scale,
    MASK_FN: tl.constexpr, SCORE_FN: tl.constexpr, MASKS: tl.constexpr, MODIFIES: tl.constexpr,
):  # fmt: skip
    """exp(logit - maximum) of ``logits [T, G_PAD]``, with the maxima and sums over the tokens."""
    logits *= scale
    if MODIFIES:
        logits = SCORE_FN(logits, b, h[None, :], q, kv[:, None], args)
    live = live[:, None]
    if MASKS:
        live = live & MASK_FN(b, h[None, :], q, kv[:, None], args)
    logits = tl.where(live, logits, float("-inf"))
    top = tl.max(logits, axis=0)
    weights = tl.exp(logits - tl.where(top == float("-inf"), 0.0, top)[None, :])
    return weights, top, tl.sum(weights, axis=0)


@triton.jit
def _attend_kernel(
    query, indices, codes, decoder, decoder_scales, scales, value_codes, value_scales, ring_key, ring_value, ring_slots,
    cos, sin, value_transform, sink_logits, partial, stats, arrived, out,
    queries, count, total, query_b, query_l, query_h, ring_p, rows_p, args, scale,
    N: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, R: tl.constexpr,
    DR: tl.constexpr, PAIRS_PAD: tl.constexpr, REST_PAD: tl.constexpr, INTERLEAVED: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, QUANTIZED: tl.constexpr, INT8: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr,
    LATENT_SPLITS: tl.constexpr, SPLITS: tl.constexpr, TILE_T: tl.constexpr, TILE_R: tl.constexpr,
    RING_T: tl.constexpr, STAGES: tl.constexpr,
    MASK_FN: tl.constexpr, SCORE_FN: tl.constexpr, MASKS: tl.constexpr, MODIFIES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr, EARLY_RING: tl.constexpr,
):  # fmt: skip
    """Program (KV head, split, query token): sums ``partial [rows, N, SPLITS, G_PAD, D]``, and their ``stats``.

    ``arrived [rows, N]`` int32 is zero before the launch. EARLY_RING: nothing that a ring program reads was written by
    the kernel before this one, so that it need not wait for it until it writes.
    """
    n = tl.program_id(0)
    # The ring first: it may run while the tokens are still being selected.
    split = SPLITS - 1 - tl.program_id(1)
    row = tl.program_id(2)
    b = row // queries
    q = row % queries
    g = tl.arange(0, G_PAD)
    h = n * G + tl.minimum(g, G - 1)
    of_head = query + b.to(tl.int64) * query_b + q * query_l + h[None, :] * query_h
    cell = ((row * N + n) * SPLITS + split).to(tl.int64)
    here = partial + (cell * G_PAD + g[:, None]) * D
    if split < LATENT_SPLITS:
        after_previous(PDL)
        top, mass = _attend_latents(
            of_head, indices + row.to(tl.int64) * count, codes, decoder, decoder_scales + n * D, scales, value_codes,
            value_scales, cos, sin, here, split, b, h, q, n, count, total, rows_p, args, scale,
            N, G, G_PAD, D, D_PAD, R, DR, PAIRS_PAD, REST_PAD, INTERLEAVED, GROUP, BITS, QUANTIZED, INT8,
            TILE_T, TILE_R, STAGES, MASK_FN, SCORE_FN, MASKS, MODIFIES, PRECISION,
        )  # fmt: skip
    else:
        if not EARLY_RING:
            after_previous(PDL)
        entry = (split - LATENT_SPLITS) * RING_T + tl.arange(0, RING_T)
        in_ring = entry < WINDOW
        kv = tl.load(ring_slots + b.to(tl.int64) * ring_p + entry, mask=in_ring, other=-1)
        d = tl.arange(0, D_PAD)
        at = ((b.to(tl.int64) * WINDOW + entry) * N + n)[:, None] * D + d[None, :]
        stored = in_ring[:, None] & (d < D)[None, :]
        key = tl.load(ring_key + at, mask=stored, other=0.0)
        value = tl.load(ring_value + at, mask=stored, other=0.0)
        exact_query = tl.load(of_head + d[:, None], mask=(d < D)[:, None], other=0.0)
        products = tl.dot(key.to(exact_query.dtype), exact_query, input_precision=PRECISION)
        weights, top, mass = _weights(
            products, kv >= 0, b, h, q, tl.maximum(kv, 0), args, scale, MASK_FN, SCORE_FN, MASKS, MODIFIES
        )
        weights = tl.trans(weights.to(exact_query.dtype))
        sums = tl.dot(weights, value.to(exact_query.dtype), input_precision=PRECISION)
        if EARLY_RING:
            after_previous(PDL)
        tl.store(here + d[None, :], sums, mask=(g < G)[:, None] & (d < D)[None, :])
    tl.store(stats + cell * (2 * G_PAD) + g, top)
    tl.store(stats + cell * (2 * G_PAD) + G_PAD + g, mass)
    # Every thread's sums are written before the program says that it has arrived, and read after the last one did.
    tl.debug_barrier()
    if tl.atomic_add(arrived + row * N + n, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
        _combine(
            partial, stats, value_transform, sink_logits, out, row, n,
            N, G, G_PAD, D, D_PAD, SINKS, LATENT_SPLITS, SPLITS, PRECISION,
        )  # fmt: skip


@triton.jit
def _attend_latents(
    of_head, indices, codes, decoder, decoder_scales, scales, value_codes, value_scales, cos, sin, here,
    split, b, h, q, n, count, total, rows_p, args, scale,
    N: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, R: tl.constexpr,
    DR: tl.constexpr, PAIRS_PAD: tl.constexpr, REST_PAD: tl.constexpr, INTERLEAVED: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, QUANTIZED: tl.constexpr, INT8: tl.constexpr,
    TILE_T: tl.constexpr, TILE_R: tl.constexpr, STAGES: tl.constexpr,
    MASK_FN: tl.constexpr, SCORE_FN: tl.constexpr, MASKS: tl.constexpr, MODIFIES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of selected tokens: stores its sums, returns their maxima and masses."""
    COMPUTE: tl.constexpr = of_head.dtype.element_ty
    # Keys rebuilt from int8 products are bounded (by R, once divided by 127 * 127), so fp16 holds them, and rotates two
    # at a time, better than bf16 does. Powers of two bring keys and queries to size, and the logits back.
    KEY: tl.constexpr = tl.float16 if INT8 and tl.float32 != COMPUTE else COMPUTE
    TURN: tl.constexpr = tl.float16 if tl.float16 == KEY else tl.float32
    SHRINK: tl.constexpr = 2.0**-14 if INT8 else 2.0**-7 if QUANTIZED and tl.float16 == COMPUTE else 1.0
    GROW: tl.constexpr = 2.0**7 if INT8 else 1.0
    i = split * TILE_T + tl.arange(0, TILE_T)
    kv = tl.load(indices + i, mask=i < count, other=-1)
    live = kv >= 0
    kv = tl.maximum(kv, 0)
    token = b.to(tl.int64) * total + kv
    # -- keys, rotated, times queries
    logits = tl.zeros((TILE_T, G_PAD), tl.float32)
    if DR > 0:
        # Columns: the first dims of all pairs, then the second ones. Those beyond the last pair are clamped only where
        # there are such, since a clamped index is no longer known to be contiguous, and loads would be single elements.
        column = tl.arange(0, 2 * PAIRS_PAD)
        its_pair = column % PAIRS_PAD
        paired = its_pair if 2 * PAIRS_PAD == DR else tl.minimum(its_pair, DR // 2 - 1)
        paired = paired * (2 if INTERLEAVED else 1) + (column // PAIRS_PAD) * (1 if INTERLEAVED else DR // 2)
        keys = _rebuild(
            codes, token, decoder, n * D + paired, its_pair < DR // 2,
            N * D, R, INT8, COMPUTE, R % TILE_R == 0, TILE_T, TILE_R, 2 * PAIRS_PAD, STAGES, PRECISION,
        )  # fmt: skip
        keys = (keys.to(tl.float32) * SHRINK).to(TURN)
        x1, x2 = tl.split(tl.permute(tl.reshape(keys, (TILE_T, 2, PAIRS_PAD)), (0, 2, 1)))
        pair = tl.arange(0, PAIRS_PAD)
        inside = pair < DR // 2
        d1 = 2 * pair if INTERLEAVED else pair
        d2 = 2 * pair + 1 if INTERLEAVED else pair + DR // 2
        turn = (b.to(tl.int64) * rows_p + kv)[:, None] * DR
        c1 = tl.load(cos + turn + d1[None, :], mask=inside[None, :], other=0.0).to(TURN)
        s1 = tl.load(sin + turn + d1[None, :], mask=inside[None, :], other=0.0).to(TURN)
        c2 = tl.load(cos + turn + d2[None, :], mask=inside[None, :], other=0.0).to(TURN)
        s2 = tl.load(sin + turn + d2[None, :], mask=inside[None, :], other=0.0).to(TURN)
        first_query = _query(of_head, decoder_scales, d1, inside, INT8, KEY, GROW)
        second_query = _query(of_head, decoder_scales, d2, inside, INT8, KEY, GROW)
        logits = tl.dot((x1 * c1 - x2 * s1).to(KEY), first_query, logits, input_precision=PRECISION)
        logits = tl.dot((x2 * c2 + x1 * s2).to(KEY), second_query, logits, input_precision=PRECISION)
    if DR < D:
        rest = DR + tl.arange(0, REST_PAD)
        keys = _rebuild(
            codes, token, decoder, n * D + tl.minimum(rest, D - 1), rest < D,
            N * D, R, INT8, COMPUTE, R % TILE_R == 0, TILE_T, TILE_R, REST_PAD, STAGES, PRECISION,
        )  # fmt: skip
        rest_query = _query(of_head, decoder_scales, rest, rest < D, INT8, KEY, GROW)
        logits = tl.dot((keys.to(tl.float32) * SHRINK).to(KEY), rest_query, logits, input_precision=PRECISION)
    if QUANTIZED:
        token_scale = tl.load(scales + token).to(tl.float32) * (scale / (SHRINK * GROW))
    else:
        token_scale = tl.full((TILE_T,), 1.0, tl.float32) * (scale / (SHRINK * GROW))
    weights, top, mass = _weights(
        logits, live, b, h, q, kv, args, token_scale[:, None], MASK_FN, SCORE_FN, MASKS, MODIFIES
    )
    # -- weights times values, in the transformed frame; fp16 holds quantised values better than bf16
    VALUE: tl.constexpr = tl.float16 if (BITS > 0) & (COMPUTE != tl.float32) else COMPUTE  # noqa: SIM300
    # A byte holds the codes of PARTS dims, WIDTH apart, so each part of the head is a product of its own.
    PARTS: tl.constexpr = 8 // BITS if BITS > 0 else 1
    WIDTH: tl.constexpr = D // PARTS
    WIDTH_PAD: tl.constexpr = D_PAD // PARTS if D_PAD // PARTS > 16 else 16
    weights = tl.trans(weights.to(VALUE))
    j = tl.arange(0, WIDTH_PAD)
    stored = (tl.arange(0, G_PAD) < G)[:, None] & (j < WIDTH)[None, :]
    value_row = token * N + n
    packed = tl.load(value_codes + value_row[:, None] * WIDTH + j[None, :], mask=(j < WIDTH)[None, :], other=0)
    for part in tl.static_range(PARTS):
        if BITS > 0:
            step, least = _steps(value_scales, value_row * (D // GROUP), part * WIDTH, WIDTH_PAD, TILE_T, D, GROUP)
            level = _levels((packed >> (BITS * part)) & (2**BITS - 1), VALUE)
            value = level * step.to(VALUE) + least.to(VALUE)
        else:
            value = packed.to(VALUE)
        sums = tl.dot(weights, value, input_precision=PRECISION)
        tl.store(here + part * WIDTH + j[None, :], sums, mask=stored)
    return top, mass


@triton.jit
def _rebuild(
    codes, token, decoder, column, known,
    E: tl.constexpr, R: tl.constexpr, INT8: tl.constexpr, COMPUTE: tl.constexpr, FULL: tl.constexpr,
    TILE_T: tl.constexpr, TILE_R: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``codes[token] @ decoder[:, column]`` without scales."""
    keys = tl.zeros((TILE_T, WIDTH), tl.int32 if INT8 else tl.float32)
    for start in tl.range(0, R, TILE_R, num_stages=STAGES):
        r = start + tl.arange(0, TILE_R)
        at = codes + token[:, None] * R + r[None, :]
        # Int8 tensor cores want each column contiguous, so the int8 decoder is transposed.
        if INT8:
            columns_at = decoder + column[None, :] * R + r[:, None]
        else:
            columns_at = decoder + r[:, None] * E + column[None, :]
        # Without masks where there can be: 16-byte loads. Columns that are not known are read and not used.
        if FULL:
            latent = tl.load(at)
            columns = tl.load(columns_at)
        else:
            latent = tl.load(at, mask=(r < R)[None, :], other=0)
            columns = tl.load(columns_at, mask=(r < R)[:, None] & known[None, :], other=0)
        if INT8:
            keys = tl.dot(latent, columns, keys, out_dtype=tl.int32)
        else:
            keys = tl.dot(latent.to(COMPUTE), columns.to(COMPUTE), keys, input_precision=PRECISION)
    return keys


@triton.jit
def _combine(
    partial, stats, value_transform, sink_logits, out, row, n,
    N: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    SINKS: tl.constexpr, LATENT_SPLITS: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The splits' sums of a KV head, in order; the value transform undone. Others wrote them: not through L1."""
    cell = (row.to(tl.int64) * N + n) * SPLITS
    g = tl.arange(0, G_PAD)
    d = tl.arange(0, D_PAD)
    s = tl.arange(0, triton.next_power_of_2(SPLITS))
    at = stats + (cell + s[:, None]) * (2 * G_PAD) + g[None, :]
    tops = tl.load(at, mask=(s < SPLITS)[:, None], other=float("-inf"), cache_modifier=".cg")
    masses = tl.load(at + G_PAD, mask=(s < SPLITS)[:, None], other=0.0, cache_modifier=".cg")
    top = tl.max(tops, axis=0)
    if SINKS:
        sink = tl.load(sink_logits + n * G + tl.minimum(g, G - 1)).to(tl.float32)
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(tl.exp(tops - top[None, :]) * masses, axis=0)
    if SINKS:
        mass += tl.exp(sink - top)
    mass = tl.where(mass == 0, 1.0, mass)
    partial += (cell * G_PAD + g[:, None]) * D
    wide = stats + cell * (2 * G_PAD) + g[:, None]
    latents = tl.zeros((G_PAD, D_PAD), tl.float32)
    for split in tl.range(0, LATENT_SPLITS, loop_unroll_factor=4):
        latents += _share(partial, wide, split, d, top, G, G_PAD, D)
    # A part of the output at a time, since the transform lies in shared memory for the product.
    PART: tl.constexpr = 64 if D_PAD > 64 else D_PAD
    for first in tl.static_range(0, D_PAD, PART):
        e = first + tl.arange(0, PART)
        # transposed: the output is `sums @ value_transform.T`
        both = (d < D)[:, None] & (e < D)[None, :]
        transform = tl.load(value_transform + e[None, :] * D + d[:, None], mask=both, other=0.0).to(tl.float32)
        ring = tl.zeros((G_PAD, PART), tl.float32)
        for split in tl.static_range(LATENT_SPLITS, SPLITS):
            ring += _share(partial, wide, split, e, top, G, G_PAD, D)
        sums = tl.dot(latents, transform, ring, input_precision=PRECISION)
        at = out + (row.to(tl.int64) * (N * G) + n * G + g)[:, None] * D + e[None, :]
        inside = (g < G)[:, None] & (e < D)[None, :]
        tl.store(at, (sums / mass[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _share(partial, stats, split, d, top, G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr):
    """A split's sums at dims ``d``, weighted by exp(its maximum - top).

    A maximum is read as wide as the sums that it weighs, so that nothing moves between threads.
    """
    inside = (tl.arange(0, G_PAD) < G)[:, None] & (d < D)[None, :]
    own = tl.load(stats + split * (2 * G_PAD) + d[None, :] * 0, mask=inside, other=0.0, cache_modifier=".cg")
    sums = tl.load(partial + split * (G_PAD * D) + d[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    return tl.exp(own - top[:, None]) * sums


@dataclass(frozen=True)
class Tiles:
    """A table, not a search: nothing is timed, so the choice is the same inside a CUDA graph.

    ``tokens`` of a latent program, latent coordinates ``ranks`` of one product, pipeline ``stages``, tokens of a
    ``ring`` program, and ``warps``. ``registers``: at most so many a thread, so that more programs fit on a
    multiprocessor.
    """

    tokens: int
    ranks: int
    stages: int
    ring: int
    warps: int
    registers: int | None = None


def tiles_for(
    rows: int, count: int, window: int, kv_heads: int, dim: int, rank: int, int8: bool, dtype: torch.dtype,
    device: torch.device,
) -> Tiles:  # fmt: skip
    """For ``count`` selected tokens of each of ``rows`` query tokens. Measured on one H200 (torch 2.11, Triton 3.6)."""
    ring = min(128, max(16, next_power_of_2(window)))
    if dtype == torch.float32:
        return Tiles(32, 32, 1, min(32, ring), 4)
    ranks = max(32, min(128 if int8 else 64, next_power_of_2(rank)))
    if dim > 128:
        return Tiles(64, ranks, stages(2), min(64, ring), 4)
    if rows * kv_heads * -(-count // 128) < multiprocessors(device):
        # Enough programs before large tiles.
        return Tiles(64, ranks, stages(3), ring, 4, 168)
    return Tiles(128, ranks, stages(3), ring, 8, 128)


def attend(
    query: Tensor,
    indices: Tensor,
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
    scale: float,
    rotary: str,
    sink_logits: Tensor | None = None,
    decoder_codes: Tensor | None = None,
    decoder_scales: Tensor | None = None,
    tiles: Tiles | None = None,
    arrived: Tensor | None = None,
) -> Tensor:
    """See ``reference.attend``.

    ``arrived [B*L*N]`` int32, when given, is zeroed by a kernel of the same call before this one, which does not write
    what the ring's programs read either.
    """
    require_contiguous(
        codes=codes, scales=scales, value_codes=value_codes, value_scales=value_scales, ring_key=ring_key,
        ring_value=ring_value, ring_slots=ring_slots, cos=cos, sin=sin,
    )  # fmt: skip
    query, decoder, value_transform = row_major(query, 1), decoder.contiguous(), value_transform.contiguous()
    indices = indices.contiguous()
    batch, queries, heads, dim = query.shape
    total, rank = codes.shape[1:]
    kv_heads = decoder.shape[1] // dim
    groups = heads // kv_heads
    rows = batch * queries
    count, window = indices.shape[-1], ring_slots.shape[1]
    rotary_dim = 0 if rotary == "none" else cos.shape[-1]
    bits = 8 * value_codes.shape[-1] // dim if value_codes.dtype == torch.uint8 else 0
    int8 = decoder_codes is not None and codes.dtype == torch.int8
    half_precision = query.dtype != torch.float32
    device = query.device
    generated = codegen.generate(modifier, tensors)
    tiles = tiles or tiles_for(rows, count, window, kv_heads, dim, rank, int8, query.dtype, device)

    latent_splits, ring_splits = triton.cdiv(count, tiles.tokens), triton.cdiv(window, tiles.ring)
    splits = latent_splits + ring_splits
    g_pad = max(16, next_power_of_2(groups))
    partial = torch.empty((rows, kv_heads, splits, g_pad, dim), dtype=torch.float32, device=device)
    stats = torch.empty((rows, kv_heads, splits, 2, g_pad), dtype=torch.float32, device=device)
    out = torch.empty((batch, queries, heads, dim), dtype=query.dtype, device=device)
    early_ring = arrived is not None
    if arrived is None:
        arrived = torch.zeros((rows * kv_heads,), dtype=torch.int32, device=device)
    if bits:
        value_scales = value_scales.view(torch.int32)
    capped = {} if tiles.registers is None or torch.version.hip else {"maxnreg": tiles.registers}
    _attend_kernel[(kv_heads, splits, rows)](
        query, indices, codes, decoder_codes if int8 else decoder, decoder_scales if int8 else scales, scales,
        value_codes, value_scales, ring_key, ring_value, ring_slots, cos, sin, value_transform,
        scales if sink_logits is None else sink_logits, partial, stats, arrived, out,
        queries, count, total, query.stride(0), query.stride(1), query.stride(2), batch_stride(ring_slots),
        cos.shape[1] if cos.shape[0] > 1 else 0, codegen.arguments(tensors, integers), scale,
        N=kv_heads, G=groups, G_PAD=g_pad, D=dim, D_PAD=max(16, next_power_of_2(dim)), R=rank, DR=rotary_dim,
        PAIRS_PAD=max(16, next_power_of_2(max(rotary_dim // 2, 1))),
        REST_PAD=max(16, next_power_of_2(max(dim - rotary_dim, 1))),
        INTERLEAVED=rotary == "interleaved", GROUP=value_group(dim, bits), BITS=bits,
        QUANTIZED=codes.dtype == torch.int8, INT8=int8, SINKS=sink_logits is not None, WINDOW=window,
        LATENT_SPLITS=latent_splits, SPLITS=splits, TILE_T=tiles.tokens, TILE_R=tiles.ranks, RING_T=tiles.ring,
        STAGES=tiles.stages,
        MASK_FN=generated.mask_fn, SCORE_FN=generated.score_fn, MASKS=generated.masks, MODIFIES=generated.modifies,
        PRECISION="tf32" if half_precision else "ieee", EARLY_RING=early_ring, num_warps=tiles.warps,
        **capped, **dependent_launch(device),
    )  # fmt: skip
    return out
