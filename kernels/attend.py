"""Triton kernel of ``sals::attend``: attention over the exact ring and a few hundred tokens rebuilt from their latents.

A program of the first launch is (KV head, split, query token); a split is a tile of selected tokens, or a tile of the ring. A latent split
gathers its tokens' int8 rows, rebuilds their keys for its KV head on tensor cores (``z @ decoder``), rotates them by the recorded
rows, and attends with the G query heads that share the head; the ring's keys are exact. The rotated pairs of a head
are two separate accumulators ("first" and "second" dims of each pair, wherever they lie), dims that do not rotate a third, so
that rotation is elementwise for every rotary form. Values are dequantised in the Hadamard frame; since the transform is linear it
is undone once, on the combined output: a second launch adds up the splits, in order, so the result is deterministic.

The rebuild is the arithmetic here: ``2 * tokens * R * E`` FLOPs a query token. With ``decoder_codes`` (int8, one scale a column) it runs on the
int8 tensor cores, straight from the stored codes: twice the rate and half the decoder's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import codegen
from .encode import _batch_stride, next_power_of_2, require_contiguous, row_major
from .reference import value_group


@triton.jit
def _rebuild(
    codes, decoder, token, dims, known,
    R: tl.constexpr, E: tl.constexpr, TILE_T: tl.constexpr, TILE_R: tl.constexpr, WIDTH: tl.constexpr,
    INT8: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``codes[token] @ decoder[:, dims]`` in fp32, without scales: ``[TILE_T, WIDTH]``; ``known`` marks the real dims."""
    if INT8:
        total = tl.zeros((TILE_T, WIDTH), tl.int32)
    else:
        total = tl.zeros((TILE_T, WIDTH), tl.float32)
    for start in range(0, R, TILE_R):
        r = start + tl.arange(0, TILE_R)
        latent = _latents(codes, token, r, R, TILE_R)
        total = _product(latent, _columns(decoder, r, dims, known, R, E, TILE_R, INT8), total, INT8, COMPUTE, PRECISION)
    return total.to(tl.float32)


