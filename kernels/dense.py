"""``sals::dense_attention`` on a GPU: exact keys, a proved mask, no mask tensor and no expanded KV heads.

One kernel serves decode and prefill. A program owns a tile of *rows* of one KV head: row ``r`` is query token ``r //
G`` and head ``r % G`` of the group, so that all heads of a group share the keys and values that are loaded. Decode
has one tile of few rows and splits the keys (split-KV, flash-decoding: Dao et al. 2023); prefill has many tiles and
does not. Both visit only the keys that the mask can let through, from bounds that ``codegen.py`` derives and that are
read on the device.

Dimensions as in ``reference.py``: query ``[B,L,H,D]``, key ``[B,S,N,D]`` (rotated), value ``[B,S,N,Dv]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import codegen
from .index_expr import Expr, Modifier
from .launch import capability, multiprocessors

LOG2E = tl.constexpr(1.4426950408889634)

#: From this many query tokens on, a plain mask is worth a hand-written library kernel.
SDPA_QUERIES = 128

#: Kernels of PyTorch to prefer for a plain mask, best first on Hopper.
SDPA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@lru_cache(maxsize=256)
def is_interval(mask: Expr, kinds: tuple[str, ...] = ()) -> bool:
    """Whether ``mask`` says exactly ``lower(b, q) <= kv < upper(b, q)`` with the bounds that ``codegen.py`` prints.

    True for causal and sliding-window masks, not for document or block masks. A conjunction of comparisons, each of
    which has ``kv`` alone on one side, is nothing but its bounds: then a tile inside the bounds of all its rows needs
    no mask, and the others compare ``kv`` with two numbers per row. ``kinds`` are those of the mask's tensors
    (``codegen.kind_of``).
    """
    if mask.op == "const":
        return mask.args[0] is True
    if mask.op == "and":
        return all(is_interval(a, kinds) for a in mask.args)
    if mask.op not in ("lt", "le", "gt", "ge", "eq"):
        return False
    bounds = [bound for bound in (codegen.upper_bound(mask), codegen.lower_bound(mask)) if bound is not None]
    # Bounds that are not whole numbers are not printed at all.
    return bool(bounds) and all(codegen._is_integer(bound, kinds) for bound in bounds)


def flags(modifier: str, tensors: Sequence[Tensor]) -> dict[str, object]:
    """The generated functions and flags of a modifier, which the attention kernels take as ``tl.constexpr``."""
    generated = codegen.generate(modifier, tensors)
    return {
        "MASK_FN": generated.mask_fn,
        "SCORE_FN": generated.score_fn,
        "UPPER_FN": generated.upper_fn,
        "LOWER_FN": generated.lower_fn,
        "MASKS": generated.masks,
        "MODIFIES": generated.modifies,
        "INTERVAL": is_interval(Modifier.parse(modifier).mask, tuple(codegen.kind_of(t.dtype) for t in tensors)),
    }


def precision(dtype: torch.dtype) -> str:
    """How ``tl.dot`` multiplies operands of ``dtype``; fp32 stays fp32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def power_of_two(value: int, least: int = 16) -> int:
    """The power of two at or above ``value``, and at least ``least`` (what ``tl.dot`` takes)."""
    return max(least, 1 << (value - 1).bit_length())


