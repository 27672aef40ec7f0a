"""Triton kernels of ``sals::score``: what every cached token is worth to this call's queries, read from the latents.

``block_rotary`` needs, for each block of tokens, the query un-rotated by the block's mean rotation and projected on
the decoder. Done as written that is a product of ``[blocks, E] x [E, Rs]``. All heads share the rotation, so it is
folded the other way round: with ``u[d] = q[d] cos[d] + sign(d) q[p(d)] sin[p(d)]``, where ``p(d)`` is the other dim of
``d``'s rotated pair,

    fold   A[d, r] = sum_n q[n, d] decoder[r, n, d],   A'[d, r] = sign(d) sum_n q[n, p(d)] decoder[r, n, d]
    project   projected[block, r] = sum_d cos[block, d] A[d, r] + sin[block, p(d)] A'[d, r]

which is ``N`` times less arithmetic in the second, larger product. One kernel does both for a few coordinates ``r``.
Then one pass over the codes, bounded by memory:

    score   s[t] = scale[t] sum_r codes[t, r] projected[block of t, r]

and, when a selection follows, the maxima of groups of tokens (``select.py``) while the scores are in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import codegen
from .encode import Jobs, encode_job, quantize, round_half_even
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

#: Tokens of a program of the score kernel (divides BLOCK).
SCORE_TOKENS = 128

#: Latent coordinates of a program of the projection, which share a step when they are quantised.
STEP = 32


@triton.jit
def order_of(x):
    """An int32 that orders as fp32 ``x`` does; NaN and -inf get the least value of all. Both zeros are one value."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x > float("-inf"), ordered, -2147483648)