@triton.jit
def _rebuild_pairs(
    codes, decoder, token, dims1, dims2, known,
    R: tl.constexpr, E: tl.constexpr, TILE_T: tl.constexpr, TILE_R: tl.constexpr, WIDTH: tl.constexpr,
    INT8: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """:func:`_rebuild` of both dims of every rotated pair, from one pass over the latents."""
    if INT8:
        total1 = tl.zeros((TILE_T, WIDTH), tl.int32)
        total2 = tl.zeros((TILE_T, WIDTH), tl.int32)
    else:
        total1 = tl.zeros((TILE_T, WIDTH), tl.float32)
        total2 = tl.zeros((TILE_T, WIDTH), tl.float32)
    for start in range(0, R, TILE_R):
        r = start + tl.arange(0, TILE_R)
        latent = _latents(codes, token, r, R, TILE_R)
        columns1 = _columns(decoder, r, dims1, known, R, E, TILE_R, INT8)
        columns2 = _columns(decoder, r, dims2, known, R, E, TILE_R, INT8)
        total1 = _product(latent, columns1, total1, INT8, COMPUTE, PRECISION)
        total2 = _product(latent, columns2, total2, INT8, COMPUTE, PRECISION)
    return total1.to(tl.float32), total2.to(tl.float32)


@triton.jit
def _latents(codes, token, r, R: tl.constexpr, TILE_R: tl.constexpr):
    at = codes + token[:, None] * R + r[None, :]
    # Without a mask where there can be: 16-byte loads.
    if R % TILE_R == 0:
        latent = tl.load(at)
    else:
        latent = tl.load(at, mask=(r < R)[None, :], other=0)
    return latent


@triton.jit
def _columns(decoder, r, dims, known, R: tl.constexpr, E: tl.constexpr, TILE_R: tl.constexpr, INT8: tl.constexpr):
    # int8 tensor cores want each column contiguous, so the int8 decoder is stored transposed.
    at = decoder + dims[None, :] * R + r[:, None] if INT8 else decoder + r[:, None] * E + dims[None, :]
    if R % TILE_R == 0 and known is None:
        columns = tl.load(at)
    elif known is None:
        columns = tl.load(at, mask=(r < R)[:, None], other=0)
    else:
        columns = tl.load(at, mask=(r < R)[:, None] & known[None, :], other=0)
    return columns


@triton.jit
def _product(latent, columns, total, INT8: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):
    if INT8:
        total = tl.dot(latent, columns, total, out_dtype=tl.int32)
    else:
        total = tl.dot(latent.to(COMPUTE), columns.to(COMPUTE), total, input_precision=PRECISION)
    return total


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
    """Step and minimum of dims FIRST .. FIRST + WIDTH of ``T`` tokens, ``[T, WIDTH]`` each; ``at`` is a token's first pair."""
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
    return (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True), (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)


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
    query, indices, codes, scales, value_codes, value_scales, ring_key, ring_value, ring_slots, cos, sin,
    decoder, decoder_scales, partial, stats,
    queries, count, total, window, query_b, query_l, query_h, ring_p, rows_p, args, scale,
    N: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, R: tl.constexpr,
    DR: tl.constexpr, PAIRS_PAD: tl.constexpr, REST_PAD: tl.constexpr, INTERLEAVED: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, QUANTIZED: tl.constexpr, INT8: tl.constexpr,
    LATENT_SPLITS: tl.constexpr, SPLITS: tl.constexpr, TILE_T: tl.constexpr, TILE_R: tl.constexpr,
    MASK_FN: tl.constexpr, SCORE_FN: tl.constexpr, MASKS: tl.constexpr, MODIFIES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (KV head, split, query token): unnormalised sums ``partial [rows, N, SPLITS, G_PAD, D]``, and their stats."""
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
        # Fetched before the rebuild, which hides their latency.
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
        # -- keys, rotated, times queries
        logits = tl.zeros((TILE_T, G_PAD), tl.float32)
        if DR > 0:
            pair = tl.arange(0, PAIRS_PAD)
            d1 = 2 * pair if INTERLEAVED else pair
            d2 = 2 * pair + 1 if INTERLEAVED else pair + DR // 2
            inside = pair < DR // 2
            known = None if PAIRS_PAD == DR // 2 else inside
            x1, x2 = _rebuild_pairs(
                codes, decoder, token, n * D + d1, n * D + d2, known,
                R, N * D, TILE_T, TILE_R, PAIRS_PAD, INT8, COMPUTE, PRECISION,
            )  # fmt: skip
            turn = (b.to(tl.int64) * rows_p + kv)[:, None] * DR
            c1 = tl.load(cos + turn + d1[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            s1 = tl.load(sin + turn + d1[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            k1 = (x1 * c1 - x2 * s1).to(COMPUTE)
            logits = tl.dot(k1, _query(head, decoder_scales + n * D, d1, inside, INT8), logits, input_precision=PRECISION)
            c2 = tl.load(cos + turn + d2[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            s2 = tl.load(sin + turn + d2[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            k2 = (x2 * c2 + x1 * s2).to(COMPUTE)
            logits = tl.dot(k2, _query(head, decoder_scales + n * D, d2, inside, INT8), logits, input_precision=PRECISION)
        if DR < D:
            rest = DR + tl.arange(0, REST_PAD)
            still = _rebuild(
                codes, decoder, token, n * D + rest, rest < D,
                R, N * D, TILE_T, TILE_R, REST_PAD, INT8, COMPUTE, PRECISION,
            )  # fmt: skip
            whole = _query(head, decoder_scales + n * D, rest, rest < D, INT8)
            logits = tl.dot(still.to(COMPUTE), whole, logits, input_precision=PRECISION)
        weights, top, mass = _weights(
            logits, live, b, h, q, kv, args, token_scale[:, None], MASK_FN, SCORE_FN, MASKS, MODIFIES
        )
        # -- weights times values, in the transformed frame; fp16 holds quantised values better than bf16
        VALUE: tl.constexpr = COMPUTE if BITS == 0 or COMPUTE == tl.float32 else tl.float16
        weights = tl.trans(weights.to(VALUE))
        pairs_at = value_row * (D // GROUP)
        if BITS == 4:
            step, low = _steps(value_scales, pairs_at, 0, HALF_PAD, TILE_T, D, GROUP)
            value = (packed & 15).to(VALUE) * step.to(VALUE) + low.to(VALUE)
            sums = tl.dot(weights, value, input_precision=PRECISION)
            tl.store(here + j[None, :], sums, mask=kept & (j < HALF)[None, :])
            step, low = _steps(value_scales, pairs_at, HALF, HALF_PAD, TILE_T, D, GROUP)
            value = (packed >> 4).to(VALUE) * step.to(VALUE) + low.to(VALUE)
            sums = tl.dot(weights, value, input_precision=PRECISION)
            tl.store(here + HALF + j[None, :], sums, mask=kept & (j < HALF)[None, :])
        else:
            if BITS == 8:
                step, low = _steps(value_scales, pairs_at, 0, D_PAD, TILE_T, D, GROUP)
                packed = packed.to(VALUE) * step.to(VALUE) + low.to(VALUE)
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
        key = tl.load(ring_key + at, mask=stored, other=0.0)
        exact = tl.load(ring_value + at, mask=stored, other=0.0)
        exact_query = tl.load(head + e[:, None], mask=(e < D)[:, None], other=0.0)
        products = tl.dot(key.to(COMPUTE), exact_query, input_precision=PRECISION)
        shares, peak, share = _weights(
            products, kv >= 0, b, h, q, tl.maximum(kv, 0), args, scale, MASK_FN, SCORE_FN, MASKS, MODIFIES
        )
        ring_sums = tl.dot(tl.trans(shares.to(COMPUTE)), exact.to(COMPUTE), input_precision=PRECISION)
        tl.store(here + e[None, :], ring_sums, mask=kept & (e < D)[None, :])
        tl.store(stats + cell * (2 * G_PAD) + g, peak)
        tl.store(stats + cell * (2 * G_PAD) + G_PAD + g, share)


@triton.jit
def _combine_kernel(
    partial, stats, value_transform, sink_logits, out,
    N: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    SINKS: tl.constexpr, LATENT_SPLITS: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (KV head, query token): the splits' sums, in order; the value transform undone on those of latents."""
    n = tl.program_id(0)
    row = tl.program_id(1)
    cell = (row * N + n).to(tl.int64)
    g = tl.arange(0, G_PAD)
    h = n * G + tl.minimum(g, G - 1)
    d = tl.arange(0, D_PAD)
    SPLITS_PAD: tl.constexpr = triton.next_power_of_2(SPLITS)
    s = tl.arange(0, SPLITS_PAD)
    at = stats + (cell * SPLITS + s[:, None]) * (2 * G_PAD) + g[None, :]
    tops = tl.load(at, mask=(s < SPLITS)[:, None], other=float("-inf"))
    masses = tl.load(at + G_PAD, mask=(s < SPLITS)[:, None], other=0.0)
    both = (d < D)[:, None] & (d < D)[None, :]
    # transposed: the output is `sums @ value_transform.T`
    transform = tl.load(value_transform + d[None, :] * D + d[:, None], mask=both, other=0.0).to(tl.float32)
    top = tl.max(tops, axis=0)
    if SINKS:
        sink = tl.load(sink_logits + h).to(tl.float32)
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(tl.exp(tops - top[None, :]) * masses, axis=0)
    if SINKS:
        mass += tl.exp(sink - top)
    mass = tl.where(mass == 0, 1.0, mass)
    inside = (g < G)[:, None] & (d < D)[None, :]
    sums = _combine(partial, stats, cell, g, d, top, inside, 0, LATENT_SPLITS, SPLITS, G_PAD, D_PAD, D)
    sums = tl.dot(sums, transform, input_precision=PRECISION)
    sums += _combine(partial, stats, cell, g, d, top, inside, LATENT_SPLITS, SPLITS, SPLITS, G_PAD, D_PAD, D)
    at = out + (row.to(tl.int64) * (N * G) + h)[:, None] * D + d[None, :]
    tl.store(at, (sums / mass[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _combine(
    partial, stats, cell, g, d, top, inside, FIRST: tl.constexpr, LAST: tl.constexpr, SPLITS: tl.constexpr,
    G_PAD: tl.constexpr, D_PAD: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Sum of splits FIRST .. LAST, each weighted by exp(its maximum - top), in order."""
    total = tl.zeros((G_PAD, D_PAD), tl.float32)
    for s in tl.range(FIRST, LAST, loop_unroll_factor=4):
        weight = tl.exp(tl.load(stats + (cell * SPLITS + s) * (2 * G_PAD) + g) - top)
        at = partial + ((cell * SPLITS + s) * G_PAD + g[:, None]) * D + d[None, :]
        total += weight[:, None] * tl.load(at, mask=inside, other=0.0)
    return total


@dataclass(frozen=True)
class Tiles:
    """How the attend kernel is cut: tokens and latent coordinates of a tile, warps, pipeline stages."""

    tokens: int
    ranks: int
    warps: int
    stages: int
    registers: int | None = None  # a cap, so that two programs fit on a multiprocessor

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments of the launch."""
        capped = {} if self.registers is None or torch.version.hip else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages} | capped


def tiles_for(rows: int, kv_heads: int, count: int, rank: int, int8: bool, half_precision: bool) -> Tiles:
    """A table, not a search: nothing is timed, so the choice is the same inside a CUDA graph.

    Wide token tiles read the decoder less often; narrow ones make enough programs when the batch is small.
    """
    if not half_precision:
        return Tiles(32, 32, 4, 2)
    programs = rows * kv_heads * triton.cdiv(count, 128)
    ranks = max(16, min(128 if int8 else 64, next_power_of_2(rank)))
    if programs >= 132:
        return Tiles(128, ranks, 8, 3)
    return Tiles(64, ranks, 4, 3)


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
    int8 = decoder_codes is not None and codes.dtype == torch.int8
    half_precision = query.dtype != torch.float32
    device = query.device
    generated = codegen.generate(modifier, tensors)
    tiles = tiles or tiles_for(rows, kv_heads, count, rank, int8, half_precision)
    latent_splits, ring_splits = triton.cdiv(count, tiles.tokens), triton.cdiv(window, tiles.tokens)
    splits = latent_splits + ring_splits
    g_pad = max(16, next_power_of_2(groups))
    partial = torch.empty((rows, kv_heads, splits, g_pad, dim), dtype=torch.float32, device=device)
    stats = torch.empty((rows, kv_heads, splits, 2, g_pad), dtype=torch.float32, device=device)
    out = torch.empty((batch, queries, heads, dim), dtype=query.dtype, device=device)
    if bits:
        value_scales = value_scales.view(torch.int32)
    precision = "tf32" if half_precision else "ieee"
    d_pad = max(16, next_power_of_2(dim))
    _attend_kernel[(kv_heads, splits, rows)](
        query, indices, codes, scales, value_codes, value_scales, ring_key, ring_value, ring_slots, cos, sin,
        decoder_codes if int8 else decoder, decoder_scales if int8 else scales, partial, stats,
        queries, count, total, window, query.stride(0), query.stride(1), query.stride(2), _batch_stride(ring_slots),
        cos.shape[1] if cos.shape[0] > 1 else 0, codegen.arguments(tensors, integers), scale,
        N=kv_heads, G=groups, G_PAD=g_pad, D=dim, D_PAD=d_pad, R=rank, DR=rotary_dim,
        PAIRS_PAD=max(16, next_power_of_2(max(rotary_dim // 2, 1))),
        REST_PAD=max(16, next_power_of_2(max(dim - rotary_dim, 1))),
        INTERLEAVED=rotary == "interleaved", GROUP=value_group(dim), BITS=bits, QUANTIZED=codes.dtype == torch.int8,
        INT8=int8, LATENT_SPLITS=latent_splits, SPLITS=splits, TILE_T=tiles.tokens, TILE_R=tiles.ranks,
        MASK_FN=generated.mask_fn, SCORE_FN=generated.score_fn, MASKS=generated.masks, MODIFIES=generated.modifies,
        PRECISION=precision, **tiles.options,
    )  # fmt: skip
    _combine_kernel[(kv_heads, rows)](
        partial, stats, value_transform, scales if sink_logits is None else sink_logits, out,
        N=kv_heads, G=groups, G_PAD=g_pad, D=dim, D_PAD=d_pad, SINKS=sink_logits is not None,
        LATENT_SPLITS=latent_splits, SPLITS=splits, PRECISION=precision, num_warps=4,
    )  # fmt: skip
    return out
