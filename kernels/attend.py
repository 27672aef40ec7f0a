"""Triton kernel of ``sals::attend``: attention over the exact ring and a few hundred tokens rebuilt from their latents.

One launch. A program is (KV head, split, query token); a split is a tile of selected tokens, or a tile of the ring. A latent split
gathers its tokens' int8 rows, rebuilds their keys for its KV head on tensor cores (``z @ decoder``), rotates them by the recorded
rows, and attends with the G query heads that share the head; the ring's keys are exact. The rotated pairs of a head
are two separate accumulators ("first" and "second" dims of each pair, wherever they lie), dims that do not rotate a third, so
that rotation is elementwise for every rotary form. Values are dequantised in the Hadamard frame; since the transform is linear it
is undone once, on the combined output. The last program of a (query token, KV head) to arrive combines the splits, in split
order whatever the order of arrival, so the result is deterministic.

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
from .encode import _batch_stride, launch_options, next_power_of_2, require_contiguous, row_major, wait_for_previous
from .reference import value_group


@triton.jit
def _rebuild(
    codes, decoder, decoder_scales, token, scale, dims, known,
    R: tl.constexpr, E: tl.constexpr, TILE_T: tl.constexpr, TILE_R: tl.constexpr, WIDTH: tl.constexpr,
    INT8: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``z[token] @ decoder[:, dims]`` in fp32, ``[TILE_T, WIDTH]``; ``dims`` are columns of the decoder, ``known`` the real ones."""
    if INT8:
        total = tl.zeros((TILE_T, WIDTH), tl.int32)
    else:
        total = tl.zeros((TILE_T, WIDTH), tl.float32)
    for start in range(0, R, TILE_R):
        r = start + tl.arange(0, TILE_R)
        if R % TILE_R == 0:
            latent = tl.load(codes + token[:, None] * R + r[None, :])
        else:
            latent = tl.load(codes + token[:, None] * R + r[None, :], mask=(r < R)[None, :], other=0)
        if INT8:
            at = decoder + dims[None, :] * R + r[:, None]
        else:
            at = decoder + r[:, None] * E + dims[None, :]
        if R % TILE_R == 0 and known is None:
            columns = tl.load(at)
        elif known is None:
            columns = tl.load(at, mask=(r < R)[:, None], other=0)
        else:
            columns = tl.load(at, mask=(r < R)[:, None] & known[None, :], other=0)
        if INT8:
            total = tl.dot(latent, columns, total, out_dtype=tl.int32)
        else:
            total = tl.dot(latent.to(COMPUTE), columns.to(COMPUTE), total, input_precision=PRECISION)
    rebuilt = total.to(tl.float32) * scale[:, None]
    if INT8:
        if known is None:
            rebuilt *= tl.load(decoder_scales + dims)[None, :]
        else:
            rebuilt *= tl.load(decoder_scales + dims, mask=known, other=0.0)[None, :]
    return rebuilt