@triton.jit
def partner(d, DR: tl.constexpr, INTERLEAVED: tl.constexpr):
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
def _project_kernel(
    query, decoder, block_cos, block_sin, projected, steps,
    queries, blocks, capacity, query_b, query_l, query_h, rows_p, args,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, DR: tl.constexpr, RS: tl.constexpr,
    INTERLEAVED: tl.constexpr, INT8: tl.constexpr, BLOCK: tl.constexpr, UPPER_FN: tl.constexpr, PRECISION: tl.constexpr,
    TILE_R: tl.constexpr, TILE_N: tl.constexpr, TILE_B: tl.constexpr, BLOCK_TILES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of latent coordinates, part of the blocks, query token)."""
    project(
        query, decoder, block_cos, block_sin, projected, steps, tl.program_id(0), tl.program_id(1), tl.program_id(2),
        queries, blocks, capacity, query_b, query_l, query_h, rows_p, args,
        N, G, D, D_PAD, DR, RS, INTERLEAVED, INT8, BLOCK, UPPER_FN, PRECISION, TILE_R, TILE_N, TILE_B, BLOCK_TILES, PDL,
    )  # fmt: skip


@triton.jit
def _begin_kernel(
    query, decoder, block_cos, block_sin, projected, steps, cleared,
    value_codes, value_scales, ring_key, ring_value, key_pre, key, value, encoder, value_transform, slots, parts,
    queries, blocks, capacity, query_b, query_l, query_h, rows_p, args, clear, jobs, ranks, block_parts,
    tokens, total, window, slots_p, pre_b, pre_l, key_b, key_l, key_n, value_b, value_l, value_n,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, DR: tl.constexpr, RS: tl.constexpr,
    INTERLEAVED: tl.constexpr, INT8: tl.constexpr, BLOCK: tl.constexpr, UPPER_FN: tl.constexpr, PRECISION: tl.constexpr,
    TILE_R: tl.constexpr, TILE_N: tl.constexpr, TILE_B: tl.constexpr, BLOCK_TILES: tl.constexpr,
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
        project(
            query, decoder, block_cos, block_sin, projected, steps,
            program % ranks, program // ranks % block_parts, program // (ranks * block_parts),
            queries, blocks, capacity, query_b, query_l, query_h, rows_p, args,
            N, G, D, D_PAD, DR, RS, INTERLEAVED, INT8, BLOCK, UPPER_FN, PRECISION, TILE_R, TILE_N, TILE_B, BLOCK_TILES,
            PDL,
        )  # fmt: skip


@triton.jit
def project(
    query, decoder, block_cos, block_sin, projected, steps, tile_r, part, row,
    queries, blocks, capacity, query_b, query_l, query_h, rows_p, args,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, DR: tl.constexpr, RS: tl.constexpr,
    INTERLEAVED: tl.constexpr, INT8: tl.constexpr, BLOCK: tl.constexpr, UPPER_FN: tl.constexpr, PRECISION: tl.constexpr,
    TILE_R: tl.constexpr, TILE_N: tl.constexpr, TILE_B: tl.constexpr, BLOCK_TILES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The projected query of each block, at TILE_R coordinates and BLOCK_TILES tiles of blocks.

    Either fp32 ``[rows, blocks, RS]``, or int8 ``[rows, blocks, 2, RS]`` with ``steps [rows, blocks, RS/TILE_R]``: two
    terms of a number, ``step * (first + second / 254)``, which is 15 bits of it.
    """
    COMPUTE: tl.constexpr = query.dtype.element_ty
    r = tile_r * TILE_R + tl.arange(0, TILE_R)
    d = tl.arange(0, D_PAD)
    known = d < D
    other, sign = partner(d, DR, INTERLEAVED)
    direct = tl.zeros((TILE_R, D_PAD), tl.float32)
    across = tl.zeros((TILE_R, D_PAD), tl.float32)
    b = row // queries
    own = query + b.to(tl.int64) * query_b + (row % queries) * query_l
    # -- fold the heads
    coming = _heads_of_decoder(decoder, r, 0, d, N, D, RS, TILE_N)
    after_previous(PDL)
    for first in range(0, N, TILE_N):
        n = first + tl.arange(0, TILE_N)
        basis = coming.to(tl.float32)
        coming = _heads_of_decoder(decoder, r, first + TILE_N, d, N, D, RS, TILE_N)
        summed = _group_sums(own, n, d, known, query_h, N, G, TILE_N, D_PAD)
        direct += tl.sum(basis * summed[None, :, :], axis=1)
        if DR > 0:
            turned = _group_sums(own, n, other, known, query_h, N, G, TILE_N, D_PAD) * sign[None, :]
            across += tl.sum(basis * turned[None, :, :], axis=1)
    # -- turn them by each block's mean rotation
    straight = tl.trans(direct).to(COMPUTE)
    crossed = tl.trans(across).to(COMPUTE)
    stop = tl.cdiv(UPPER_FN(b, row % queries, capacity, args), BLOCK) if DR > 0 else 1
    end = tl.minimum((part + 1) * BLOCK_TILES, tl.cdiv(stop, TILE_B))
    for tile in tl.range(part * BLOCK_TILES, end, num_stages=1):
        block = tile * TILE_B + tl.arange(0, TILE_B)
        means = (b.to(tl.int64) * rows_p + block[:, None]) * DR
        turns = (block < blocks)[:, None] & (d < DR)[None, :]
        if DR > 0:
            cos = tl.load(block_cos + means + d[None, :], mask=turns, other=0.0).to(tl.float32)
            cos = tl.where((d < DR)[None, :], cos, 1.0)
            sin = tl.load(block_sin + means + other[None, :], mask=turns, other=0.0)
            total = tl.dot(cos.to(COMPUTE), straight, input_precision=PRECISION)
            total = tl.dot(sin.to(COMPUTE), crossed, total, input_precision=PRECISION)
        else:
            total = tl.dot(tl.full((TILE_B, D_PAD), 1.0, COMPUTE), straight, input_precision=PRECISION)
        cell = row.to(tl.int64) * blocks + block
        stored = (block < blocks)[:, None] & (r < RS)[None, :]
        if INT8:
            step = tl.maximum(tl.max(tl.abs(total), axis=1) / 127.0, 1e-30)
            scaled = total / step[:, None]
            leading = round_half_even(scaled)
            trailing = round_half_even((scaled - leading) * 254.0)
            at = projected + cell[:, None] * (2 * RS) + r[None, :]
            tl.store(at, leading.to(tl.int8), mask=stored)
            tl.store(at + RS, trailing.to(tl.int8), mask=stored)
            tl.store(steps + cell * tl.cdiv(RS, TILE_R) + tile_r, step, mask=block < blocks)
        else:
            tl.store(projected + cell[:, None] * RS + r[None, :], total, mask=stored)


@triton.jit
def _heads_of_decoder(decoder, r, first, d, N: tl.constexpr, D: tl.constexpr, RS: tl.constexpr, TILE_N: tl.constexpr):
    """Decoder ``[TILE_R, TILE_N, D_PAD]`` of the KV heads from ``first`` on."""
    n = first + tl.arange(0, TILE_N)
    return tl.load(
        decoder + r[:, None, None] * (N * D) + n[None, :, None] * D + d[None, None, :],
        mask=(r < RS)[:, None, None] & (n < N)[None, :, None] & (d < D)[None, None, :], other=0.0,
    )  # fmt: skip


