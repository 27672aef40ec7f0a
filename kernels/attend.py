"""Triton kernels of ``sals::attend``: attention over the ring and a few hundred tokens rebuilt from latents.

Three launches:

rebuild
    gathers the selected tokens' latents and multiplies them by the decoder, ``[B L K, R] x [R, E]``: the arithmetic of
    the operator, ``2 R E`` FLOPs a token, as one large product. With ``decoder_codes`` (int8) it runs on the int8
    tensor cores, straight from the stored codes. Scales and rotation are left to the next kernel.
attend
    a program is (KV head, split, query token); a split is a tile of selected tokens, or of the ring. It rotates the
    rebuilt keys by the recorded rows and attends with the G query heads that share the KV head. The first and second
    dims of the rotated pairs are separate tensors, wherever they lie in the head, so that rotation is elementwise for
    every form; dims that do not rotate are a third. Values are dequantised in the transformed (Hadamard) frame.
combine
    adds up the splits, in order, so the result is deterministic; the value transform is linear, so it is undone once,
    here.

A latent's scale is one factor a token, so it multiplies logits and not keys; the int8 decoder's scales are equal
within a rotated pair, so they multiply the query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import codegen
from .encode import _batch_stride, next_power_of_2, require_contiguous, row_major, stages
from .reference import value_group


@triton.jit
def _rebuild_kernel(
    indices, codes, decoder, rebuilt, tokens, per_batch, total,
    R: tl.constexpr, E: tl.constexpr, INT8: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    TILE_T: tl.constexpr, TILE_E: tl.constexpr, TILE_R: tl.constexpr,
):  # fmt: skip
    """Program (tile of columns, tile of tokens): ``codes[token] @ decoder`` without scales, ``[tokens, E]``."""
    i = tl.program_id(1) * TILE_T + tl.arange(0, TILE_T)
    e = tl.program_id(0) * TILE_E + tl.arange(0, TILE_E)
    chosen = tl.maximum(tl.load(indices + i, mask=i < tokens, other=0), 0)
    row = codes + ((tl.minimum(i, tokens - 1) // per_batch).to(tl.int64) * total + chosen) * R
    known = tl.minimum(e, E - 1)
    if INT8:
        acc = tl.zeros((TILE_T, TILE_E), tl.int32)
    else:
        acc = tl.zeros((TILE_T, TILE_E), tl.float32)
    for start in range(0, R, TILE_R):
        r = start + tl.arange(0, TILE_R)
        # int8 tensor cores want each column contiguous, so the int8 decoder is stored transposed.
        if INT8:
            at = decoder + known[None, :] * R + r[:, None]
        else:
            at = decoder + r[:, None] * E + e[None, :]
        # Without masks where there can be: 16-byte loads.
        if R % TILE_R == 0 and E % TILE_E == 0:
            latent = tl.load(row[:, None] + r[None, :])
            columns = tl.load(at)
        else:
            latent = tl.load(row[:, None] + r[None, :], mask=(r < R)[None, :], other=0)
            columns = tl.load(at, mask=(r < R)[:, None] & (e < E)[None, :], other=0)
        if INT8:
            acc = tl.dot(latent, columns, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(latent.to(COMPUTE), columns.to(COMPUTE), acc, input_precision=PRECISION)
    at = rebuilt + i.to(tl.int64)[:, None] * E + e[None, :]
    tl.store(at, acc.to(tl.float32).to(COMPUTE), mask=(i < tokens)[:, None] & (e < E)[None, :])


@triton.jit
def _query(head, scales, dims, known, INT8: tl.constexpr):
    """Queries ``[dims, G_PAD]``; the int8 decoder's column scales go to them, since a rotated pair shares its scale."""
    query = tl.load(head + dims[:, None], mask=known[:, None], other=0.0)
    if INT8:
        query = (query * tl.load(scales + dims, mask=known, other=0.0)[:, None]).to(query.dtype)
    return query


