"""Triton kernels of ``sals::score`` by head: the ``"mass"`` of attention that heads give a token, or their ``"max"``.

A sum over heads can be taken before the product with the latents (``score.py``); these cannot, so each head's query is
projected for itself, and the product with the latents has one column a head:

    project   projected[block, h, r] = sum_d (Rot(block)^T q[h])[d] decoder[r, n(h), d]
    logits    l[t, h] = scale scale[t] sum_r codes[t, r] projected[block of t, h, r], modified and masked
    totals    of each head: the maximum and the sum of exp(l - maximum) over all tokens
    mass      s[t] = sum_h exp(l[t, h]) / total[h]

Between ``logits`` and ``mass`` stand ``exp(l - maximum of the tile)`` in fp16, whose relative precision does not depend
on the size of the logits, and a factor for each tile and head. ``"max"`` ends with the second kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import codegen
from .encode import Jobs, encode_job, quantize
from .index_expr import Modifier
from .launch import (
    after_previous,
    batch_stride,
    dependent_launch,
    next_power_of_2,
    require_contiguous,
    row_major,
)
from .reference import BLOCK
from .score import partner, settle

#: Tokens of a program of the logits and mass kernels (divides BLOCK).
TILE_TOKENS = 128


@triton.jit
def _project_heads_kernel(
    query, decoder, block_cos, block_sin, projected,
    queries, blocks, capacity, query_b, query_l, query_h, rows_p, args,
    N: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, H_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DR: tl.constexpr, RS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, UPPER_FN: tl.constexpr,
    PRECISION: tl.constexpr, TILE_B: tl.constexpr, TILE_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (blocks, KV head, query token): ``projected [rows, blocks, H_PAD, RS]``."""
    project_heads(
        query, decoder, block_cos, block_sin, projected, tl.program_id(0), tl.program_id(1), tl.program_id(2),
        queries, blocks, capacity, query_b, query_l, query_h, rows_p, args,
        N, G, G_PAD, H_PAD, D, D_PAD, DR, RS, INTERLEAVED, BLOCK, UPPER_FN, PRECISION, TILE_B, TILE_R, PDL,
    )  # fmt: skip