@triton.jit
def _group_sums(own, n, d, known, query_h, N: tl.constexpr, G: tl.constexpr, TILE_N: tl.constexpr,
                D_PAD: tl.constexpr):  # fmt: skip
    """A query token ``[TILE_N, D_PAD]`` at dims ``d``, summed over the heads that share a KV head."""
    total = tl.zeros((TILE_N, D_PAD), tl.float32)
    for g in tl.static_range(G):
        at = own + (n * G + g)[:, None] * query_h + d[None, :]
        total += tl.load(at, mask=(n < N)[:, None] & known[None, :], other=0.0).to(tl.float32)
    return total


@triton.jit
def _score_kernel(
    codes, scales, projected, steps, ring_slots, slots, scores, maxima, arrived, parts, tokens,
    total, queries, heads, capacity, sinks, blocks, ring_p, slots_p, args,
    WINDOW: tl.constexpr, R: tl.constexpr, RS: tl.constexpr, TILE_R: tl.constexpr, TILE_T: tl.constexpr,
    BLOCK: tl.constexpr, INT8: tl.constexpr, STEP: tl.constexpr, BLOCKWISE: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    MASK_FN: tl.constexpr, UPPER_FN: tl.constexpr, LOWER_FN: tl.constexpr, MASKS: tl.constexpr, PER_HEAD: tl.constexpr,
    ENCODES: tl.constexpr, RANK_PAD: tl.constexpr, SPLIT_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (TILE_T tokens, batch): scores for every query token of the call.

    With ENCODES one more program of each batch entry finishes its new tokens' latents, which nothing here needs.

    Only the projected queries come from the kernel before this one, so all else is read while that one runs. The tokens
    that this call wrote are in the exact ring or always selected: their codes are not needed.
    """
    b = tl.program_id(1)
    first = tl.program_id(0) * TILE_T
    t = first + tl.arange(0, TILE_T)
    stop = UPPER_FN(b, 0, capacity, args)
    start = LOWER_FN(b, 0, args)
    for q in range(1, queries):
        stop = tl.maximum(stop, UPPER_FN(b, q, capacity, args))
        start = tl.minimum(start, LOWER_FN(b, q, args))
    if ENCODES and first >= total:
        after_previous(PDL)
        for q in range(queries):
            quantize(
                parts, codes, scales, slots, b * queries + q, tokens, queries, total, slots_p,
                R, RANK_PAD, SPLIT_E, INT8,
            )  # fmt: skip
    elif (first >= stop) | (first + TILE_T <= start):
        # No token that the mask can allow: the codes are not read.
        after_previous(PDL)
        for q in range(queries):
            least = tl.full((TILE_T,), float("-inf"), tl.float32)
            store_scores(scores, maxima, arrived, (b * queries + q).to(tl.int64), t, first, least, total, TILE_T, GROUP)
    else:
        token = b.to(tl.int64) * total + t
        latents = ()
        for part in tl.static_range(PARTS):
            r = part * TILE_R + tl.arange(0, TILE_R)
            if RS % TILE_R == 0:
                latent = tl.load(codes + token[:, None] * R + r[None, :])
            else:
                latent = tl.load(codes + token[:, None] * R + r[None, :], mask=(r < RS)[None, :], other=0)
            latents += (latent,)  # type: ignore[assignment]
        if INT8:
            token_scale = tl.load(scales + token).to(tl.float32)
        held = tl.load(ring_slots + b.to(tl.int64) * ring_p + t % WINDOW)
        after_previous(PDL)
        # A tile lies in one block, so one projected query serves it.
        cell = (b * queries).to(tl.int64) * blocks + (first // BLOCK if BLOCKWISE else 0)
        for q in range(queries):
            own = cell + q * blocks
            if INT8:
                value = _integer_scores(latents, projected, steps, own, RS, TILE_R, TILE_T, PARTS, STEP) * token_scale
            else:
                value = tl.zeros((TILE_T,), tl.float32)
                for part in tl.static_range(PARTS):
                    r = part * TILE_R + tl.arange(0, TILE_R)
                    weight = tl.load(projected + own * RS + r, mask=r < RS, other=0.0)
                    value += tl.sum(latents[part].to(tl.float32) * weight[None, :], axis=1)
            settle(
                value, held, scores, maxima, arrived, slots, b, q, (b * queries + q).to(tl.int64), t, first, total,
                capacity, WINDOW, sinks, slots_p, args, heads, MASK_FN, MASKS, PER_HEAD, TILE_T, GROUP,
            )  # fmt: skip


@triton.jit
def settle(
    value, held, scores, maxima, arrived, slots, b, q, row, t, first, total, capacity, window, sinks, slots_p, args,
    heads, MASK_FN: tl.constexpr, MASKS: tl.constexpr, PER_HEAD: tl.constexpr, TILE_T: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Stores a tile's scores, of which some are decided without their ``value``.

    ``held``: the slots that the ring holds in the places of tokens ``t``. PER_HEAD: heads see different tokens.
    """
    slot = tl.load(slots + b.to(tl.int64) * slots_p + q)
    kept = (t < sinks) | ((t > slot - window) & (t <= slot))
    value = tl.where(kept, float("inf"), value)
    allowed = (t < capacity) & (held != t)
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
    store_scores(scores, maxima, arrived, row, t, first, value, total, TILE_T, GROUP)


@triton.jit
def _integer_scores(latents, projected, steps, own, RS: tl.constexpr, TILE_R: tl.constexpr, TILE_T: tl.constexpr,
                    PARTS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Products of int8 codes and a projected query of two int8 terms, ``[TILE_T]`` without the tokens' scales.

    STEP coordinates share a step, so a product has columns for eight steps and the two terms of each: columns 2s and
    2s + 1 are those of step s.
    """
    value = tl.zeros((TILE_T,), tl.float32)
    column = tl.arange(0, 16)
    for group in tl.static_range(0, PARTS, 8 * STEP // TILE_R):
        terms = tl.zeros((TILE_T, 16), tl.int32)
        for part in tl.static_range(group, min(PARTS, group + 8 * STEP // TILE_R)):
            r = part * TILE_R + tl.arange(0, TILE_R)
            at = projected + own * (2 * RS) + (column % 2)[None, :] * RS + r[:, None]
            if RS % TILE_R == 0:
                weight = tl.load(at)
            else:
                weight = tl.load(at, mask=(r < RS)[:, None], other=0)
            its_step = (r[:, None] - group * TILE_R) // STEP
            weight = tl.where(its_step == column[None, :] // 2, weight, 0)
            terms = tl.dot(latents[part], weight, terms, out_dtype=tl.int32)
        s = group * TILE_R // STEP + column // 2
        step = tl.load(steps + own * tl.cdiv(RS, STEP) + s, mask=s < tl.cdiv(RS, STEP), other=0.0)
        step *= tl.where(column % 2 == 0, 1.0, 1.0 / 254.0)
        value += tl.sum(terms.to(tl.float32) * step[None, :], axis=1)
    return value


@triton.jit
def store_scores(scores, maxima, arrived, row, t, first, value, total, TILE_T: tl.constexpr, GROUP: tl.constexpr):
    """A tile's scores and the largest key of each of its groups; the selection that follows counts from zero."""
    tl.store(scores + row * total + t, value)
    if GROUP > 0:
        if first == 0:
            tl.store(arrived + row, 0)
        g = first // GROUP + tl.arange(0, TILE_T // GROUP)
        tops = tl.max(tl.reshape(order_of(value), (TILE_T // GROUP, GROUP)), axis=1)
        tl.store(maxima + row * (total // GROUP) + g, tops)


@dataclass(frozen=True)
class Projection:
    """The grid of the projection and its tile sizes."""

    grid: tuple[int, int, int]
    tiles: dict[str, int]


def plan_projection(rows: int, blocks: int, kv_heads: int, score_rank: int) -> Projection:
    """At least about one program a multiprocessor."""
    ranks = triton.cdiv(score_rank, STEP)
    tile_b = min(64, max(16, next_power_of_2(blocks)))
    tiles = triton.cdiv(blocks, tile_b)
    parts = max(1, min(tiles, triton.cdiv(128, ranks * rows)))
    return Projection(
        (ranks, parts, rows),
        {
            "TILE_R": STEP, "TILE_N": min(2, next_power_of_2(kv_heads)), "TILE_B": tile_b,
            "BLOCK_TILES": triton.cdiv(tiles, parts),
        },
    )  # fmt: skip


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
    arrived: Tensor | None = None,
    group: int = 0,
    encoding: Jobs | None = None,
    cleared: Tensor | None = None,
) -> Tensor:
    """See ``reference.score``.

    ``maxima [B*L, S/group]`` int32, when given, gets each group's largest key, and ``arrived [B*L]`` zeros. With
    ``encoding`` the same launches also store the call's new tokens (all of which the ring must hold), and zero
    ``cleared`` (int32).
    """
    if head_score != "sum":
        from .mass import score_by_head  # built of this module's pieces

        return score_by_head(
            query, codes, scales, decoder, block_cos, block_sin, ring_slots, slots, modifier, tensors, integers,
            capacity, score_rank, sinks, rotary, head_score, scale, maxima, arrived, group, encoding,
            cleared,
        )  # fmt: skip
    require_contiguous(codes=codes, scales=scales, block_cos=block_cos, block_sin=block_sin, ring_slots=ring_slots)
    query, decoder, slots = row_major(query, 1), decoder.contiguous(), row_major(slots, 1)
    batch, queries, heads, dim = query.shape
    total, rank = codes.shape[1:]
    kv_heads = decoder.shape[1] // dim
    rows = batch * queries
    rotary_dim = 0 if rotary == "none" else block_cos.shape[-1]
    generated = codegen.generate(modifier, tensors)
    args = codegen.arguments(tensors, integers)
    device = query.device
    half_precision = query.dtype != torch.float32

    int8 = codes.dtype == torch.int8
    tile_r = max(32, min(128, next_power_of_2(score_rank)))
    parts = triton.cdiv(score_rank, tile_r)
    precision = "tf32" if half_precision else "ieee"

    blocks = total // BLOCK if rotary_dim else 1
    plan = plan_projection(rows, blocks, kv_heads, score_rank)
    if int8:
        projected = torch.empty((rows, blocks, 2, score_rank), dtype=torch.int8, device=device)
        steps = torch.empty((rows, blocks, plan.grid[0]), dtype=torch.float32, device=device)
    else:
        projected = steps = torch.empty((rows, blocks, score_rank), dtype=torch.float32, device=device)
    arguments = (queries, blocks, capacity, query.stride(0), query.stride(1), query.stride(2),
                 block_cos.shape[1] if block_cos.shape[0] > 1 else 0, args)  # fmt: skip
    constants = {
        "N": kv_heads, "G": heads // kv_heads, "D": dim, "D_PAD": max(16, next_power_of_2(dim)), "DR": rotary_dim,
        "RS": score_rank, "INTERLEAVED": rotary == "interleaved", "INT8": int8, "BLOCK": BLOCK,
        "UPPER_FN": generated.upper_fn, "PRECISION": precision, **plan.tiles, "num_warps": 8,
    }  # fmt: skip
    if encoding is None:
        _project_kernel[plan.grid](
            query, decoder, block_cos, block_sin, projected, steps, *arguments, **constants, **dependent_launch(device)
        )
    else:
        ranks, block_parts, _ = plan.grid
        first, (tokens, _, *numbers) = encoding.arguments[:11], encoding.arguments[11:]
        _begin_kernel[(encoding.jobs + ranks * block_parts * rows,)](
            query, decoder, block_cos, block_sin, projected, steps, cleared, *first, *arguments,
            0 if cleared is None else cleared.numel(), encoding.jobs, ranks, block_parts, tokens, *numbers,
            **constants, **encoding.own_constants(), num_stages=encoding.stages, **dependent_launch(device),
        )  # fmt: skip

    scores = torch.empty((batch, queries, total), dtype=torch.float32, device=device)
    parts_of_latents = scores if encoding is None else encoding.parts
    _score_kernel[(triton.cdiv(total, SCORE_TOKENS) + (encoding is not None), batch)](
        codes, scales, projected, steps, ring_slots, slots, scores, scores if maxima is None else maxima,
        scores if arrived is None else arrived, parts_of_latents, rows,
        total, queries, heads, capacity, sinks, blocks,
        batch_stride(ring_slots), batch_stride(slots), args,
        WINDOW=ring_slots.shape[1], R=rank, RS=score_rank, TILE_R=tile_r, TILE_T=SCORE_TOKENS,
        BLOCK=BLOCK, INT8=int8, STEP=STEP, BLOCKWISE=rotary_dim > 0, GROUP=group, PARTS=parts,
        MASK_FN=generated.mask_fn, UPPER_FN=generated.upper_fn, LOWER_FN=generated.lower_fn, MASKS=generated.masks,
        PER_HEAD=Modifier.parse(modifier).mask.uses("h"),
        ENCODES=encoding is not None, RANK_PAD=next_power_of_2(rank),
        SPLIT_E=1 if encoding is None else encoding.constants["SPLIT_E"], num_warps=4 if score_rank <= 256 else 8,
        **dependent_launch(device),
    )  # fmt: skip
    return scores
