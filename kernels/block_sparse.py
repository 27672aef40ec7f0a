"""The stateless form on a GPU: each block of queries selects its tokens, then attends them.

``sals::block_select``. Un-rotating the mean query of a run for a block of keys and projecting it are both linear, and
rows of cos and sin are shared by all heads, so with ``a_rd = Σ_n q_nd decoder_rnd`` and
``b_rd = Σ_n q_nd (J decoder_r)_nd``

    projected[run, key block, r] = Σ_d cos[key block, d] a_rd + sin[key block, d] b_rd

is a product of depth ``2 Dr``, not ``E``. The scores of runs against a key block are then one more product, whose
maximum over a block's runs is all that is stored.

What it moves is what it costs: ``(2 Dr + C) Rs`` coefficients and projections of a run, written and read once, which
at 1x32k, 8 heads of 128, Rs = 128 is 128 KiB for each of 8192 runs; the product with the latents is 69 GFLOP.

``sals::block_attend`` gathers the selected keys and values once for all heads of a group and all queries of a block: a
tile of ``query_block * G`` rows shares each tile of keys.

Dimensions as in ``reference.py``; ``Q`` blocks of queries, ``U`` runs of all of them, ``C = ceil(S / BLOCK)`` blocks
of keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import codegen, reference
from .dense import attend_tile, finish, flags, power_of_two, precision, register_limit, rows_last
from .index_expr import Modifier
from .launch import capability
from .score import order_of
from .select import select

LEAST = tl.constexpr(-2147483648)

#: Rows of scores up to this long are selected by one program each, from registers, when there are enough of them.
ROW_IN_REGISTERS = 32768
ROWS_IN_REGISTERS = 64

#: Bytes of scores and projections held at a time; query blocks are taken in chunks that fit.
WORKSPACE = 256 << 20


@triton.jit
def _mean_query_kernel(
    query,
    out,
    stride_b,
    stride_l,
    stride_h,
    queries,
    QUERY_BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``out[d, b * U + run, n]``: the mean over the run's queries of their sum over the group's heads."""
    run, n, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    runs, kv_heads, batch = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    start = run // RUNS * QUERY_BLOCK + run % RUNS * RUN
    stop = tl.minimum(tl.minimum(start + RUN, (run // RUNS + 1) * QUERY_BLOCK), queries)
    dim = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
    for first in range(0, RUN * GROUP, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        l = start + row // GROUP  # noqa: E741
        at = query + b.to(tl.int64) * stride_b + l.to(tl.int64) * stride_l + (n * GROUP + row % GROUP) * stride_h
        rows = tl.load(at[:, None] + dim[None, :], mask=(l < stop)[:, None] & (dim < D)[None, :], other=0.0)
        total += rows.to(tl.float32)
    mean = tl.sum(total, 0) / tl.maximum(stop - start, 1)
    at = out + (dim.to(tl.int64) * batch * runs + b * runs + run) * kv_heads + n
    tl.store(at, mean.to(out.dtype.element_ty), mask=dim < D)


@triton.jit
def _block_rows_kernel(
    cos,
    sin,
    out,
    stride_p,
    stride_s,
    total,
    DR: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_DR: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
):
    """``out[p, block, :] = [mean cos, mean sin, 1]`` over the rows that were written (unwritten rows are all zeros)."""
    block, p = tl.program_id(0), tl.program_id(1)
    token = block * KEY_BLOCK + tl.arange(0, KEY_BLOCK)
    dim = tl.arange(0, BLOCK_DR)
    at = p.to(tl.int64) * stride_p + token.to(tl.int64)[:, None] * stride_s + dim[None, :]
    shown = (token < total)[:, None] & (dim < DR)[None, :]
    cos_rows = tl.load(cos + at, mask=shown, other=0.0).to(tl.float32)
    sin_rows = tl.load(sin + at, mask=shown, other=0.0).to(tl.float32)
    written = tl.max(((cos_rows != 0.0) | (sin_rows != 0.0)).to(tl.int32), 1)
    count = tl.maximum(tl.sum(written, 0), 1).to(tl.float32)
    line = out + (p.to(tl.int64) * tl.num_programs(0) + block) * WIDTH
    tl.store(line + dim, (tl.sum(cos_rows, 0) / count).to(out.dtype.element_ty), mask=dim < DR)
    tl.store(line + DR + dim, (tl.sum(sin_rows, 0) / count).to(out.dtype.element_ty), mask=dim < DR)
    if WIDTH > 2 * DR:
        tl.store(line + 2 * DR, 1.0)


@triton.jit
def _block_score_kernel(
    projected,
    latent,
    scores,
    args,
    projected_stride_b,
    projected_stride_q,
    projected_stride_c,
    latent_stride_b,
    first_block,
    chunk_blocks,
    queries,
    heads,
    keys,
    sinks,
    recents,
    MASK_FN: tl.constexpr,
    UPPER_FN: tl.constexpr,
    LOWER_FN: tl.constexpr,
    MASKS: tl.constexpr,
    ANY_HEAD: tl.constexpr,
    UPPER_ONLY: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_RUN: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
):
    """``scores[b, i, kv]`` of ``BLOCK_Q`` query blocks of this chunk against one block of keys; a row is a run."""
    tile, key_block, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, BLOCK_Q * BLOCK_RUNS)
    local = tile * BLOCK_Q + row // BLOCK_RUNS  # block within the chunk
    run = row % BLOCK_RUNS
    block = first_block + local
    start = block * QUERY_BLOCK + run * RUN
    stop = tl.minimum((block + 1) * QUERY_BLOCK, queries)
    inside = (local < chunk_blocks) & (run < RUNS) & (start < stop)
    kv = key_block * KEY_BLOCK + tl.arange(0, KEY_BLOCK)

    # Every query of every run of the tile, for the bounds.
    member = tl.arange(0, BLOCK_RUN)
    q = tl.minimum(start[:, None] + tl.minimum(member, RUN - 1)[None, :], stop[:, None] - 1)
    q = tl.where(inside[:, None], q, queries - 1)
    upper = tl.max(UPPER_FN(b, q, keys, args) + q * 0, 1)
    lower = tl.min(LOWER_FN(b, q, args) + q * 0, 1)
    result = tl.full((BLOCK_Q * BLOCK_RUNS, KEY_BLOCK), float("-inf"), tl.float32)
    # Rows that are none take the last query's bounds, which would reach everything.
    highest = tl.max(tl.where(inside, upper, 0))
    lowest = tl.min(tl.where(inside, lower, keys))
    if (key_block * KEY_BLOCK < highest) & ((key_block + 1) * KEY_BLOCK > lowest):
        products = tl.zeros((BLOCK_Q * BLOCK_RUNS, KEY_BLOCK), tl.float32)
        for first in range(0, RANK, BLOCK_RANK):
            rank = first + tl.arange(0, BLOCK_RANK)
            left = projected + b.to(tl.int64) * projected_stride_b + key_block * projected_stride_c
            left_at = left + (local * RUNS + run).to(tl.int64)[:, None] * projected_stride_q + rank[None, :]
            left_tile = tl.load(left_at, mask=inside[:, None] & (rank < RANK)[None, :], other=0.0)
            right_at = latent + b.to(tl.int64) * latent_stride_b + kv.to(tl.int64)[:, None] * RANK + rank[None, :]
            right_tile = tl.load(right_at, mask=(kv < keys)[:, None] & (rank < RANK)[None, :], other=0.0)
            products = tl.dot(left_tile, tl.trans(right_tile), products, input_precision=PRECISION)
        here = block[:, None] * QUERY_BLOCK + (keys - queries)
        near = (kv[None, :] > here - recents) & (kv[None, :] < here + QUERY_BLOCK + recents)
        products = tl.where((kv < sinks)[None, :] | near, float("inf"), products)
        allowed = inside[:, None] & (kv < keys)[None, :]
        if MASKS:
            safe = tl.minimum(kv, keys - 1)[None, :]
            if UPPER_ONLY:
                allowed = allowed & (kv[None, :] < upper[:, None])
            else:
                seen = tl.full((BLOCK_Q * BLOCK_RUNS, KEY_BLOCK), 0, tl.int1)
                for i in range(RUN):
                    one = tl.where(inside, tl.minimum(start + i, stop - 1), queries - 1)[:, None]
                    if ANY_HEAD:
                        for h in range(heads):
                            seen = seen | MASK_FN(b, h, one, safe, args)
                    else:
                        seen = seen | MASK_FN(b, 0, one, safe, args)
                allowed = allowed & seen
        result = tl.where(allowed, products, result)
    best = tl.max(tl.reshape(result, (BLOCK_Q, BLOCK_RUNS, KEY_BLOCK)), 1)
    mine = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    at = scores + (b.to(tl.int64) * chunk_blocks + mine[:, None]) * keys + kv[None, :]
    tl.store(at, best, mask=(mine < chunk_blocks)[:, None] & (kv < keys)[None, :])


@triton.jit
def _select_rows_kernel(scores, out, total, k, BLOCK: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr):
    """``reference.select`` of a row held in registers: the k-th largest bit by bit, then compaction in index order."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * total
    out += row * k
    index = tl.arange(0, BLOCK)
    ordered = order_of(tl.load(scores + index, mask=index < total, other=float("-inf")))
    limit = LEAST
    for i in range(32):
        # The first step, from the least integer by 2**31, would overflow if written as a shift of 1.
        candidate = limit ^ LEAST if i == 0 else limit + (1 << (31 - i))
        if tl.sum((ordered >= candidate).to(tl.int32), 0) >= k:
            limit = candidate
    ties = k - tl.sum((ordered > limit).to(tl.int32), 0)
    # Read again, from L2, in chunks: running counts of the whole row would not fit in registers beside it.
    larger_before = 0
    equal_before = 0
    for first in range(0, total, CHUNK):
        token = first + tl.arange(0, CHUNK)
        again = order_of(tl.load(scores + token, mask=token < total, other=float("-inf")))
        larger = (again > limit).to(tl.int32)
        equal = ((again == limit) & (again != LEAST)).to(tl.int32)
        # Both running counts in one scan.
        running = tl.cumsum(larger + (equal << 16), 0)
        equals = equal_before + (running >> 16)
        place = larger_before + (running & 0xFFFF) + tl.minimum(equals, ties) - 1
        tl.store(out + place, token, mask=(larger != 0) | ((equal != 0) & (equals <= ties)))
        larger_before += tl.sum(larger, 0)
        equal_before += tl.sum(equal, 0)
    found = larger_before + tl.minimum(equal_before, ties)
    pad = tl.arange(0, BLOCK_K)
    tl.store(out + pad, tl.full((BLOCK_K,), -1, tl.int32), mask=(pad >= found) & (pad < k))


def select_rows(scores: Tensor, k: int, out: Tensor) -> None:
    """``out[...] = select(scores, k)``, by the kernel that suits the number and the length of the rows."""
    total = scores.shape[-1]
    rows = scores.numel() // total
    if total > ROW_IN_REGISTERS or rows < ROWS_IN_REGISTERS or not out.is_contiguous():
        out.copy_(select(scores, k))
        return
    block = power_of_two(total)
    warps = max(4, min(32, block // 1024))
    _select_rows_kernel[(rows,)](
        scores, out, total, k, BLOCK=block, CHUNK=min(block, 128 * warps), BLOCK_K=power_of_two(k), num_warps=warps
    )


def mean_queries(query: Tensor, kv_heads: int, query_block: int, dtype: torch.dtype) -> Tensor:
    """Each run's mean query, summed over the heads of a group: ``[B,L,H,D] -> [D,B*U,N]``."""
    batch, queries, heads, dim = query.shape
    group = heads // kv_heads
    runs, run = reference.block_runs(query_block)
    count = -(-queries // query_block) * runs
    query = rows_last(query)
    out = torch.empty((dim, batch * count, kv_heads), dtype=dtype, device=query.device)
    _mean_query_kernel[(count, kv_heads, batch)](
        query,
        out,
        *query.stride()[:3],
        queries,
        QUERY_BLOCK=query_block,
        RUNS=runs,
        RUN=run,
        GROUP=group,
        D=dim,
        BLOCK_ROWS=min(32, power_of_two(run * group, 1)),
        BLOCK_D=power_of_two(dim),
        num_warps=4,
    )
    return out


def block_rows(cos: Tensor, sin: Tensor, total: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Mean cos and sin rows of each block of keys (and 1, if some dims do not rotate): ``[P,S,Dr] -> [P,C,width]``."""
    rotary_dim = cos.shape[-1]
    width = 2 * rotary_dim + (rotary_dim < head_dim)
    blocks = triton.cdiv(total, reference.BLOCK)
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty((cos.shape[0], blocks, width), dtype=dtype, device=cos.device)
    _block_rows_kernel[(blocks, cos.shape[0])](
        cos,
        sin,
        out,
        *cos.stride()[:2],
        total,
        DR=rotary_dim,
        WIDTH=width,
        BLOCK_DR=power_of_two(rotary_dim),
        KEY_BLOCK=reference.BLOCK,
        num_warps=8 if rotary_dim <= 128 else 16,
    )
    return out


def block_select(
    query: Tensor,
    key_pre: Tensor,
    cos: Tensor,
    sin: Tensor,
    encoder: Tensor,
    decoder: Tensor,
    modifier: str,
    tensors: Sequence[Tensor],
    integers: Sequence[int],
    query_block: int,
    k: int,
    sinks: int,
    recents: int,
    rotary: str,
) -> Tensor:
    """See ``reference.block_select``. Scores are held for a bounded number of query blocks at a time."""
    batch, queries, heads, dim = query.shape
    total, kv_heads, rank = key_pre.shape[1], key_pre.shape[2], encoder.shape[1]
    blocks = -(-queries // query_block)
    key_blocks = -(-total // reference.BLOCK)
    out = torch.empty((batch, blocks, k), dtype=torch.int32, device=query.device)
    if out.numel() == 0 or total == 0:
        return out.fill_(-1)
    compute = key_pre.dtype
    rotary_dim = 0 if rotary == "none" else cos.shape[-1]
    runs = reference.block_runs(query_block)[0]
    mean = mean_queries(query, kv_heads, query_block, compute).view(dim, batch, blocks * runs, kv_heads)
    latent = key_pre.flatten(2) @ encoder.to(compute)
    basis = decoder.to(compute).unflatten(1, (kv_heads, dim))  # [Rs,N,D]
    if rotary_dim:
        rows = block_rows(cos, sin, total, dim, compute)  # [P,C,width]
        turning = basis[..., :rotary_dim]
        # [2 Dr, N, Rs]: what a mean query's dims multiply to make the coefficients of mean cos and mean sin.
        across = torch.cat((turning, reference.rotate_pairs(turning, rotary)), dim=-1).permute(2, 1, 0).contiguous()
    width = rows.shape[-1] if rotary_dim else 1
    plain_dims = dim - rotary_dim
    plain = basis[..., rotary_dim:].permute(2, 1, 0).reshape(plain_dims * kv_heads, rank)
    # Bytes of one query block: its scores, select's copy of them, the coefficients and projections of its runs.
    copies = 4 if total <= ROW_IN_REGISTERS else 12
    each = batch * (copies * total + runs * ((key_blocks if rotary_dim else 1) + width) * rank * compute.itemsize)
    chunk = max(1, min(blocks, WORKSPACE // each))
    for first in range(0, blocks, chunk):
        part = mean[:, :, first * runs : (first + chunk) * runs]
        count = part.shape[2]
        part = part.reshape(dim, batch * count, kv_heads)
        coefficients = torch.empty((width, batch * count, rank), dtype=compute, device=query.device)
        if rotary_dim:
            torch.bmm(part[:rotary_dim], across[:rotary_dim], out=coefficients[:rotary_dim])
            torch.bmm(part[:rotary_dim], across[rotary_dim:], out=coefficients[rotary_dim : 2 * rotary_dim])
        if plain_dims:
            still = part[rotary_dim:].transpose(0, 1).flatten(1)  # [B*U, dims * N]
            torch.mm(still, plain, out=coefficients[-1])
        if rotary_dim and rows.shape[0] == 1:
            # [C,width] @ [width, B*U*Rs]: one product for all runs.
            projected = (rows[0] @ coefficients.flatten(1)).view(key_blocks, batch, count, rank).permute(1, 2, 0, 3)
        elif rotary_dim:
            by_batch = coefficients.view(width, batch, count * rank).transpose(0, 1)
            projected = (rows @ by_batch).view(batch, key_blocks, count, rank).transpose(1, 2)
        else:
            projected = coefficients.view(batch, count, 1, rank).expand(-1, -1, key_blocks, -1)
        scores = torch.empty((batch, count // runs, total), dtype=torch.float32, device=query.device)
        _score_chunk(
            projected, latent, scores, first, modifier, tensors, integers, query_block, queries, heads, sinks, recents
        )
        select_rows(scores, k, out[:, first : first + chunk])
    return out


def _score_chunk(
    projected: Tensor,
    latent: Tensor,
    scores: Tensor,
    first_block: int,
    modifier: str,
    tensors: Sequence[Tensor],
    integers: Sequence[int],
    query_block: int,
    queries: int,
    heads: int,
    sinks: int,
    recents: int,
) -> None:
    batch, count, total = scores.shape
    rank = latent.shape[-1]
    mask = Modifier.parse(modifier).mask
    generated = flags(modifier, tensors)
    runs, run = reference.block_runs(query_block)
    block_runs = power_of_two(runs, 1)
    block_q = max(1, 64 // block_runs)
    grid = (triton.cdiv(count, block_q), triton.cdiv(total, reference.BLOCK), batch)
    _block_score_kernel[grid](
        projected,
        latent,
        scores,
        codegen.arguments(tensors, integers),
        *projected.stride()[:3],
        latent.stride(0),
        first_block,
        count,
        queries,
        heads,
        total,
        sinks,
        recents,
        MASK_FN=generated["MASK_FN"],
        UPPER_FN=generated["UPPER_FN"],
        LOWER_FN=generated["LOWER_FN"],
        MASKS=generated["MASKS"],
        ANY_HEAD=mask.uses("h"),
        UPPER_ONLY=bool(generated["INTERVAL"]) and codegen.lower_bound(mask) is None,
        PRECISION=precision(latent.dtype),
        QUERY_BLOCK=query_block,
        RUNS=runs,
        BLOCK_RUNS=block_runs,
        RUN=run,
        BLOCK_RUN=power_of_two(run, 1),
        RANK=rank,
        BLOCK_RANK=min(64, power_of_two(rank)),
        BLOCK_Q=block_q,
        KEY_BLOCK=reference.BLOCK,
        num_warps=4,
    )


@triton.jit
def _gathered_range(
    acc,
    top,
    total,
    query_tile,
    key,
    value,
    chosen,
    key_stride,
    value_stride,
    start,
    stop,
    count,
    lower,
    upper,
    b,
    h,
    q,
    args,
    scale,
    MASKED: tl.constexpr,
    MASK_FN: tl.constexpr,
    SCORE_FN: tl.constexpr,
    MASKS: tl.constexpr,
    MODIFIES: tl.constexpr,
    INTERVAL: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Entries ``start .. stop`` of the list ``chosen`` of one query block, one KV head."""
    dim = tl.arange(0, BLOCK_D)
    value_dim = tl.arange(0, BLOCK_DV)
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        entry = first + tl.arange(0, BLOCK_N)
        if MASKED:
            index = tl.load(chosen + entry, mask=entry < count, other=-1)
        else:
            index = tl.load(chosen + entry)
        kv = tl.maximum(index, 0)
        key_at = key + kv.to(tl.int64)[:, None] * key_stride + dim[None, :]
        value_at = value + kv.to(tl.int64)[:, None] * value_stride + value_dim[None, :]
        if D == BLOCK_D:
            key_tile = tl.load(key_at)
        else:
            key_tile = tl.load(key_at, mask=(dim < D)[None, :], other=0.0)
        if DV == BLOCK_DV:
            value_tile = tl.load(value_at)
        else:
            value_tile = tl.load(value_at, mask=(value_dim < DV)[None, :], other=0.0)
        valid = True
        if MASKED:
            valid = (index >= 0)[None, :]
            if INTERVAL:
                valid = valid & (kv[None, :] >= lower[:, None]) & (kv[None, :] < upper[:, None])
            elif MASKS:
                valid = valid & MASK_FN(b, h, q, kv[None, :], args)
        acc, top, total = attend_tile(
            acc, top, total, query_tile, key_tile, value_tile, b, h, q, kv[None, :], valid, args, scale,
            MASKED, SCORE_FN, MODIFIES, PRECISION,
        )  # fmt: skip
    return acc, top, total


@triton.jit
def _block_attend_kernel(
    query,
    key,
    value,
    indices,
    out,
    sink_logits,
    args,
    query_stride_b,
    query_stride_l,
    query_stride_h,
    key_stride_b,
    key_stride_s,
    key_stride_n,
    value_stride_b,
    value_stride_s,
    value_stride_n,
    queries,
    heads,
    keys,
    scale,
    MASK_FN: tl.constexpr,
    SCORE_FN: tl.constexpr,
    UPPER_FN: tl.constexpr,
    LOWER_FN: tl.constexpr,
    MASKS: tl.constexpr,
    MODIFIES: tl.constexpr,
    INTERVAL: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Programs of one KV head run together (the block is the fastest axis): its keys and values stay in L2.
    row_tiles: tl.constexpr = (QUERY_BLOCK * GROUP + BLOCK_M - 1) // BLOCK_M
    block = tl.program_id(0) // row_tiles
    n = tl.program_id(1)
    b = tl.program_id(2)
    blocks = tl.num_programs(0) // row_tiles

    row = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    l = block * QUERY_BLOCK + row // GROUP  # noqa: E741
    stored = (row < QUERY_BLOCK * GROUP) & (l < queries)
    q = tl.minimum(l, queries - 1)
    h = n * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_D)
    value_dim = tl.arange(0, BLOCK_DV)
    query_at = query + b.to(tl.int64) * query_stride_b + q.to(tl.int64) * query_stride_l + h * query_stride_h
    query_tile = tl.load(query_at[:, None] + dim[None, :], mask=stored[:, None] & (dim < D)[None, :], other=0.0)
    key += b.to(tl.int64) * key_stride_b + n * key_stride_n
    value += b.to(tl.int64) * value_stride_b + n * value_stride_n
    chosen = indices + (b.to(tl.int64) * blocks + block) * COUNT

    # The list is ascending and padded at its end: what needs a mask (tokens at the diagonal, padding) comes last.
    entry = tl.arange(0, BLOCK_COUNT)
    listed = tl.load(chosen + entry, mask=entry < COUNT, other=-1)
    stop = tl.max(tl.where(listed >= 0, entry + 1, 0))
    upper = UPPER_FN(b, q, keys, args) + q * 0
    lower = LOWER_FN(b, q, args) + q * 0
    if INTERVAL:
        open_to_all = (listed >= tl.max(lower)) & (listed < tl.min(upper))
        plain = tl.min(tl.where(open_to_all, BLOCK_COUNT, entry)) // BLOCK_N * BLOCK_N
    else:
        plain = 0

    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for part in tl.static_range(2 if INTERVAL else 1):
        if not INTERVAL:
            begin, end = 0, stop
        elif part == 0:
            begin, end = 0, plain
        else:
            begin, end = plain, stop
        acc, top, total = _gathered_range(
            acc, top, total, query_tile, key, value, chosen, key_stride_s, value_stride_s, begin, end, COUNT,
            lower, upper, b, h[:, None], q[:, None], args, scale, not INTERVAL or part != 0, MASK_FN, SCORE_FN, MASKS,
            MODIFIES, INTERVAL, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES,
        )  # fmt: skip

    acc = finish(acc, top, total, sink_logits, h, SINKS)
    line = (b.to(tl.int64) * queries + q) * heads + h
    tl.store(
        out + line[:, None] * DV + value_dim[None, :],
        acc.to(out.dtype.element_ty),
        mask=stored[:, None] & (value_dim < DV)[None, :],
    )


def attend_tiling(rows: int, width: int, itemsize: int, device: torch.device) -> dict[str, int]:
    """Tile and launch sizes for ``rows`` rows a query block and heads of ``width`` (a power of two).

    H200, 1x32k, T = 2048: 2.3 ms for 32/8/128 and 2.9 ms for 32/32/128 with a register limit, so that two or more
    programs share a multiprocessor; 3.6 and 3.3 ms with all the registers that the compiler wants.
    """
    row_bytes = width * itemsize
    on_amd = capability(device) == 0
    if row_bytes > 512:
        return {"BLOCK_M": min(32, power_of_two(rows)), "BLOCK_N": 32, "STAGES": 2, "num_warps": 4}
    if row_bytes > 256:
        return {"BLOCK_M": min(64, power_of_two(rows)), "BLOCK_N": 32, "STAGES": 2, "num_warps": 4}
    if not 90 <= capability(device) < 120:
        return {
            "BLOCK_M": min(64, power_of_two(rows)),
            "BLOCK_N": 64,
            "STAGES": 2 if on_amd else 3,
            "num_warps": 4,
        }
    limit = register_limit(128) if capability(device) == 90 else {}
    if rows <= 64:
        return {"BLOCK_M": power_of_two(rows), "BLOCK_N": 32, "STAGES": 3, "num_warps": 4} | limit
    return {"BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 3, "num_warps": 8} | limit


def block_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    modifier: str,
    tensors: Sequence[Tensor],
    integers: Sequence[int],
    query_block: int,
    scale: float,
    sink_logits: Tensor | None = None,
    tiles: dict[str, int] | None = None,
) -> Tensor:
    """See ``reference.block_attend``."""
    batch, queries, heads, head_dim = query.shape
    keys, kv_heads, value_dim = key.shape[1], key.shape[2], value.shape[-1]
    group = heads // kv_heads
    blocks, count = indices.shape[1:]
    out = query.new_empty((batch, queries, heads, value_dim))
    if out.numel() == 0:
        return out
    if count == 0 or keys == 0:
        return out.zero_()
    if scale < 0:  # the kernel takes the maximum before scaling
        query, scale = -query, -scale
    query, key, value, indices = rows_last(query), rows_last(key), rows_last(value), indices.contiguous()
    width = power_of_two(max(head_dim, value_dim))
    tiles = tiles or attend_tiling(query_block * group, width, key.dtype.itemsize, key.device)
    grid = (blocks * triton.cdiv(query_block * group, tiles["BLOCK_M"]), kv_heads, batch)
    _block_attend_kernel[grid](
        query,
        key,
        value,
        indices,
        out,
        out if sink_logits is None else sink_logits,
        codegen.arguments(tensors, integers),
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        queries,
        heads,
        keys,
        float(scale),
        **flags(modifier, tensors),
        SINKS=sink_logits is not None,
        PRECISION=precision(query.dtype),
        QUERY_BLOCK=query_block,
        GROUP=group,
        D=head_dim,
        DV=value_dim,
        BLOCK_D=power_of_two(head_dim),
        BLOCK_DV=power_of_two(value_dim),
        COUNT=count,
        BLOCK_COUNT=power_of_two(count),
        **tiles,
    )
    return out