@triton.jit
def _dequantized(levels, packed_scales, at, T: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
                 GROUP: tl.constexpr):  # fmt: skip
    """Levels of dims FIRST.. FIRST + WIDTH of ``T`` tokens to fp32; ``at`` is each token's first scale pair."""
    if FIRST % GROUP == 0 and WIDTH % GROUP == 0:
        GROUPS: tl.constexpr = WIDTH // GROUP
        g = FIRST // GROUP + tl.arange(0, GROUPS)
        pairs = tl.load(packed_scales + at[:, None] + g[None, :], mask=(g < D // GROUP)[None, :], other=0)
        pairs = tl.reshape(tl.broadcast_to(pairs[:, :, None], (T, GROUPS, GROUP)), (T, WIDTH))
    else:
        d = FIRST + tl.arange(0, WIDTH)
        pairs = tl.load(packed_scales + at[:, None] + (d // GROUP)[None, :], mask=(d < D)[None, :], other=0)
    step = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    low = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return levels.to(tl.float32) * step + low


@triton.jit
def _attend_kernel(
    query, indices, codes, scales, value_codes, value_scales, ring_key, ring_value, ring_slots, cos, sin,
    decoder, decoder_scales, value_transform, sink_logits, out, partial, stats, counters,
    queries, count, total, window, query_b, query_l, query_h, ring_p, rows_p, args, scale,
    N: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, R: tl.constexpr,
    DR: tl.constexpr, PAIRS_PAD: tl.constexpr, REST_PAD: tl.constexpr, INTERLEAVED: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, QUANTIZED: tl.constexpr, INT8: tl.constexpr, SINKS: tl.constexpr,
    LATENT_SPLITS: tl.constexpr, RING_SPLITS: tl.constexpr, TILE_T: tl.constexpr, TILE_R: tl.constexpr,
    MASK_FN: tl.constexpr, SCORE_FN: tl.constexpr, MASKS: tl.constexpr, MODIFIES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    COMPUTE: tl.constexpr = query.dtype.element_ty
    SPLITS: tl.constexpr = LATENT_SPLITS + RING_SPLITS
    HALF_PAD: tl.constexpr = D_PAD // 2 if D_PAD // 2 > 16 else 16
    n = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    b = row // queries
    q = row % queries
    b64 = b.to(tl.int64)
    g = tl.arange(0, G_PAD)
    h = n * G + tl.minimum(g, G - 1)
    d = tl.arange(0, D_PAD)
    j = tl.arange(0, HALF_PAD)
    head = query + b64 * query_b + q * query_l + h[None, :] * query_h
    cell = (row * N + n).to(tl.int64)
    here = partial + ((cell * SPLITS + split) * G_PAD + g[:, None]) * D
    no_max = tl.full((G_PAD,), float("-inf"), tl.float32)

    if split < LATENT_SPLITS:
        i = split * TILE_T + tl.arange(0, TILE_T)
        kv = tl.load(indices + row.to(tl.int64) * count + i, mask=i < count, other=-1)
        valid = kv >= 0
        kv = tl.maximum(kv, 0)
        if tl.max(valid.to(tl.int32), axis=0) > 0:
            token = b64 * total + kv
            token_head = token * N + n
            # Fetched before the rebuild, which hides their latency.
            if BITS == 4:
                packed = tl.load(
                    value_codes + token_head[:, None] * (D // 2) + j[None, :], mask=(j < D // 2)[None, :], other=0
                )
            else:
                packed = tl.load(value_codes + token_head[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0)
            if QUANTIZED:
                token_scale = tl.load(scales + token).to(tl.float32)
            else:
                token_scale = tl.full((TILE_T,), 1.0, tl.float32)
            # -- keys, rotated, times queries: logits [TILE_T, G_PAD]
            logits = tl.zeros((TILE_T, G_PAD), tl.float32)
            if DR > 0:
                pair = tl.arange(0, PAIRS_PAD)
                if INTERLEAVED:
                    d1 = 2 * pair
                    d2 = 2 * pair + 1
                else:
                    d1 = pair
                    d2 = pair + DR // 2
                known = None if PAIRS_PAD == DR // 2 else pair < DR // 2
                inside = pair < DR // 2
                x1, x2 = _rebuild_pairs(
                    codes, decoder, decoder_scales, token, token_scale, n * D + d1, n * D + d2, known,
                    R, N * D, TILE_T, TILE_R, PAIRS_PAD, INT8, COMPUTE, PRECISION,
                )  # fmt: skip
                turn = (b64 * rows_p + kv)[:, None] * DR
                c1 = tl.load(cos + turn + d1[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
                s1 = tl.load(sin + turn + d1[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
                c2 = tl.load(cos + turn + d2[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
                s2 = tl.load(sin + turn + d2[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
                q1 = tl.load(head + d1[:, None], mask=inside[:, None], other=0.0)
                q2 = tl.load(head + d2[:, None], mask=inside[:, None], other=0.0)
                k1 = (x1 * c1 - x2 * s1).to(COMPUTE)
                k2 = (x2 * c2 + x1 * s2).to(COMPUTE)
                logits = tl.dot(k1, q1, logits, input_precision=PRECISION)
                logits = tl.dot(k2, q2, logits, input_precision=PRECISION)
            if DR < D:
                rest = DR + tl.arange(0, REST_PAD)
                x = _rebuild(
                    codes, decoder, decoder_scales, token, token_scale, n * D + rest, rest < D,
                    R, N * D, TILE_T, TILE_R, REST_PAD, INT8, COMPUTE, PRECISION,
                )  # fmt: skip
                qr = tl.load(head + rest[:, None], mask=(rest < D)[:, None], other=0.0)
                logits = tl.dot(x.to(COMPUTE), qr, logits, input_precision=PRECISION)
            logits *= scale
            live = valid[:, None]
            if MODIFIES:
                logits = SCORE_FN(logits, b, h[None, :], q, kv[:, None], args)
            if MASKS:
                live = live & MASK_FN(b, h[None, :], q, kv[:, None], args)
            logits = tl.where(live, logits, float("-inf"))
            top = tl.max(logits, axis=0)
            safe = tl.where(top == float("-inf"), 0.0, top)
            weights = tl.exp(logits - safe[None, :])
            mass = tl.sum(weights, axis=0)
            weights = tl.trans(weights).to(COMPUTE)
            # -- weights times values
            if BITS == 4:
                at = token_head * (D // GROUP)
                low = _dequantized(packed & 15, value_scales, at, TILE_T, 0, HALF_PAD, D, GROUP)
                if D_PAD == D:
                    high = _dequantized(packed >> 4, value_scales, at, TILE_T, D // 2, HALF_PAD, D, GROUP)
                else:
                    high = _dequantized_anywhere(packed >> 4, value_scales, at, D // 2, HALF_PAD, D, GROUP)
                sums = tl.dot(weights, low.to(COMPUTE), input_precision=PRECISION)
                tl.store(here + j[None, :], sums, mask=(g < G)[:, None] & (j < D // 2)[None, :])
                sums = tl.dot(weights, high.to(COMPUTE), input_precision=PRECISION)
                tl.store(here + j[None, :] + D // 2, sums, mask=(g < G)[:, None] & (j < D // 2)[None, :])
            else:
                if BITS == 8:
                    packed = _dequantized(packed, value_scales, token_head * (D // GROUP), TILE_T, 0, D_PAD, D, GROUP)
                sums = tl.dot(weights, packed.to(COMPUTE), input_precision=PRECISION)
                tl.store(here + d[None, :], sums, mask=(g < G)[:, None] & (d < D)[None, :])
            _store_stats(stats, cell, split, g, top, mass, SPLITS, G_PAD)
        else:
            tl.store(here + d[None, :], tl.zeros((G_PAD, D_PAD), tl.float32), mask=(g < G)[:, None] & (d < D)[None, :])
            _store_stats(stats, cell, split, g, no_max, tl.zeros((G_PAD,), tl.float32), SPLITS, G_PAD)
    else:
        entry = (split - LATENT_SPLITS) * TILE_T + tl.arange(0, TILE_T)
        inside = entry < window
        kv = tl.load(ring_slots + b64 * ring_p + entry, mask=inside, other=-1)
        live = (kv >= 0)[:, None]
        kv = tl.maximum(kv, 0)
        at = ((b64 * window + entry) * N + n)[:, None] * D + d[None, :]
        known = inside[:, None] & (d < D)[None, :]
        key = tl.load(ring_key + at, mask=known, other=0.0)
        value = tl.load(ring_value + at, mask=known, other=0.0)
        whole = tl.load(head + d[:, None], mask=(d < D)[:, None], other=0.0)
        logits = tl.dot(key.to(COMPUTE), whole, input_precision=PRECISION) * scale
        if MODIFIES:
            logits = SCORE_FN(logits, b, h[None, :], q, kv[:, None], args)
        if MASKS:
            live = live & MASK_FN(b, h[None, :], q, kv[:, None], args)
        logits = tl.where(live, logits, float("-inf"))
        top = tl.max(logits, axis=0)
        safe = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp(logits - safe[None, :])
        mass = tl.sum(weights, axis=0)
        sums = tl.dot(tl.trans(weights).to(COMPUTE), value.to(COMPUTE), input_precision=PRECISION)
        tl.store(here + d[None, :], sums, mask=(g < G)[:, None] & (d < D)[None, :])
        _store_stats(stats, cell, split, g, top, mass, SPLITS, G_PAD)

    # -- the last split to arrive combines them all
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + cell, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLITS - 1:
        tl.debug_barrier()
        SPLITS_PAD: tl.constexpr = triton.next_power_of_2(SPLITS)
        s = tl.arange(0, SPLITS_PAD)
        at = stats + (cell * SPLITS + s[:, None]) * (2 * G_PAD) + g[None, :]
        tops = tl.load(at, mask=(s < SPLITS)[:, None], other=float("-inf"), cache_modifier=".cg")
        masses = tl.load(at + G_PAD, mask=(s < SPLITS)[:, None], other=0.0, cache_modifier=".cg")
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
        both = (d < D)[:, None] & (d < D)[None, :]
        # transposed: the output is `sums @ value_transform.T`
        transform = tl.load(value_transform + d[None, :] * D + d[:, None], mask=both, other=0.0).to(tl.float32)
        sums = _combine(partial, stats, cell, g, d, top, inside, 0, LATENT_SPLITS, SPLITS, G_PAD, D_PAD, D)
        sums = tl.dot(sums, transform, input_precision=PRECISION)
        sums += _combine(partial, stats, cell, g, d, top, inside, LATENT_SPLITS, SPLITS, SPLITS, G_PAD, D_PAD, D)
        at = out + (row.to(tl.int64) * (N * G) + h)[:, None] * D + d[None, :]
        tl.store(at, (sums / mass[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rebuild_pairs(
    codes, decoder, decoder_scales, token, scale, dims1, dims2, known,
    R: tl.constexpr, E: tl.constexpr, TILE_T: tl.constexpr, TILE_R: tl.constexpr, WIDTH: tl.constexpr,
    INT8: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both dims of every rotated pair, from one pass over the latents."""
    if INT8:
        total1 = tl.zeros((TILE_T, WIDTH), tl.int32)
        total2 = tl.zeros((TILE_T, WIDTH), tl.int32)
    else:
        total1 = tl.zeros((TILE_T, WIDTH), tl.float32)
        total2 = tl.zeros((TILE_T, WIDTH), tl.float32)
    for start in range(0, R, TILE_R):
        r = start + tl.arange(0, TILE_R)
        whole: tl.constexpr = R % TILE_R == 0
        if whole:
            latent = tl.load(codes + token[:, None] * R + r[None, :])
        else:
            latent = tl.load(codes + token[:, None] * R + r[None, :], mask=(r < R)[None, :], other=0)
        if INT8:
            at1 = decoder + dims1[None, :] * R + r[:, None]
            at2 = decoder + dims2[None, :] * R + r[:, None]
        else:
            at1 = decoder + r[:, None] * E + dims1[None, :]
            at2 = decoder + r[:, None] * E + dims2[None, :]
        if whole and known is None:
            columns1 = tl.load(at1)
            columns2 = tl.load(at2)
        else:
            mask = (r < R)[:, None]
            if known is not None:
                mask = mask & known[None, :]
            columns1 = tl.load(at1, mask=mask, other=0)
            columns2 = tl.load(at2, mask=mask, other=0)
        if INT8:
            total1 = tl.dot(latent, columns1, total1, out_dtype=tl.int32)
            total2 = tl.dot(latent, columns2, total2, out_dtype=tl.int32)
        else:
            latent = latent.to(COMPUTE)
            total1 = tl.dot(latent, columns1.to(COMPUTE), total1, input_precision=PRECISION)
            total2 = tl.dot(latent, columns2.to(COMPUTE), total2, input_precision=PRECISION)
    x1 = total1.to(tl.float32) * scale[:, None]
    x2 = total2.to(tl.float32) * scale[:, None]
    if INT8:
        if known is None:
            x1 *= tl.load(decoder_scales + dims1)[None, :]
            x2 *= tl.load(decoder_scales + dims2)[None, :]
        else:
            x1 *= tl.load(decoder_scales + dims1, mask=known, other=0.0)[None, :]
            x2 *= tl.load(decoder_scales + dims2, mask=known, other=0.0)[None, :]
    return x1, x2


@triton.jit
def _dequantized_anywhere(levels, packed_scales, at, first, WIDTH: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr):
    """As :func:`_dequantized`, for dims that do not start at a group."""
    d = first + tl.arange(0, WIDTH)
    pairs = tl.load(packed_scales + at[:, None] + (d // GROUP)[None, :], mask=(d < D)[None, :], other=0)
    step = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    low = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return levels.to(tl.float32) * step + low


@triton.jit
def _store_stats(stats, cell, split, g, top, mass, SPLITS: tl.constexpr, G_PAD: tl.constexpr):
    at = stats + (cell * SPLITS + split) * (2 * G_PAD) + g
    tl.store(at, top)
    tl.store(at + G_PAD, mass)


@triton.jit
def _combine(
    partial, stats, cell, g, d, top, inside, FIRST: tl.constexpr, LAST: tl.constexpr, SPLITS: tl.constexpr,
    G_PAD: tl.constexpr, D_PAD: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Sum of splits FIRST .. LAST, each weighted by exp(its maximum - top), in order. Eight loads are in flight at a time."""
    total = tl.zeros((G_PAD, D_PAD), tl.float32)
    for start in range(FIRST, LAST, 8):
        for i in tl.static_range(8):
            s = start + i
            if s < LAST:
                weight = tl.exp(tl.load(stats + (cell * SPLITS + s) * (2 * G_PAD) + g, cache_modifier=".cg") - top)
                at = partial + ((cell * SPLITS + s) * G_PAD + g[:, None]) * D + d[None, :]
                total += weight[:, None] * tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
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
    counters: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """See ``reference.attend``. ``counters``: zeroed int32 of at least ``B*L*N``, allocated here when not given."""
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
    if counters is None:
        counters = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)
    out = torch.empty((batch, queries, heads, dim), dtype=query.dtype, device=device)
    if bits:
        value_scales = value_scales.view(torch.int32)
    _attend_kernel[(kv_heads, splits, rows)](
        query, indices, codes, scales, value_codes, value_scales, ring_key, ring_value, ring_slots, cos, sin,
        decoder_codes if int8 else decoder, decoder_scales if int8 else scales, value_transform,
        scales if sink_logits is None else sink_logits, out, partial, stats, counters,
        queries, count, total, window, query.stride(0), query.stride(1), query.stride(2), _batch_stride(ring_slots),
        cos.shape[1] if cos.shape[0] > 1 else 0, codegen.arguments(tensors, integers), scale,
        N=kv_heads, G=groups, G_PAD=g_pad, D=dim, D_PAD=max(16, next_power_of_2(dim)), R=rank, DR=rotary_dim,
        PAIRS_PAD=max(16, next_power_of_2(max(rotary_dim // 2, 1))),
        REST_PAD=max(16, next_power_of_2(max(dim - rotary_dim, 1))),
        INTERLEAVED=rotary == "interleaved", GROUP=value_group(dim), BITS=bits, QUANTIZED=codes.dtype == torch.int8,
        INT8=int8, SINKS=sink_logits is not None, LATENT_SPLITS=latent_splits, RING_SPLITS=ring_splits,
        TILE_T=tiles.tokens, TILE_R=tiles.ranks,
        MASK_FN=generated.mask_fn, SCORE_FN=generated.score_fn, MASKS=generated.masks, MODIFIES=generated.modifies,
        PRECISION="tf32" if half_precision else "ieee",
        **tiles.options, **launch_options(device),
    )  # fmt: skip
    return out