@triton.jit
def _steps(value_scales, at, FIRST: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
           GROUP: tl.constexpr):  # fmt: skip
    """Step and minimum of dims FIRST .. FIRST + WIDTH, ``[T, WIDTH]`` each; ``at [T]`` is a token's first pair."""
    if FIRST % GROUP == 0 and WIDTH % GROUP == 0:
        GROUPS: tl.constexpr = WIDTH // GROUP
        g = FIRST // GROUP + tl.arange(0, GROUPS)
        pairs = tl.load(value_scales + at[:, None] + g[None, :], mask=(g < D // GROUP)[None, :], other=0)
        step, low = _unpack(pairs)
        step = tl.reshape(tl.broadcast_to(step[:, :, None], (T, GROUPS, GROUP)), (T, WIDTH))
        low = tl.reshape(tl.broadcast_to(low[:, :, None], (T, GROUPS, GROUP)), (T, WIDTH))
    else:
        d = FIRST + tl.arange(0, WIDTH)
        step, low = _unpack(tl.load(value_scales + at[:, None] + (d // GROUP)[None, :], mask=(d < D)[None, :], other=0))
    return step, low


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
    query, indices, rebuilt, decoder_scales, scales, value_codes, value_scales, ring_key, ring_value, ring_slots,
    cos, sin, partial, stats,
    queries, count, total, window, query_b, query_l, query_h, ring_p, rows_p, args, scale,
    N: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DR: tl.constexpr, PAIRS_PAD: tl.constexpr, REST_PAD: tl.constexpr, INTERLEAVED: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, QUANTIZED: tl.constexpr, INT8: tl.constexpr,
    LATENT_SPLITS: tl.constexpr, SPLITS: tl.constexpr, TILE_T: tl.constexpr,
    MASK_FN: tl.constexpr, SCORE_FN: tl.constexpr, MASKS: tl.constexpr, MODIFIES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (KV head, split, query token): sums ``partial [rows, N, SPLITS, G_PAD, D]``, and their ``stats``."""
    COMPUTE: tl.constexpr = query.dtype.element_ty
    n = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    b = row // queries
    q = row % queries
    g = tl.arange(0, G_PAD)
    h = n * G + tl.minimum(g, G - 1)
    cell = ((row * N + n) * SPLITS + split).to(tl.int64)
    head = query + b.to(tl.int64) * query_b + q * query_l + h[None, :] * query_h
    here = partial + (cell * G_PAD + g[:, None]) * D
    kept = (g < G)[:, None]
    if split < LATENT_SPLITS:
        i = split * TILE_T + tl.arange(0, TILE_T)
        kv = tl.load(indices + row.to(tl.int64) * count + i, mask=i < count, other=-1)
        live = kv >= 0
        kv = tl.maximum(kv, 0)
        token = b.to(tl.int64) * total + kv
        value_row = token * N + n
        if QUANTIZED:
            token_scale = tl.load(scales + token).to(tl.float32) * scale
        else:
            token_scale = tl.full((TILE_T,), 1.0, tl.float32) * scale
        HALF: tl.constexpr = D // 2
        HALF_PAD: tl.constexpr = D_PAD // 2 if D_PAD // 2 > 16 else 16
        j = tl.arange(0, HALF_PAD)
        d = tl.arange(0, D_PAD)
        if BITS == 4:
            packed = tl.load(value_codes + value_row[:, None] * HALF + j[None, :], mask=(j < HALF)[None, :], other=0)
        else:
            packed = tl.load(value_codes + value_row[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0)
        pairs_at = value_row * (D // GROUP)
        if BITS == 4:
            low_step, low_least = _steps(value_scales, pairs_at, 0, HALF_PAD, TILE_T, D, GROUP)
            high_step, high_least = _steps(value_scales, pairs_at, HALF, HALF_PAD, TILE_T, D, GROUP)
        # -- keys, rotated, times queries
        key = rebuilt + ((row.to(tl.int64) * count + tl.minimum(i, count - 1)) * N + n)[:, None] * D
        logits = tl.zeros((TILE_T, G_PAD), tl.float32)
        if DR > 0:
            pair = tl.arange(0, PAIRS_PAD)
            d1 = 2 * pair if INTERLEAVED else pair
            d2 = 2 * pair + 1 if INTERLEAVED else pair + DR // 2
            inside = pair < DR // 2
            turn = (b.to(tl.int64) * rows_p + kv)[:, None] * DR
            x1 = tl.load(key + d1[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            x2 = tl.load(key + d2[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            c1 = tl.load(cos + turn + d1[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            s1 = tl.load(sin + turn + d1[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            c2 = tl.load(cos + turn + d2[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            s2 = tl.load(sin + turn + d2[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            first = _query(head, decoder_scales + n * D, d1, inside, INT8)
            second = _query(head, decoder_scales + n * D, d2, inside, INT8)
            logits = tl.dot((x1 * c1 - x2 * s1).to(COMPUTE), first, logits, input_precision=PRECISION)
            logits = tl.dot((x2 * c2 + x1 * s2).to(COMPUTE), second, logits, input_precision=PRECISION)
        if DR < D:
            rest = DR + tl.arange(0, REST_PAD)
            still = tl.load(key + rest[None, :], mask=(rest < D)[None, :], other=0.0)
            whole = _query(head, decoder_scales + n * D, rest, rest < D, INT8)
            logits = tl.dot(still, whole, logits, input_precision=PRECISION)
        weights, top, mass = _weights(
            logits, live, b, h, q, kv, args, token_scale[:, None], MASK_FN, SCORE_FN, MASKS, MODIFIES
        )
        # -- weights times values, in the transformed frame; fp16 holds quantised values better than bf16
        VALUE: tl.constexpr = tl.float16 if (BITS > 0) & (COMPUTE != tl.float32) else COMPUTE  # noqa: SIM300
        weights = tl.trans(weights.to(VALUE))
        if BITS == 4:
            value = (packed & 15).to(VALUE) * low_step.to(VALUE) + low_least.to(VALUE)
            sums = tl.dot(weights, value, input_precision=PRECISION)
            tl.store(here + j[None, :], sums, mask=kept & (j < HALF)[None, :])
            value = (packed >> 4).to(VALUE) * high_step.to(VALUE) + high_least.to(VALUE)
            sums = tl.dot(weights, value, input_precision=PRECISION)
            tl.store(here + HALF + j[None, :], sums, mask=kept & (j < HALF)[None, :])
        else:
            if BITS == 8:
                step, least = _steps(value_scales, pairs_at, 0, D_PAD, TILE_T, D, GROUP)
                packed = packed.to(VALUE) * step.to(VALUE) + least.to(VALUE)
            sums = tl.dot(weights, packed.to(VALUE), input_precision=PRECISION)
            tl.store(here + d[None, :], sums, mask=kept & (d < D)[None, :])
        tl.store(stats + cell * (2 * G_PAD) + g, top)
        tl.store(stats + cell * (2 * G_PAD) + G_PAD + g, mass)
    else:
        entry = (split - LATENT_SPLITS) * TILE_T + tl.arange(0, TILE_T)
        in_ring = entry < window
        kv = tl.load(ring_slots + b.to(tl.int64) * ring_p + entry, mask=in_ring, other=-1)
        e = tl.arange(0, D_PAD)
        at = ((b.to(tl.int64) * window + entry) * N + n)[:, None] * D + e[None, :]
        stored = in_ring[:, None] & (e < D)[None, :]
        exact_key = tl.load(ring_key + at, mask=stored, other=0.0)
        exact = tl.load(ring_value + at, mask=stored, other=0.0)
        exact_query = tl.load(head + e[:, None], mask=(e < D)[:, None], other=0.0)
        products = tl.dot(exact_key.to(COMPUTE), exact_query, input_precision=PRECISION)
        shares, peak, share = _weights(
            products, kv >= 0, b, h, q, tl.maximum(kv, 0), args, scale, MASK_FN, SCORE_FN, MASKS, MODIFIES
        )
        ring_sums = tl.dot(tl.trans(shares.to(COMPUTE)), exact.to(COMPUTE), input_precision=PRECISION)
        tl.store(here + e[None, :], ring_sums, mask=kept & (e < D)[None, :])
        tl.store(stats + cell * (2 * G_PAD) + g, peak)
        tl.store(stats + cell * (2 * G_PAD) + G_PAD + g, share)


@triton.jit
def _attend_few_kernel(
    query, indices, rebuilt, decoder_scales, scales, value_codes, value_scales, ring_key, ring_value, ring_slots,
    cos, sin, partial, stats,
    queries, count, total, window, query_b, query_l, query_h, ring_p, rows_p, args, scale,
    N: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DR: tl.constexpr, PAIRS_PAD: tl.constexpr, REST_PAD: tl.constexpr, INTERLEAVED: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, QUANTIZED: tl.constexpr, INT8: tl.constexpr,
    LATENT_SPLITS: tl.constexpr, SPLITS: tl.constexpr, TILE_T: tl.constexpr,
    MASK_FN: tl.constexpr, SCORE_FN: tl.constexpr, MASKS: tl.constexpr, MODIFIES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As :func:`_attend_kernel` without tensor cores: for one query head a KV head, fewer instructions and barriers."""
    n = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    b = row // queries
    q = row % queries
    cell = ((row * N + n) * SPLITS + split).to(tl.int64)
    head = query + b.to(tl.int64) * query_b + q * query_l + n * G * query_h
    d = tl.arange(0, D_PAD)
    if split < LATENT_SPLITS:
        i = split * TILE_T + tl.arange(0, TILE_T)
        kv = tl.load(indices + row.to(tl.int64) * count + i, mask=i < count, other=-1)
        live = kv >= 0
        kv = tl.maximum(kv, 0)
        token = b.to(tl.int64) * total + kv
        value_row = token * N + n
        HALF: tl.constexpr = D // 2
        HALF_PAD: tl.constexpr = D_PAD // 2 if D_PAD // 2 > 16 else 16
        j = tl.arange(0, HALF_PAD)
        pairs_at = value_row * (D // GROUP)
        if BITS == 4:
            packed = tl.load(value_codes + value_row[:, None] * HALF + j[None, :], mask=(j < HALF)[None, :], other=0)
            low_step, low_least = _steps(value_scales, pairs_at, 0, HALF_PAD, TILE_T, D, GROUP)
            high_step, high_least = _steps(value_scales, pairs_at, HALF, HALF_PAD, TILE_T, D, GROUP)
        else:
            packed = tl.load(value_codes + value_row[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0)
        if QUANTIZED:
            token_scale = tl.load(scales + token).to(tl.float32) * scale
        else:
            token_scale = tl.full((TILE_T,), 1.0, tl.float32) * scale
        key = rebuilt + ((row.to(tl.int64) * count + tl.minimum(i, count - 1)) * N + n)[:, None] * D
        if DR > 0:
            pair = tl.arange(0, PAIRS_PAD)
            d1 = 2 * pair if INTERLEAVED else pair
            d2 = 2 * pair + 1 if INTERLEAVED else pair + DR // 2
            inside = pair < DR // 2
            turn = (b.to(tl.int64) * rows_p + kv)[:, None] * DR
            x1 = tl.load(key + d1[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            x2 = tl.load(key + d2[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            c1 = tl.load(cos + turn + d1[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            s1 = tl.load(sin + turn + d1[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            c2 = tl.load(cos + turn + d2[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            s2 = tl.load(sin + turn + d2[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            k1 = x1 * c1 - x2 * s1
            k2 = x2 * c2 + x1 * s2
        if DR < D:
            rest = DR + tl.arange(0, REST_PAD)
            still = tl.load(key + rest[None, :], mask=(rest < D)[None, :], other=0.0).to(tl.float32)
        if BITS == 4:
            low = (packed & 15).to(tl.float32) * low_step.to(tl.float32) + low_least.to(tl.float32)
            high = (packed >> 4).to(tl.float32) * high_step.to(tl.float32) + high_least.to(tl.float32)
        elif BITS == 8:
            step, least = _steps(value_scales, pairs_at, 0, D_PAD, TILE_T, D, GROUP)
            whole = packed.to(tl.float32) * step.to(tl.float32) + least.to(tl.float32)
        else:
            whole = packed.to(tl.float32)
        for g in tl.static_range(G):
            logits = tl.zeros((TILE_T,), tl.float32)
            if DR > 0:
                q1 = _query_vector(head + g * query_h, decoder_scales + n * D, d1, inside, INT8)
                q2 = _query_vector(head + g * query_h, decoder_scales + n * D, d2, inside, INT8)
                logits += tl.sum(k1 * q1[None, :] + k2 * q2[None, :], axis=1)
            if DR < D:
                qr = _query_vector(head + g * query_h, decoder_scales + n * D, rest, rest < D, INT8)
                logits += tl.sum(still * qr[None, :], axis=1)
            weights, top, mass = _weights_of_one(
                logits, live, b, n * G + g, q, kv, args, token_scale, MASK_FN, SCORE_FN, MASKS, MODIFIES
            )
            here = partial + (cell * G_PAD + g) * D
            if BITS == 4:
                tl.store(here + j, tl.sum(weights[:, None] * low, axis=0), mask=j < HALF)
                tl.store(here + HALF + j, tl.sum(weights[:, None] * high, axis=0), mask=j < HALF)
            else:
                tl.store(here + d, tl.sum(weights[:, None] * whole, axis=0), mask=d < D)
            tl.store(stats + cell * (2 * G_PAD) + g, top)
            tl.store(stats + cell * (2 * G_PAD) + G_PAD + g, mass)
    else:
        entry = (split - LATENT_SPLITS) * TILE_T + tl.arange(0, TILE_T)
        in_ring = entry < window
        held = tl.load(ring_slots + b.to(tl.int64) * ring_p + entry, mask=in_ring, other=-1)
        at = ((b.to(tl.int64) * window + entry) * N + n)[:, None] * D + d[None, :]
        stored = in_ring[:, None] & (d < D)[None, :]
        exact_key = tl.load(ring_key + at, mask=stored, other=0.0).to(tl.float32)
        exact = tl.load(ring_value + at, mask=stored, other=0.0).to(tl.float32)
        for g in tl.static_range(G):
            exact_query = tl.load(head + g * query_h + d, mask=d < D, other=0.0).to(tl.float32)
            shares, peak, share = _weights_of_one(
                tl.sum(exact_key * exact_query[None, :], axis=1), held >= 0, b, n * G + g, q, tl.maximum(held, 0), args,
                scale, MASK_FN, SCORE_FN, MASKS, MODIFIES,
            )  # fmt: skip
            tl.store(partial + (cell * G_PAD + g) * D + d, tl.sum(shares[:, None] * exact, axis=0), mask=d < D)
            tl.store(stats + cell * (2 * G_PAD) + g, peak)
            tl.store(stats + cell * (2 * G_PAD) + G_PAD + g, share)


@triton.jit
def _query_vector(head, scales, dims, known, INT8: tl.constexpr):
    query = tl.load(head + dims, mask=known, other=0.0).to(tl.float32)
    if INT8:
        query *= tl.load(scales + dims, mask=known, other=0.0)
    return query


@triton.jit
def _weights_of_one(
    logits, live, b, h, q, kv, args, scale,
    MASK_FN: tl.constexpr, SCORE_FN: tl.constexpr, MASKS: tl.constexpr, MODIFIES: tl.constexpr,
):  # fmt: skip
    """:func:`_weights` of one query head: ``logits [T]``."""
    logits *= scale
    if MODIFIES:
        logits = SCORE_FN(logits, b, h, q, kv, args)
    if MASKS:
        live = live & MASK_FN(b, h, q, kv, args)
    logits = tl.where(live, logits, float("-inf"))
    top = tl.max(logits, axis=0)
    weights = tl.exp(logits - tl.where(top == float("-inf"), 0.0, top))
    return weights, top, tl.sum(weights, axis=0)


@triton.jit
def _combine_kernel(
    partial, stats, value_transform, sink_logits, out,
    N: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    SINKS: tl.constexpr, LATENT_SPLITS: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (HEADS query heads, query token): the splits' sums, in order; the value transform undone."""
    row = tl.program_id(1)
    h = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    known = h < N * G
    h = tl.minimum(h, N * G - 1)
    # partial is [rows, N, SPLITS, G_PAD, D] and stats [rows, N, SPLITS, 2, G_PAD]
    cell = (row.to(tl.int64) * N + h // G) * SPLITS
    g = h % G
    d = tl.arange(0, D_PAD)
    both = (d < D)[:, None] & (d < D)[None, :]
    # transposed: the output is `sums @ value_transform.T`
    transform = tl.load(value_transform + d[None, :] * D + d[:, None], mask=both, other=0.0).to(tl.float32)
    s = tl.arange(0, triton.next_power_of_2(SPLITS))
    at = stats + (cell[None, :] + s[:, None]) * (2 * G_PAD) + g[None, :]
    tops = tl.load(at, mask=(s < SPLITS)[:, None], other=float("-inf"))
    masses = tl.load(at + G_PAD, mask=(s < SPLITS)[:, None], other=0.0)
    top = tl.max(tops, axis=0)
    if SINKS:
        sink = tl.load(sink_logits + h).to(tl.float32)
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(tl.exp(tops - top[None, :]) * masses, axis=0)
    if SINKS:
        mass += tl.exp(sink - top)
    mass = tl.where(mass == 0, 1.0, mass)
    inside = known[:, None] & (d < D)[None, :]
    latents = tl.zeros((HEADS, D_PAD), tl.float32)
    ring = tl.zeros((HEADS, D_PAD), tl.float32)
    for split in tl.range(0, LATENT_SPLITS, loop_unroll_factor=4):
        latents += _share(partial, stats, cell + split, g, d, top, inside, G_PAD, D)
    for split in tl.range(LATENT_SPLITS, SPLITS, loop_unroll_factor=4):
        ring += _share(partial, stats, cell + split, g, d, top, inside, G_PAD, D)
    sums = tl.dot(latents, transform, ring, input_precision=PRECISION)
    at = out + (row.to(tl.int64) * (N * G) + h)[:, None] * D + d[None, :]
    tl.store(at, (sums / mass[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _share(partial, stats, cell, g, d, top, inside, G_PAD: tl.constexpr, D: tl.constexpr):
    """A split's sums, weighted by exp(its maximum - top)."""
    weight = tl.exp(tl.load(stats + cell * (2 * G_PAD) + g) - top)
    at = partial + (cell * G_PAD + g)[:, None] * D + d[None, :]
    return weight[:, None] * tl.load(at, mask=inside, other=0.0)


@dataclass(frozen=True)
class Tiles:
    """A table, not a search: nothing is timed, so the choice is the same inside a CUDA graph.

    ``rebuild``: tokens, columns, latent coordinates of a tile of the rebuild kernel, its warps and pipeline stages.
    ``attend``: tokens of a tile of the attend kernel, and its warps; ``few``: without tensor cores;
    ``registers``: at most so many a thread, so that more programs fit on a multiprocessor.
    """

    rebuild: tuple[int, int, int, int, int]
    attend: tuple[int, int]
    few: bool = False
    registers: int | None = None


def tiles_for(tokens: int, joint: int, rank: int, groups: int, int8: bool, half_precision: bool) -> Tiles:
    """For ``tokens`` selected tokens over the whole call. Measured on one H200 (torch 2.11, Triton 3.6)."""
    columns = min(128, max(16, next_power_of_2(joint)))
    if not half_precision:
        return Tiles((32, min(64, columns), 32, 4, 2), (32, 4), few=groups == 1)
    ranks = max(32, min(128 if int8 else 64, next_power_of_2(rank)))
    # Small calls: enough programs before large tiles.
    if tokens * joint <= 64 * 128 * 132:
        return Tiles((64, columns, ranks, 4, 3), (64, 4), few=groups == 1)
    return Tiles((128, columns, ranks, 8, 3), (64, 4), few=groups == 1, registers=96 if groups == 1 else None)


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
) -> Tensor:
    """See ``reference.attend``."""
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
    if bits == 2:
        raise NotImplementedError("2-bit values run as their reference meaning")
    int8 = decoder_codes is not None and codes.dtype == torch.int8
    half_precision = query.dtype != torch.float32
    device = query.device
    generated = codegen.generate(modifier, tensors)
    tiles = tiles or tiles_for(rows * count, decoder.shape[1], rank, groups, int8, half_precision)
    precision = "tf32" if half_precision else "ieee"

    rebuilt = torch.empty((rows, count, kv_heads, dim), dtype=query.dtype, device=device)
    tile_t, tile_e, tile_r, warps, depth = tiles.rebuild
    _rebuild_kernel[(triton.cdiv(decoder.shape[1], tile_e), triton.cdiv(rows * count, tile_t))](
        indices, codes, decoder_codes if int8 else decoder, rebuilt, rows * count, queries * count, total,
        R=rank, E=decoder.shape[1], INT8=int8, COMPUTE=_TRITON_TYPES[query.dtype], PRECISION=precision,
        TILE_T=tile_t, TILE_E=tile_e, TILE_R=tile_r, num_warps=warps, num_stages=stages(depth),
    )  # fmt: skip

    tile_t, warps = tiles.attend
    latent_splits, ring_splits = triton.cdiv(count, tile_t), triton.cdiv(window, tile_t)
    splits = latent_splits + ring_splits
    g_pad = max(16, next_power_of_2(groups))
    partial = torch.empty((rows, kv_heads, splits, g_pad, dim), dtype=torch.float32, device=device)
    stats = torch.empty((rows, kv_heads, splits, 2, g_pad), dtype=torch.float32, device=device)
    out = torch.empty((batch, queries, heads, dim), dtype=query.dtype, device=device)
    if bits:
        value_scales = value_scales.view(torch.int32)
    d_pad = max(16, next_power_of_2(dim))
    attend_kernel = _attend_few_kernel if tiles.few else _attend_kernel
    capped = {} if tiles.registers is None or torch.version.hip else {"maxnreg": tiles.registers}
    attend_kernel[(kv_heads, splits, rows)](
        query, indices, rebuilt, decoder_scales if int8 else scales, scales, value_codes, value_scales,
        ring_key, ring_value, ring_slots, cos, sin, partial, stats,
        queries, count, total, window, query.stride(0), query.stride(1), query.stride(2), _batch_stride(ring_slots),
        cos.shape[1] if cos.shape[0] > 1 else 0, codegen.arguments(tensors, integers), scale,
        N=kv_heads, G=groups, G_PAD=g_pad, D=dim, D_PAD=d_pad, DR=rotary_dim,
        PAIRS_PAD=max(16, next_power_of_2(max(rotary_dim // 2, 1))),
        REST_PAD=max(16, next_power_of_2(max(dim - rotary_dim, 1))),
        INTERLEAVED=rotary == "interleaved", GROUP=value_group(dim), BITS=bits, QUANTIZED=codes.dtype == torch.int8,
        INT8=int8, LATENT_SPLITS=latent_splits, SPLITS=splits, TILE_T=tile_t,
        MASK_FN=generated.mask_fn, SCORE_FN=generated.score_fn, MASKS=generated.masks, MODIFIES=generated.modifies,
        PRECISION=precision, num_warps=warps, **capped,
    )  # fmt: skip
    _combine_kernel[(triton.cdiv(heads, 16), rows)](
        partial, stats, value_transform, scales if sink_logits is None else sink_logits, out,
        N=kv_heads, G=groups, G_PAD=g_pad, D=dim, D_PAD=d_pad, SINKS=sink_logits is not None,
        LATENT_SPLITS=latent_splits, SPLITS=splits, HEADS=16, PRECISION=precision, num_warps=4,
    )  # fmt: skip
    return out


_TRITON_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