@triton.jit
def _begin_by_head_kernel(
    query, decoder, block_cos, block_sin, projected, cleared,
    value_codes, value_scales, ring_key, ring_value, key_pre, key, value, encoder, value_transform, slots, parts,
    queries, blocks, capacity, query_b, query_l, query_h, rows_p, args, clear, jobs, block_tiles,
    tokens, total, window, slots_p, pre_b, pre_l, key_b, key_l, key_n, value_b, value_l, value_n,
    N: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, H_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DR: tl.constexpr, RS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, UPPER_FN: tl.constexpr,
    PRECISION: tl.constexpr, TILE_B: tl.constexpr, TILE_R: tl.constexpr,
    E: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, ENCODE_M: tl.constexpr,
    ENCODE_R: tl.constexpr, ENCODE_E: tl.constexpr, SPLIT_E: tl.constexpr, TILE_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (encoding job, or projection): the two need nothing of each other. Zeroes ``cleared [clear]``."""
    program = tl.program_id(0)
    if program < jobs:
        after_previous(PDL)
        if program == 0:
            for first in range(0, clear, 1024):
                at = first + tl.arange(0, 1024)
                tl.store(cleared + at, tl.zeros((1024,), tl.int32), mask=at < clear)
        encode_job(
            value_codes, value_scales, ring_key, ring_value, key_pre, key, value, encoder, value_transform, slots,
            parts, program, tokens, queries, total, window, slots_p, pre_b, pre_l, key_b, key_l, key_n,
            value_b, value_l, value_n,
            E, R, N, D, D_PAD, GROUP, BITS, ENCODE_M, ENCODE_R, ENCODE_E, SPLIT_E, TILE_V, PRECISION,
        )  # fmt: skip
    else:
        program -= jobs
        project_heads(
            query, decoder, block_cos, block_sin, projected,
            program % block_tiles, program // block_tiles % N, program // (block_tiles * N),
            queries, blocks, capacity, query_b, query_l, query_h, rows_p, args,
            N, G, G_PAD, H_PAD, D, D_PAD, DR, RS, INTERLEAVED, BLOCK, UPPER_FN, PRECISION, TILE_B, TILE_R, PDL,
        )  # fmt: skip


@triton.jit
def project_heads(
    query, decoder, block_cos, block_sin, projected, tile_b, n, row,
    queries, blocks, capacity, query_b, query_l, query_h, rows_p, args,
    N: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, H_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DR: tl.constexpr, RS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, UPPER_FN: tl.constexpr,
    PRECISION: tl.constexpr, TILE_B: tl.constexpr, TILE_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The heads of KV head ``n``, turned for TILE_B blocks, then projected a few coordinates at a time."""
    COMPUTE: tl.constexpr = query.dtype.element_ty
    b = row // queries
    q = row % queries
    d = tl.arange(0, D_PAD)
    g = tl.arange(0, G_PAD)
    block = tile_b * TILE_B + tl.arange(0, TILE_B)
    other, sign = partner(d, DR, INTERLEAVED)
    known = (d < D)[None, :]
    after_previous(PDL)
    stop = tl.cdiv(UPPER_FN(b, q, capacity, args), BLOCK) if DR > 0 else 1
    if tile_b * TILE_B < stop:
        own = query + b.to(tl.int64) * query_b + q * query_l + (n * G + tl.minimum(g, G - 1))[:, None] * query_h
        straight = tl.load(own + d[None, :], mask=known, other=0.0).to(tl.float32)
        turned = tl.broadcast_to(straight[None, :, :], (TILE_B, G_PAD, D_PAD))
        if DR > 0:
            # A block's mean rotation is read once for all heads of the group.
            means = (b.to(tl.int64) * rows_p + block)[:, None] * DR
            rotated = (block < blocks)[:, None] & (d < DR)[None, :]
            cos = tl.load(block_cos + means + d[None, :], mask=rotated, other=0.0).to(tl.float32)
            cos = tl.where((d < DR)[None, :], cos, 1.0)
            sin = tl.load(block_sin + means + other[None, :], mask=rotated, other=0.0).to(tl.float32)
            across = tl.load(own + other[None, :], mask=known, other=0.0).to(tl.float32) * sign[None, :]
            turned = turned * cos[:, None, :] + across[None, :, :] * sin[:, None, :]
        turned = tl.reshape(turned.to(COMPUTE), (TILE_B * G_PAD, D_PAD))
        m = tl.arange(0, TILE_B * G_PAD)
        of_block = tile_b * TILE_B + m // G_PAD
        cell = (row.to(tl.int64) * blocks + of_block) * H_PAD + n * G + m % G_PAD
        kept = ((of_block < blocks) & (m % G_PAD < G))[:, None]
        for first in range(0, RS, TILE_R):
            r = first + tl.arange(0, TILE_R)
            at = decoder + r[None, :] * (N * D) + n * D + d[:, None]
            basis = tl.load(at, mask=(d < D)[:, None] & (r < RS)[None, :], other=0.0)
            products = tl.dot(turned, basis.to(COMPUTE), input_precision=PRECISION)
            tl.store(projected + cell[:, None] * RS + r[None, :], products.to(COMPUTE), mask=kept & (r < RS)[None, :])


@triton.jit
def _logits_kernel(
    codes, scales, projected, ring_slots, slots, weights, stats, scores, maxima, arrived, parts, tokens,
    total, queries, capacity, window, sinks, blocks, ring_p, slots_p, scale, args,
    H: tl.constexpr, H_PAD: tl.constexpr, R: tl.constexpr, RS: tl.constexpr, TILE_R: tl.constexpr,
    TILE_T: tl.constexpr, BLOCK: tl.constexpr, INT8: tl.constexpr, BLOCKWISE: tl.constexpr, GROUP: tl.constexpr,
    LARGEST: tl.constexpr, MASK_FN: tl.constexpr, SCORE_FN: tl.constexpr, UPPER_FN: tl.constexpr,
    LOWER_FN: tl.constexpr, MASKS: tl.constexpr, PER_HEAD: tl.constexpr, MODIFIES: tl.constexpr,
    PRECISION: tl.constexpr, ENCODES: tl.constexpr, RANK_PAD: tl.constexpr, SPLIT_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (TILE_T tokens, query token): ``weights [rows, S, H_PAD]`` and their ``stats [rows, tiles, 2, H_PAD]``;
    with LARGEST the scores themselves.

    With ENCODES the call's new tokens are still in ``parts``. Whoever has them in its tile quantises them: every query
    token's program does, so that none waits for another, and all store the same.
    """
    COMPUTE: tl.constexpr = projected.dtype.element_ty
    row = tl.program_id(1).to(tl.int64)
    b = tl.program_id(1) // queries
    q = tl.program_id(1) % queries
    # The last tokens first: theirs are the programs that may have more to do.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first = tile * TILE_T
    t = first + tl.arange(0, TILE_T)
    h = tl.arange(0, H_PAD)
    token = b.to(tl.int64) * total + t
    here = stats + (row * (total // TILE_T) + tile) * (2 * H_PAD) + h
    reached = (first < UPPER_FN(b, q, capacity, args)) & (first + TILE_T > LOWER_FN(b, q, args))
    after_previous(PDL)
    if ENCODES:
        for new in range(queries):
            slot = tl.load(slots + b.to(tl.int64) * slots_p + new)
            if (slot >= first) & (slot < first + TILE_T):
                quantize(
                    parts, codes, scales, slots, b * queries + new, tokens, queries, total, slots_p,
                    R, RANK_PAD, SPLIT_E, INT8,
                )  # fmt: skip
        tl.debug_barrier()
    logits = tl.zeros((TILE_T, H_PAD), tl.float32)
    if reached:
        if INT8:
            token_scale = tl.load(scales + token).to(tl.float32)
        cell = (row * blocks + (first // BLOCK if BLOCKWISE else 0)) * H_PAD
        for start in range(0, RS, TILE_R):
            r = start + tl.arange(0, TILE_R)
            asked = (h < H)[None, :] & (r < RS)[:, None]
            query = tl.load(projected + (cell + h)[None, :] * RS + r[:, None], mask=asked, other=0.0)
            if RS % TILE_R == 0:
                latent = tl.load(codes + token[:, None] * R + r[None, :])
            else:
                latent = tl.load(codes + token[:, None] * R + r[None, :], mask=(r < RS)[None, :], other=0)
            logits = tl.dot(latent.to(COMPUTE), query, logits, input_precision=PRECISION)
        if INT8:
            logits *= token_scale[:, None]
    if LARGEST:
        value = tl.max(tl.where((h < H)[None, :], logits, float("-inf")), axis=1)
        value = tl.where(reached, value, float("-inf"))
        held = tl.load(ring_slots + b.to(tl.int64) * ring_p + t % window)
        settle(
            value, held, scores, maxima, arrived, slots, b, q, row, t, first, total, capacity, window, sinks, slots_p,
            args, H, MASK_FN, MASKS, PER_HEAD, TILE_T, GROUP,
        )  # fmt: skip
    else:
        logits *= scale
        kv = tl.minimum(t, capacity - 1)
        if MODIFIES:
            logits = SCORE_FN(logits, b, h[None, :], q, kv[:, None], args)
        allowed = (t < capacity)[:, None] & (h < H)[None, :] & reached
        if MASKS:
            allowed = allowed & MASK_FN(b, tl.minimum(h, H - 1)[None, :], q, kv[:, None], args)
        logits = tl.where(allowed, logits, float("-inf"))
        top = tl.max(logits, axis=0)
        shares = tl.exp(logits - tl.where(top == float("-inf"), 0.0, top)[None, :])
        tl.store(here, top)
        tl.store(here + H_PAD, tl.sum(shares, axis=0))
        at = weights + (row * total + t)[:, None] * H_PAD + h[None, :]
        tl.store(at, shares.to(weights.dtype.element_ty))


@triton.jit
def _totals_kernel(stats, factors, tiles, H_PAD: tl.constexpr, HEADS: tl.constexpr, TILES: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    """Program (HEADS heads, query token): ``factors [rows, tiles, H_PAD]``, exp(tile's maximum - maximum) / sum."""
    row = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    tile = tl.arange(0, TILES)
    at = (row * tiles + tile)[:, None] * (2 * H_PAD) + h[None, :]
    known = (tile < tiles)[:, None]
    after_previous(PDL)
    tops = tl.load(stats + at, mask=known, other=float("-inf"))
    sums = tl.load(stats + at + H_PAD, mask=known, other=0.0)
    top = tl.max(tops, axis=0)
    parts = tl.exp(tops - tl.where(top == float("-inf"), 0.0, top)[None, :])
    whole = tl.sum(parts * sums, axis=0)
    factor = parts / tl.where(whole == 0.0, 1.0, whole)[None, :]
    tl.store(factors + (row * tiles + tile)[:, None] * H_PAD + h[None, :], factor, mask=known)


@triton.jit
def _mass_kernel(
    weights, factors, ring_slots, slots, scores, maxima, arrived,
    total, queries, capacity, window, sinks, ring_p, slots_p, args,
    H: tl.constexpr, H_PAD: tl.constexpr, TILE_T: tl.constexpr, GROUP: tl.constexpr,
    MASK_FN: tl.constexpr, MASKS: tl.constexpr, PER_HEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (TILE_T tokens, query token): the scores."""
    row = tl.program_id(1).to(tl.int64)
    b = tl.program_id(1) // queries
    q = tl.program_id(1) % queries
    first = tl.program_id(0) * TILE_T
    t = first + tl.arange(0, TILE_T)
    h = tl.arange(0, H_PAD)
    shares = tl.load(weights + (row * total + t)[:, None] * H_PAD + h[None, :]).to(tl.float32)
    held = tl.load(ring_slots + b.to(tl.int64) * ring_p + t % window)
    after_previous(PDL)
    factor = tl.load(factors + (row * (total // TILE_T) + tl.program_id(0)) * H_PAD + h)
    value = tl.sum(shares * factor[None, :], axis=1)
    settle(
        value, held, scores, maxima, arrived, slots, b, q, row, t, first, total, capacity, window, sinks, slots_p,
        args, H, MASK_FN, MASKS, PER_HEAD, TILE_T, GROUP,
    )  # fmt: skip


def score_by_head(
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
    head_score: str,
    scale: float,
    maxima: Tensor | None,
    arrived: Tensor | None,
    group: int,
    encoding: Jobs | None,
    cleared: Tensor | None,
) -> Tensor:
    """``score.score`` for ``head_score`` ``"mass"`` and ``"max"``."""
    require_contiguous(codes=codes, scales=scales, block_cos=block_cos, block_sin=block_sin, ring_slots=ring_slots)
    query, decoder, slots = row_major(query, 1), decoder.contiguous(), row_major(slots, 1)
    batch, queries, heads, dim = query.shape
    total, rank = codes.shape[1:]
    kv_heads = decoder.shape[1] // dim
    rows, groups = batch * queries, heads // kv_heads
    rotary_dim = 0 if rotary == "none" else block_cos.shape[-1]
    parsed, generated = Modifier.parse(modifier), codegen.generate(modifier, tensors)
    args, device, dtype = codegen.arguments(tensors, integers), query.device, query.dtype
    precision = "ieee" if dtype == torch.float32 else "tf32"
    launch = dependent_launch(device)

    blocks, tiles = total // BLOCK if rotary_dim else 1, total // TILE_TOKENS
    group_pad, heads_pad = next_power_of_2(groups), max(16, next_power_of_2(heads))
    tile_b = max(1, min(64, max(16, next_power_of_2(blocks * group_pad))) // group_pad)
    tile_r = max(16, min(64, next_power_of_2(score_rank)))
    projected = torch.empty((rows, blocks, heads_pad, score_rank), dtype=dtype, device=device)
    grid = (triton.cdiv(blocks, tile_b), kv_heads, rows)
    arguments = (queries, blocks, capacity, query.stride(0), query.stride(1), query.stride(2),
                 block_cos.shape[1] if block_cos.shape[0] > 1 else 0, args)  # fmt: skip
    constants = {
        "N": kv_heads, "G": groups, "G_PAD": group_pad, "H_PAD": heads_pad, "D": dim,
        "D_PAD": max(16, next_power_of_2(dim)), "DR": rotary_dim, "RS": score_rank,
        "INTERLEAVED": rotary == "interleaved", "BLOCK": BLOCK, "UPPER_FN": generated.upper_fn, "PRECISION": precision,
        "TILE_B": tile_b, "TILE_R": tile_r, "num_warps": 4,
    }  # fmt: skip
    if encoding is None:
        _project_heads_kernel[grid](query, decoder, block_cos, block_sin, projected, *arguments, **constants, **launch)
    else:
        first, (tokens, _, *numbers) = encoding.arguments[:11], encoding.arguments[11:]
        _begin_by_head_kernel[(encoding.jobs + grid[0] * grid[1] * rows,)](
            query, decoder, block_cos, block_sin, projected, cleared, *first, *arguments,
            0 if cleared is None else cleared.numel(), encoding.jobs, grid[0], tokens, *numbers,
            **constants, **encoding.own_constants(), num_stages=encoding.stages, **launch,
        )  # fmt: skip

    scores = torch.empty((batch, queries, total), dtype=torch.float32, device=device)
    largest = head_score == "max"
    kind = torch.float32 if dtype == torch.float32 else torch.float16
    weights = scores if largest else torch.empty((rows, total, heads_pad), dtype=kind, device=device)
    stats = scores if largest else torch.empty((rows, tiles, 2, heads_pad), dtype=torch.float32, device=device)
    found = (scores, scores if maxima is None else maxima, scores if arrived is None else arrived)
    ring = (batch_stride(ring_slots), batch_stride(slots))
    shared = {
        "H": heads, "H_PAD": heads_pad, "TILE_T": TILE_TOKENS, "GROUP": group, "MASK_FN": generated.mask_fn,
        "MASKS": generated.masks, "PER_HEAD": parsed.mask.uses("h"),
    }  # fmt: skip
    _logits_kernel[(tiles, rows)](
        codes, scales, projected, ring_slots, slots, weights, stats, *found,
        scores if encoding is None else encoding.parts, rows,
        total, queries, capacity, ring_slots.shape[1], sinks, blocks, *ring, scale, args,
        R=rank, RS=score_rank, TILE_R=max(32, min(128, next_power_of_2(score_rank))), BLOCK=BLOCK,
        INT8=codes.dtype == torch.int8, BLOCKWISE=rotary_dim > 0, LARGEST=largest, SCORE_FN=generated.score_fn,
        UPPER_FN=generated.upper_fn, LOWER_FN=generated.lower_fn, MODIFIES=generated.modifies, PRECISION=precision,
        ENCODES=encoding is not None, RANK_PAD=next_power_of_2(rank),
        SPLIT_E=1 if encoding is None else encoding.constants["SPLIT_E"], num_warps=4, **shared, **launch,
    )  # fmt: skip
    if largest:
        return scores
    factors = torch.empty((rows, tiles, heads_pad), dtype=torch.float32, device=device)
    at_once = min(heads_pad, max(1, 8192 // next_power_of_2(tiles)))
    _totals_kernel[(heads_pad // at_once, rows)](
        stats, factors, tiles, H_PAD=heads_pad, HEADS=at_once, TILES=next_power_of_2(tiles), num_warps=4, **launch
    )
    _mass_kernel[(tiles, rows)](
        weights, factors, ring_slots, slots, *found, total, queries, capacity, ring_slots.shape[1], sinks, *ring, args,
        num_warps=4, **shared, **launch,
    )  # fmt: skip
    return scores