def rows_last(x: Tensor) -> Tensor:
    """``x``, with the last dim contiguous, which the kernels rely on."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def attend_tile(
    acc,
    top,
    total,
    query_tile,
    key_tile,
    value_tile,
    b,
    h,
    q,
    kv,
    valid,
    args,
    scale,
    MASKED: tl.constexpr,
    SCORE_FN: tl.constexpr,
    MODIFIES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One step of the online softmax in base 2: rows ``[M]`` against keys ``[T]``; ``valid`` broadcasts to ``[M, T]``.

    ``scale`` is positive and in natural units; ``h``, ``q`` are ``[M, 1]`` and ``kv [1, T]``, all in range.
    """
    logits = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
    if MODIFIES:
        logits = SCORE_FN(logits * scale, b, h, q, kv, args) * LOG2E
        factor = 1.0
    else:
        factor = scale * LOG2E
    if MASKED:
        logits = tl.where(valid, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1) * factor)
    if MASKED or MODIFIES:
        # A row that has seen nothing yet keeps -inf; subtracting it would make NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    else:
        base = new_top
    weights = tl.exp2(logits * factor - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(value_tile.dtype), value_tile, acc * decay[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def _attend_range(
    acc,
    top,
    total,
    query_tile,
    key,
    value,
    key_stride,
    value_stride,
    start,
    stop,
    capacity,
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
    """Tiles ``start, start + BLOCK_N, ... < stop`` of one KV head; ``key`` and ``value`` point to its first slot."""
    slot = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    value_dim = tl.arange(0, BLOCK_DV)
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        first = tl.multiple_of(first, BLOCK_N)
        kv = first + slot
        # The tile's address in 64 bits, offsets inside it in 32.
        key_at = key + first.to(tl.int64) * key_stride + slot[:, None] * key_stride + dim[None, :]
        value_at = value + first.to(tl.int64) * value_stride + slot[:, None] * value_stride + value_dim[None, :]
        if MASKED:
            inside = kv < capacity
            key_tile = tl.load(key_at, mask=inside[:, None] & (dim < D)[None, :], other=0.0)
            value_tile = tl.load(value_at, mask=inside[:, None] & (value_dim < DV)[None, :], other=0.0)
            valid = inside[None, :]
            if INTERVAL:
                valid = valid & (kv[None, :] >= lower[:, None]) & (kv[None, :] < upper[:, None])
            elif MASKS:
                valid = valid & MASK_FN(b, h, q, tl.minimum(kv, capacity - 1)[None, :], args)
        else:
            if D == BLOCK_D:
                key_tile = tl.load(key_at)
            else:
                key_tile = tl.load(key_at, mask=(dim < D)[None, :], other=0.0)
            if DV == BLOCK_DV:
                value_tile = tl.load(value_at)
            else:
                value_tile = tl.load(value_at, mask=(value_dim < DV)[None, :], other=0.0)
            valid = True
        acc, top, total = attend_tile(
            acc,
            top,
            total,
            query_tile,
            key_tile,
            value_tile,
            b,
            h,
            q,
            tl.minimum(kv, capacity - 1)[None, :],
            valid,
            args,
            scale,
            MASKED,
            SCORE_FN,
            MODIFIES,
            PRECISION,
        )
    return acc, top, total


@triton.jit
def finish(acc, top, total, sink_logits, h, SINKS: tl.constexpr):
    """Divide by the softmax's denominator; ``sink_logits[h]`` join it. Rows that attend nothing give zeros."""
    if SINKS:
        sink = tl.load(sink_logits + h).to(tl.float32) * LOG2E
        base = tl.maximum(top, sink)
        decay = tl.exp2(top - base)
        total = total * decay + tl.exp2(sink - base)
        acc = acc * decay[:, None]
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _dense_kernel(
    query,
    key,
    value,
    out,
    partial,
    partial_stats,
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
    capacity,
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
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles_m = tl.num_programs(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    # Later queries see more keys under a causal mask: start them first, so that the short ones fill the end.
    tile_m = tiles_m - 1 - tl.program_id(0) // SPLITS
    n = tl.program_id(1)
    b = tl.program_id(2)

    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    stored = row < queries * GROUP
    q = tl.minimum(row // GROUP, queries - 1)
    h = n * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_D)
    value_dim = tl.arange(0, BLOCK_DV)
    query_at = query + b.to(tl.int64) * query_stride_b + q.to(tl.int64) * query_stride_l + h * query_stride_h
    query_tile = tl.load(query_at[:, None] + dim[None, :], mask=stored[:, None] & (dim < D)[None, :], other=0.0)
    key += b.to(tl.int64) * key_stride_b + n.to(tl.int64) * key_stride_n
    value += b.to(tl.int64) * value_stride_b + n.to(tl.int64) * value_stride_n

    upper = UPPER_FN(b, q, capacity, args) + q * 0
    lower = LOWER_FN(b, q, args) + q * 0
    first_tile = tl.min(lower) // BLOCK_N
    last_tile = tl.maximum(tl.cdiv(tl.max(upper), BLOCK_N), first_tile)
    if SPLITS > 1:
        share = tl.cdiv(last_tile - first_tile, SPLITS)
        first_tile = tl.minimum(first_tile + split * share, last_tile)
        last_tile = tl.minimum(first_tile + share, last_tile)
    start = first_tile * BLOCK_N
    stop = last_tile * BLOCK_N
    if INTERVAL:
        # Tiles between the two are inside every row's interval.
        full_start = tl.minimum(tl.maximum(tl.cdiv(tl.max(lower), BLOCK_N) * BLOCK_N, start), stop)
        full_stop = tl.maximum(tl.minimum(tl.min(upper) // BLOCK_N * BLOCK_N, stop), full_start)
    else:
        full_start = start
        full_stop = start

    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    # Tiles before, inside and after the range that needs no mask; all tiles at once when nothing is known of the mask.
    for part in tl.static_range(3 if INTERVAL else 1):
        if not INTERVAL:
            begin, end = start, stop
        elif part == 0:
            begin, end = start, full_start
        elif part == 1:
            begin, end = full_start, full_stop
        else:
            begin, end = full_stop, stop
        acc, top, total = _attend_range(
            acc, top, total, query_tile, key, value, key_stride_s, value_stride_s, begin, end, capacity, lower, upper,
            b, h[:, None], q[:, None], args, scale, not INTERVAL or part != 1, MASK_FN, SCORE_FN, MASKS, MODIFIES,
            INTERVAL, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, 1 if INTERVAL and part != 1 else STAGES,
        )  # fmt: skip

    line = (b.to(tl.int64) * queries + q) * heads + h
    if SPLITS == 1:
        acc = finish(acc, top, total, sink_logits, h, SINKS)
        out_at = out + line[:, None] * DV + value_dim[None, :]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=stored[:, None] & (value_dim < DV)[None, :])
    else:
        store_partial(partial, partial_stats, line * SPLITS + split, acc, top, total, stored, DV, BLOCK_DV)


@triton.jit
def store_partial(partial, partial_stats, line, acc, top, total, stored, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """One split's unnormalised output ``[M, Dv]``, maximum (base 2) and sum, into rows ``line`` of the buffers."""
    value_dim = tl.arange(0, BLOCK_DV)
    at = partial + line[:, None] * DV + value_dim[None, :]
    tl.store(at, acc, mask=stored[:, None] & (value_dim < DV)[None, :])
    tl.store(partial_stats + line * 2, top, mask=stored)
    tl.store(partial_stats + line * 2 + 1, total, mask=stored)


@triton.jit
def _combine_kernel(
    partial,
    partial_stats,
    out,
    sink_logits,
    heads,
    SINKS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Sum the splits of one (batch, query token, head), in a fixed order."""
    line = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    value_dim = tl.arange(0, BLOCK_DV)
    present = split < SPLITS
    stats = partial_stats + (line * SPLITS + split) * 2
    top = tl.load(stats, mask=present, other=float("-inf"))
    total = tl.load(stats + 1, mask=present, other=0.0)
    highest = tl.max(top, 0)
    if SINKS:
        sink = tl.load(sink_logits + line % heads).to(tl.float32) * LOG2E
        highest = tl.maximum(highest, sink)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(top - highest)
    denominator = tl.sum(weight * total, 0)
    if SINKS:
        denominator += tl.exp2(sink - highest)
    at = partial + (line * SPLITS + split)[:, None] * DV + value_dim[None, :]
    parts = tl.load(at, mask=present[:, None] & (value_dim < DV)[None, :], other=0.0)
    result = tl.sum(parts * weight[:, None], 0) / tl.where(denominator == 0.0, 1.0, denominator)
    tl.store(out + line * DV + value_dim, result.to(out.dtype.element_ty), mask=value_dim < DV)


@dataclass(frozen=True)
class Tiling:
    """Shape of one launch of the dense kernel."""

    block_m: int
    block_n: int
    splits: int
    warps: int
    stages: int
    registers: int = 0


def register_limit(registers: int) -> dict[str, int]:
    """The launch option that lets two programs share a multiprocessor: one multiplies while the other exponentiates."""
    return {"maxnreg": registers} if registers else {}


def split_count(programs: int, tiles: int, slots: int, least_tiles: int = 2) -> int:
    """Splits of the keys such that ``programs * splits`` fills ``slots`` resident programs evenly.

    The smallest count that keeps nine tenths of the slots busy; where none does, the one that keeps most.
    """
    most = max(1, min(128, tiles // least_tiles))
    best, best_share = 1, 0.0
    for splits in range(1, most + 1):
        waves = -(-programs * splits // slots)
        share = programs * splits / (waves * slots)
        if share > best_share + 1e-6:
            best, best_share = splits, share
        if share >= 0.9:
            break
    return best


def tiling(
    batch: int,
    queries: int,
    kv_heads: int,
    group: int,
    keys: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tiling:
    """Tiles of which two programs fit a multiprocessor, and splits that fill the device."""
    rows = queries * group
    row_bytes = power_of_two(head_dim) * dtype.itemsize
    block_n = 64 if row_bytes <= 256 else 32
    slots = 2 * multiprocessors(device)
    on_amd = capability(device) == 0
    if rows <= 64:
        splits = split_count(batch * kv_heads, -(-keys // block_n), slots)
        return Tiling(power_of_two(rows), block_n, splits, 4, 2 if on_amd or row_bytes > 512 else 3)
    if 90 <= capability(device) < 120 and row_bytes <= 256:
        # H200, causal 1x8k, 32/8/128: 1.16 ms (1.39 with 3 stages, 1.33 with all registers; cuDNN's plain causal 0.89).
        shape = Tiling(128, block_n, 1, 8, 2, 128 if capability(device) == 90 else 0)
    elif row_bytes <= 512:
        shape = Tiling(64, block_n, 1, 4, 2)
    else:
        shape = Tiling(32, block_n, 1, 4, 2)
    programs = batch * kv_heads * -(-rows // shape.block_m)
    if programs >= slots // 2:
        return shape
    # Few tiles of queries over many keys (speculative decoding, the tail of a chunked prefill) split the keys too.
    return replace(shape, splits=split_count(programs, -(-keys // block_n), slots))


def _plain_causal_keys(modifier: str, integers: Sequence[int], queries: int, keys: int) -> int | None:
    """How many leading keys a kernel for plain (top-left) causal masks needs, or None when the mask is another one."""
    parsed = Modifier.parse(modifier)
    if parsed.modifies or not parsed.masks:
        return None
    stop = codegen.upper_bound(parsed.mask)
    if stop is None or codegen.lower_bound(parsed.mask) is not None or parsed.mask.op not in ("lt", "le", "gt", "ge"):
        return None
    offset = _offset_from_query(stop, integers)
    return queries if offset == 1 and keys >= queries else None


def _offset_from_query(stop: Expr, integers: Sequence[int]) -> int | None:
    """``c`` when ``stop`` is ``q + c`` with ``c`` known on the host."""

    def linear(node: Expr) -> tuple[int, int] | None:
        if node.op == "q":
            return 1, 0
        if node.op == "const" and type(node.args[0]) is int:
            return 0, node.args[0]
        if node.op == "int":
            return 0, int(integers[node.args[0]])
        if node.op in ("add", "sub"):
            left, right = linear(node.args[0]), linear(node.args[1])
            if left is None or right is None:
                return None
            sign = 1 if node.op == "add" else -1
            return left[0] + sign * right[0], left[1] + sign * right[1]
        return None

    found = linear(stop)
    return found[1] if found is not None and found[0] == 1 else None


def _library_keys(
    query: Tensor, key: Tensor, value: Tensor, modifier: str, integers: Sequence[int], sink_logits: Tensor | None
) -> tuple[int, bool] | None:
    """(leading keys, causal) when PyTorch's fused attention means the same and is the faster kernel; None otherwise."""
    queries, head_dim = query.shape[1], query.shape[-1]
    if sink_logits is not None or queries < SDPA_QUERIES or query.device.type != "cuda":
        return None
    if (
        query.dtype not in (torch.float16, torch.bfloat16)
        or value.shape[-1] != head_dim
        or head_dim % 8
        or head_dim > 256
    ):
        return None
    parsed = Modifier.parse(modifier)
    if not parsed.masks and not parsed.modifies:
        return key.shape[1], False
    keys = _plain_causal_keys(modifier, integers, queries, key.shape[1])
    return None if keys is None else (keys, True)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    modifier: str,
    tensors: Sequence[Tensor],
    integers: Sequence[int],
    scale: float,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """See ``reference.dense_attention``."""
    library = _library_keys(query, key, value, modifier, integers, sink_logits)
    if library is not None:
        keys, causal = library
        with sdpa_kernel(SDPA_BACKENDS, set_priority=True):
            out = torch.nn.functional.scaled_dot_product_attention(
                query.transpose(1, 2),
                key[:, :keys].transpose(1, 2),
                value[:, :keys].transpose(1, 2),
                is_causal=causal,
                scale=scale,
                enable_gqa=query.shape[2] != key.shape[2],
            )
        return out.transpose(1, 2).contiguous()
    return _launch(query, key, value, modifier, tensors, integers, scale, sink_logits)


def _launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    modifier: str,
    tensors: Sequence[Tensor],
    integers: Sequence[int],
    scale: float,
    sink_logits: Tensor | None,
    tiles: Tiling | None = None,
) -> Tensor:
    batch, queries, heads, head_dim = query.shape
    keys, kv_heads, value_dim = key.shape[1], key.shape[2], value.shape[-1]
    group = heads // kv_heads
    out = query.new_empty((batch, queries, heads, value_dim))
    if out.numel() == 0:
        return out
    if keys == 0:
        return out.zero_()
    if scale < 0:  # the kernel takes the maximum before scaling
        query, scale = -query, -scale
    query, key, value = rows_last(query), rows_last(key), rows_last(value)
    t = tiles or tiling(batch, queries, kv_heads, group, keys, max(head_dim, value_dim), query.dtype, query.device)
    if t.splits > 1:
        partial = torch.empty((batch, queries, heads, t.splits, value_dim), dtype=torch.float32, device=query.device)
        stats = torch.empty((batch, queries, heads, t.splits, 2), dtype=torch.float32, device=query.device)
    else:
        partial, stats = out, out
    sinks = out if sink_logits is None else sink_logits
    grid = (triton.cdiv(queries * group, t.block_m) * t.splits, kv_heads, batch)
    _dense_kernel[grid](
        query,
        key,
        value,
        out,
        partial,
        stats,
        sinks,
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
        GROUP=group,
        D=head_dim,
        DV=value_dim,
        BLOCK_D=power_of_two(head_dim),
        BLOCK_DV=power_of_two(value_dim),
        BLOCK_M=t.block_m,
        BLOCK_N=t.block_n,
        SPLITS=t.splits,
        STAGES=t.stages,
        num_warps=t.warps,
        **register_limit(t.registers),
    )
    if t.splits > 1:
        combine(partial, stats, out, sink_logits)
    return out


def combine(partial: Tensor, stats: Tensor, out: Tensor, sink_logits: Tensor | None) -> None:
    """``out [B,L,H,Dv]`` from unnormalised parts ``[B,L,H,splits,Dv]`` and their ``(maximum in base 2, sum)``."""
    batch, queries, heads, splits, value_dim = partial.shape
    _combine_kernel[(batch * queries * heads,)](
        partial,
        stats,
        out,
        out if sink_logits is None else sink_logits,
        heads,
        SINKS=sink_logits is not None,
        DV=value_dim,
        BLOCK_DV=power_of_two(value_dim, 1),
        SPLITS=splits,
        BLOCK_SPLITS=power_of_two(splits, 1),
        num_warps=4,
    )
