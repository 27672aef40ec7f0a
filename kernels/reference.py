"""What each ``sals`` operator means, in plain PyTorch. Also the CPU lowering: Inductor compiles these functions.

Dimensions: ``B`` batch, ``S`` cache slots (a multiple of :data:`BLOCK`), ``L`` query tokens of
this call, ``H`` query heads, ``N`` KV heads, ``G = H/N``, ``D`` head dim, ``E = N*D``, ``R`` rank, ``Rs`` score rank,
``W`` ring slots, ``K`` selected tokens, ``Dr <= D`` rotated dims, ``P`` position batch (1 when positions are shared by
the batch, else ``B``).

Storage of one site: ``codes [B,S,R]`` (int8, or floating point when not quantised), ``scales [B,S]`` (fp16, empty when
not quantised), ``value_codes [B,S,N,D*bits/8]`` uint8 (``8/bits`` codes a byte: with 4 bits dim ``i`` in the low nibble
and ``i + D/2`` in the high one, with 2 bits dims ``i``, ``i + D/4``, ``i + D/2`` and ``i + 3D/4`` from the lowest bits
up; floating point ``[B,S,N,D]`` when not quantised), ``value_scales [B,S,N,D/group,2]`` fp16 (step, lowest level),
``ring_key``/``ring_value`` ``[B,W,N,D]`` exact (key rotated). Shared by all sites that rotate by the same rows:
``cos``/``sin [P,S,Dr]``, their means over blocks ``block_cos``/``block_sin [P,S/BLOCK,Dr]``, and ``ring_slots [P,W]``
int32, the slot that each ring entry holds (-1: none).

Paper: SALS, arXiv 2510.24273, sections 3 and 4; ``block_rotary`` scoring and the quantisers are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .index_expr import Modifier, evaluate

#: Tokens whose mean rotation stands for each of them in ``block_rotary`` scoring.
BLOCK = 128

#: Dims of a head that share one value scale (fewer when the head dim is not divisible, or codes have two bits).
VALUE_GROUP = 64

ROTARY_FORMS = ("none", "half", "interleaved")


# ---- rotary
# -----------------------------------------------------------------------------------------------------------


def rotate_pairs(x: Tensor, rotary: str) -> Tensor:
    """``J x``: each rotated pair ``(x1, x2)`` becomes ``(-x2, x1)``. ``x [..., Dr]``."""
    if rotary == "half":
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)
    pairs = x.unflatten(-1, (-1, 2))
    return torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)


def _on_rotated_dims(x: Tensor, rotary_dim: int, rotated: Tensor) -> Tensor:
    if rotary_dim == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., rotary_dim:].expand(*rotated.shape[:-1], -1)), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, rotary: str) -> Tensor:
    """``Rot(p) x`` on the first ``Dr`` dims. ``x [..., N, D]``; ``cos``, ``sin [..., 1, Dr]`` broadcast over heads."""
    if rotary == "none":
        return x
    rotary_dim = cos.shape[-1]
    part = x[..., :rotary_dim]
    return _on_rotated_dims(x, rotary_dim, part * cos + rotate_pairs(part, rotary) * sin)


def apply_rotary_transpose(x: Tensor, cos: Tensor, sin: Tensor, rotary: str) -> Tensor:
    """``Rot(p)^T x``; also right for means of rotations, which are no rotations themselves."""
    if rotary == "none":
        return x
    rotary_dim = cos.shape[-1]
    part = x[..., :rotary_dim]
    return _on_rotated_dims(x, rotary_dim, part * cos - rotate_pairs(part * sin, rotary))


def invert_rotary(x: Tensor, cos: Tensor, sin: Tensor, rotary: str) -> Tensor:
    """``Rot(p)^-1 x``; exact also when rows are scaled (YaRN) or the two dims of a pair have different rows."""
    if rotary == "none":
        return x
    rotary_dim = cos.shape[-1]
    part = x[..., :rotary_dim]
    # A pair maps by [[c1, -s1], [s2, c2]]; its inverse is [[c2, s1], [-s2, c1]] / (c1 c2 + s1 s2).
    cos_other = _swap_pairs(cos, rotary)
    sin_other = _swap_pairs(sin, rotary)
    determinant = cos * cos_other + sin * sin_other
    inverse = (part * cos_other - rotate_pairs(part, rotary) * sin) / determinant
    return _on_rotated_dims(x, rotary_dim, inverse)


def _swap_pairs(x: Tensor, rotary: str) -> Tensor:
    if rotary == "half":
        return torch.cat(tuple(reversed(x.chunk(2, dim=-1))), dim=-1)
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


# ---- storage
# ----------------------------------------------------------------------------------------------------------


def value_group(head_dim: int, bits: int = 4) -> int:
    """Dims that share a value scale: 64 (32 when codes have two bits), or what power of two divides ``head_dim``."""
    return min(VALUE_GROUP if bits > 2 else VALUE_GROUP // 2, head_dim & -head_dim)


def hadamard(head_dim: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """Orthonormal ``[D, D]`` transform: Sylvester's Hadamard matrix, block-diagonal when ``D`` is no power of two."""
    size = head_dim & -head_dim
    index = torch.arange(size, device=device)
    common = index[:, None] & index[None, :]
    parity = torch.zeros_like(common)
    for bit in range(max(size.bit_length() - 1, 1)):
        parity = parity ^ ((common >> bit) & 1)
    block = (1 - 2 * parity).to(torch.float32) / size**0.5
    return torch.block_diag(*[block] * (head_dim // size)).to(dtype)


def quantize_latent(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 with one scale per token: ``[..., R] -> (codes int8 [..., R], scales fp16 [...])``."""
    latent = latent.float()
    # Rounded to fp16 first, so that codes fit the scale that is stored; the floor keeps an all-zero token finite.
    scales = (latent.abs().amax(-1) / 127.0).clamp_min(2.0**-24).to(torch.float16)
    codes = torch.round(latent / scales.float().unsqueeze(-1)).clamp(-127, 127)
    return codes.to(torch.int8), scales


def dequantize_latent(codes: Tensor, scales: Tensor) -> Tensor:
    """Latents in fp32 from what :func:`quantize_latent` stored (or from unquantised storage)."""
    if codes.dtype != torch.int8:
        return codes.float()
    return codes.float() * scales.float().unsqueeze(-1)


def quantize_decoder(decoder: Tensor, head_dim: int, rotary_dim: int, rotary: str) -> tuple[Tensor, Tensor]:
    """Symmetric int8, transposed: ``[R, E] -> (codes int8 [E, R], scales fp32 [E])``.

    A scale belongs to a column, or to the two columns of a rotated pair (so that it commutes with the rotation).
    """
    top = decoder.float().abs().amax(0).unflatten(0, (-1, head_dim))
    if rotary != "none":
        part = top[:, :rotary_dim]
        top = torch.cat((torch.maximum(part, _swap_pairs(part, rotary)), top[:, rotary_dim:]), dim=-1)
    scales = (top.flatten() / 127.0).clamp_min(2.0**-126)
    codes = torch.round(decoder.float() / scales).clamp(-127, 127)
    return codes.to(torch.int8).T.contiguous(), scales


def quantize_values(value: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Asymmetric, in groups along ``D``: ``[..., N, D] -> (codes uint8 [..., N, D*bits/8], scales fp16 [..., N,
    D/group, 2])``.

    ``scales[..., 0]`` is the step and ``[..., 1]`` the lowest level. ``bits`` is 2, 4 (four and two codes a byte; see
    the layout above) or 8.
    """
    head_dim = value.shape[-1]
    group = value_group(head_dim, bits)
    levels = float(2**bits - 1)
    grouped = value.float().unflatten(-1, (head_dim // group, group))
    low, step = _two_bit_levels(grouped) if bits == 2 else _levels(grouped.amin(-1), grouped.amax(-1), levels)
    codes = _nearest(grouped, low, step, levels).flatten(-2).to(torch.uint8)
    parts = codes.chunk(8 // bits, dim=-1)
    packed = parts[0]
    for number, part in enumerate(parts[1:], 1):
        packed = packed | (part << (bits * number))
    return packed, torch.stack((step, low), dim=-1)


def _levels(low: Tensor, high: Tensor, levels: float) -> tuple[Tensor, Tensor]:
    """Lowest level and step, rounded to the fp16 that is stored, so that codes fit it."""
    low = low.to(torch.float16)
    return low, ((high - low.float()) / levels).clamp_min(2.0**-24).to(torch.float16)


def _nearest(grouped: Tensor, low: Tensor, step: Tensor, levels: float) -> Tensor:
    return torch.round((grouped - low.float().unsqueeze(-1)) / step.float().unsqueeze(-1)).clamp(0, levels)


def _two_bit_levels(grouped: Tensor) -> tuple[Tensor, Tensor]:
    """Four levels that nearly minimise the squared error: spread from minimum to maximum they serve outliers.

    A first guess takes in three quarters of the range; then the levels are fitted to what chose them (least squares).
    On Gaussian groups of 32 the mean squared error is 0.096 of the variance instead of 0.154.
    """
    low, high = grouped.amin(-1), grouped.amax(-1)
    margin = (high - low) / 8
    low, step = _levels(low + margin, high - margin, 3.0)
    codes = _nearest(grouped, low, step, 3.0)
    code_mean, mean = codes.mean(-1, keepdim=True), grouped.mean(-1, keepdim=True)
    spread = (codes - code_mean).square().sum(-1)
    slope = ((codes - code_mean) * (grouped - mean)).sum(-1) / spread.clamp_min(1.0 / 32)
    slope = torch.where(spread > 0, slope, step.float())
    low = mean.squeeze(-1) - slope * code_mean.squeeze(-1)
    return _levels(low, low + 3.0 * slope, 3.0)


def dequantize_values(value_codes: Tensor, value_scales: Tensor, head_dim: int) -> Tensor:
    """Values in fp32, still in the transformed (Hadamard) frame."""
    if value_codes.dtype != torch.uint8:
        return value_codes.float()
    packed = head_dim // value_codes.shape[-1]
    if packed > 1:
        bits = 8 // packed
        codes = [(value_codes >> (bits * number)) & (2**bits - 1) for number in range(packed)]
        value_codes = torch.cat(codes, dim=-1)
    groups = value_scales.shape[-2]
    grouped = value_codes.float().unflatten(-1, (groups, head_dim // groups))
    scales = value_scales.float()
    return (grouped * scales[..., 0:1] + scales[..., 1:2]).flatten(-2)


def _write(target: Tensor, slots: Tensor, new: Tensor) -> None:
    """``target[b, slots[b, l]] = new[b, l]`` in place. ``target [B,S,...]``, ``slots [P,L]``, ``new [B,L,...]``."""
    new = new.to(target.dtype)
    if slots.shape[0] == 1:
        target.index_copy_(1, slots[0], new.expand(target.shape[0], *new.shape[1:]))
    else:
        batch = torch.arange(target.shape[0], device=slots.device).unsqueeze(1)
        target.index_put_((batch, slots), new.expand(target.shape[0], *new.shape[1:]))


def _take(source: Tensor, indices: Tensor) -> Tensor:
    """``source[b, indices[b, ...]]``: ``[B or 1, S, ...]`` and ``[B, ...]`` to ``[B, ..., ...]``."""
    if source.shape[0] == 1:
        return source[0][indices]
    batch = torch.arange(indices.shape[0], device=indices.device)
    return source[batch.view(-1, *[1] * (indices.dim() - 1)), indices]


# ---- sals::record_rows, sals::encode
# ----------------------------------------------------------------------------------


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
    """Record the rotary rows of the tokens written by this call, once for all sites that share them.

    Writes ``new_cos``/``new_sin [P,L,Dr]`` at ``slots [P,L]``, refreshes the block means of the blocks touched (over
    the rows written so far) and notes in ``ring_slots`` which slots the exact ring will hold.
    """
    window = ring_slots.shape[1]
    recent = slots[:, -window:]
    _write(ring_slots, recent % window, recent)
    if cos.shape[-1] == 0:
        return
    _write(cos, slots, new_cos)
    _write(sin, slots, new_sin)
    if isinstance(slots.shape[1], int) and slots.shape[1] <= 16:
        blocks = slots // BLOCK
        inside = blocks.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=slots.device)
        mean_cos, mean_sin = block_means(_take(cos, inside), _take(sin, inside))
        _write(block_cos, blocks, mean_cos)
        _write(block_sin, blocks, mean_sin)
    else:
        shape = (cos.shape[0], -1, BLOCK, cos.shape[-1])
        mean_cos, mean_sin = block_means(cos.view(shape), sin.view(shape))
        block_cos.copy_(mean_cos)
        block_sin.copy_(mean_sin)


def block_means(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Means over dim -2, of the rows that were written (an unwritten row is all zeros, which no rotation is)."""
    cos, sin = cos.float(), sin.float()
    written = ((cos != 0) | (sin != 0)).any(-1, keepdim=True).float()
    count = written.sum(-2).clamp_min(1.0)
    return cos.sum(-2) / count, sin.sum(-2) / count


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
    """Store the tokens of this call: latent, value codes, and the exact ring (the last ``W`` of them).

    ``key_pre [B,L,N,D]`` is the pre-rotary key, ``key`` the rotated one; ``encoder [E,R]``; ``value_transform [D,D]``
    (orthogonal).
    """
    store_latents(codes, scales, value_codes, value_scales, key_pre, value, encoder, value_transform, slots)
    window = ring_key.shape[1]
    recent = slots[:, -window:] % window
    _write(ring_key, recent, key[:, -window:])
    _write(ring_value, recent, value[:, -window:])


def store_latents(
    codes: Tensor,
    scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    key_pre: Tensor,
    value: Tensor,
    encoder: Tensor,
    value_transform: Tensor,
    slots: Tensor,
) -> None:
    """The part of :func:`encode` that concerns latents and values; also imports a dense cache."""
    latent = key_pre.flatten(2).float() @ encoder.float()
    if codes.dtype == torch.int8:
        new_codes, new_scales = quantize_latent(latent)
        _write(codes, slots, new_codes)
        _write(scales, slots, new_scales)
    else:
        _write(codes, slots, latent)
    transformed = value.float() @ value_transform.float()
    if value_codes.dtype == torch.uint8:
        bits = 8 * value_codes.shape[-1] // value.shape[-1]
        new_value_codes, new_value_scales = quantize_values(transformed, bits)
        _write(value_codes, slots, new_value_codes)
        _write(value_scales, slots, new_value_scales)
    else:
        _write(value_codes, slots, transformed)


def observe(query_moment: Tensor, query_pre: Tensor) -> None:
    """``query_moment[n] += sum over b, l and heads h of group n of q_h q_h^T``; ``[N,D,D]`` fp32, ``query_pre
    [B,L,H,D]``.
    """
    heads, dim = query_moment.shape[0], query_moment.shape[-1]
    rows = query_pre.float().unflatten(2, (heads, -1)).permute(2, 0, 1, 3, 4).reshape(heads, -1, dim)
    query_moment.add_(rows.transpose(1, 2) @ rows)


def observe_keys(key_moment: Tensor, key_pre: Tensor) -> None:
    """``key_moment [E,E] += sum over tokens of k k^T`` (joint pre-rotary key); ``key_pre [B,L,N,D]``."""
    rows = key_pre.flatten(2).flatten(0, 1).float()
    key_moment.add_(rows.T @ rows)


# ---- sals::score, sals::select
# ----------------------------------------------------------------------------------------


def _grid(batch: int, heads: int, queries: int, device: torch.device) -> dict[str, Tensor]:
    return {
        "b": torch.arange(batch, device=device).view(-1, 1, 1, 1),
        "h": torch.arange(heads, device=device).view(1, -1, 1, 1),
        "q": torch.arange(queries, device=device).view(1, 1, -1, 1),
    }


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
) -> Tensor:
    """Latent scores of every cached token for every query token: ``[B,L,S]`` fp32.

    ``query [B,L,H,D]`` is rotated (``block_rotary``), or pre-rotary with ``rotary="none"`` (``rope_free``).
    ``head_score`` says how heads
    combine: ``"sum"`` of their approximate logits (the paper), their ``"max"``, or the ``"mass"`` of attention that
    each gives the token (softmax of ``scale`` times the approximate logit, modified and masked as the true one, summed
    over heads).

    -inf: not selectable (masked for every head, at or past ``capacity``, or held by the ring, which is always
    attended). +inf: always selected (the first ``sinks`` slots, and recent tokens that the ring has lost).
    """
    batch, queries, heads, dim = query.shape
    total, kv_heads = codes.shape[1], decoder.shape[1] // dim
    basis = decoder[:score_rank].float()
    latent = dequantize_latent(codes[..., :score_rank], scales)
    grouped = query.float().unflatten(2, (kv_heads, -1))
    if head_score == "sum":
        # Decoder columns are shared by a group and the rotation by all heads, so the sum over heads is taken first.
        joint = grouped.sum(3)
        scores = latent_logits(joint, basis, latent, block_cos, block_sin, rotary).unsqueeze(1)
    else:
        by_head = basis.view(score_rank, kv_heads, dim).permute(1, 2, 0)  # [N,D,Rs]
        scores = latent_logits(grouped, by_head, latent, block_cos, block_sin, rotary)  # [B,H,L,S]
    kv = torch.arange(total, device=query.device)
    parsed = Modifier.parse(modifier)
    allowed = (kv < capacity).view(1, 1, 1, -1)
    indices = _grid(batch, heads, queries, query.device) | {"kv": kv.clamp_max(capacity - 1).view(1, 1, 1, -1)}
    if parsed.masks:
        allowed = allowed & evaluate(parsed.mask, indices, tensors, integers).expand(-1, -1, -1, total)
    if head_score == "mass":
        logits = scores * scale
        if parsed.modifies:
            logits = evaluate(parsed.score, indices | {"score": logits}, tensors, integers)
        scores = softmax(torch.where(allowed, logits, -torch.inf), None).sum(1)
    else:
        scores = scores.amax(1)
    selectable = allowed.any(1)
    window = ring_slots.shape[1]
    slots = slots.unsqueeze(-1)
    in_ring = ring_slots[:, kv % window] == kv  # [P,S]
    lost = (kv > slots - window) & (kv <= slots)
    scores = torch.where((kv < sinks) | lost, torch.inf, scores)
    return torch.where(selectable & ~in_ring.unsqueeze(1), scores, -torch.inf)


def latent_logits(
    query: Tensor, basis: Tensor, latent: Tensor, block_cos: Tensor, block_sin: Tensor, rotary: str
) -> Tensor:
    """Products of un-rotated queries with latents: joint ``[B,L,N,D]`` -> ``[B,L,S]``, or per head ``[B,L,N,G,D]`` ->
    ``[B,H,L,S]``.
    """
    per_head = query.dim() == 5
    queries = query.shape[1]
    if per_head:
        query = query.transpose(2, 3)  # [B,L,G,N,D]: heads of a KV head project alike
    if rotary == "none":
        spread = query.unsqueeze(2)
    else:
        shape = (block_cos.shape[0], 1, block_cos.shape[1], *[1] * (query.dim() - 3), block_cos.shape[2])
        cos, sin = block_cos.float().view(shape), block_sin.float().view(shape)
        spread = apply_rotary_transpose(query.unsqueeze(2), cos, sin, rotary)  # [B,L,blocks,(G,)N,D]
    blocks = spread.shape[2]
    if per_head:
        projected = (spread.unsqueeze(-2) @ basis).squeeze(-2)  # [B,L,blocks,G,N,Rs]
        projected = projected.permute(0, 2, 4, 3, 1, 5).flatten(2, 4)  # [B,blocks,N*G*L,Rs]
    else:
        projected = (spread.flatten(3) @ basis.T).transpose(1, 2)  # [B,blocks,L,Rs]
    tokens = latent.unflatten(1, (blocks, -1)).transpose(2, 3)  # [B,blocks,Rs,S/blocks]
    logits = (projected @ tokens).transpose(1, 2).flatten(2)  # [B,L or H*L,S]
    return logits.unflatten(1, (-1, queries)) if per_head else logits


def select(scores: Tensor, k: int) -> Tensor:
    """Exact top-``k`` of each row: ``[..., S] fp32 -> [..., k] int32``, indices ascending, padded with -1.

    -inf and NaN are never selected. Ties go to the lower index. Deterministic.
    """
    total = scores.shape[-1]
    scores = torch.where(torch.isnan(scores), -torch.inf, scores) + 0.0  # -0.0 + 0.0 is +0.0: one zero, one rank
    bits = scores.view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # the order of IEEE floats as integers
    # One unique key per token, so that top-k has no ties: the score above, the reversed index below.
    position = torch.arange(total, device=scores.device)
    keys = (ordered << 32) | (total - 1 - position)
    kept = torch.topk(keys, min(k, total), dim=-1, sorted=False).values
    index = total - 1 - (kept & 0xFFFFFFFF)
    never = (-0x7F800001) << 32  # ordered form of -inf
    index = torch.where(kept >= never + (1 << 32), index, total)
    index = torch.sort(index, dim=-1).values
    index = torch.where(index == total, -1, index).to(torch.int32)
    return index if k <= total else torch.nn.functional.pad(index, (0, k - total), value=-1)


def score_select(
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
    k: int,
    head_score: str = "sum",
    scale: float = 1.0,
) -> Tensor:
    """:func:`select` of :func:`score`, in one operator so that kernels can begin the selection while they score."""
    scores = score(
        query,
        codes,
        scales,
        decoder,
        block_cos,
        block_sin,
        ring_slots,
        slots,
        modifier,
        tensors,
        integers,
        capacity,
        score_rank,
        sinks,
        rotary,
        head_score,
        scale,
    )
    return select(scores, k)


# ---- sals::attend, sals::rebuild, dense attention
# -----------------------------------------------------------------------


def rebuild(
    codes: Tensor,
    scales: Tensor,
    cos: Tensor,
    sin: Tensor,
    decoder: Tensor,
    head_dim: int,
    rotary: str,
) -> Tensor:
    """Rotated keys from latents and rows of the same tokens: ``[..., R] -> [..., N, D]`` fp32."""
    key = (dequantize_latent(codes, scales) @ decoder.float()).unflatten(-1, (-1, head_dim))
    return apply_rotary(key, cos.float().unsqueeze(-2), sin.float().unsqueeze(-2), rotary)


def modify(
    logits: Tensor, kv: Tensor, modifier: str, tensors: Sequence[Tensor], integers: Sequence[int], valid: Tensor | None
) -> Tensor:
    """Score modifier, then mask, of ``logits [B,H,L,K]`` at keys ``kv`` (broadcasts to ``[B,H,L,K]``); masked are
    -inf.
    """
    parsed = Modifier.parse(modifier)
    batch, heads, queries, _ = logits.shape
    indices = _grid(batch, heads, queries, logits.device) | {"kv": kv, "score": logits}
    if parsed.modifies:
        logits = evaluate(parsed.score, indices, tensors, integers)
    if parsed.masks:
        allowed = evaluate(parsed.mask, indices, tensors, integers)
        valid = allowed if valid is None else valid & allowed
    return logits if valid is None else torch.where(valid, logits, -torch.inf)


def softmax(logits: Tensor, sink_logits: Tensor | None, fully_masked: str = "zero") -> Tensor:
    """Over the last dim of ``[B,H,L,K]``; rows with nothing to attend give zeros. ``sink_logits [H]`` join the
    denominator.
    """
    top = logits.amax(-1, keepdim=True)
    if sink_logits is not None:
        top = torch.maximum(top, sink_logits.float().view(1, -1, 1, 1))
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    if sink_logits is not None:
        total = total + torch.exp(sink_logits.float().view(1, -1, 1, 1) - top)
    return weights / torch.where(total == 0, 1.0, total)


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
) -> Tensor:
    """Attention of ``query [B,L,H,D]`` (rotated) over the ring and the tokens ``indices [B,L,K]`` (-1: none) ->
    ``[B,L,H,D]``.

    The selected keys are rebuilt and rotated by their recorded rows; values are dequantised and the value transform is
    undone on the output. ``decoder_codes [E,R]`` int8 and ``decoder_scales [E]`` (:func:`quantize_decoder`), when
    given, stand for ``decoder``: kernels then rebuild on int8 tensor cores.
    """
    if decoder_codes is not None and decoder_scales is not None:
        decoder = decoder_codes.T.float() * decoder_scales.float()
    _, queries, heads, dim = query.shape
    kv_heads = decoder.shape[1] // dim
    groups = heads // kv_heads
    grouped = query.float().unflatten(2, (kv_heads, groups))  # [B,L,N,G,D]
    chosen = indices.clamp_min(0).long()
    key = rebuild(
        _take(codes, chosen),
        _take(scales, chosen) if scales.numel() else scales,
        _take(cos, chosen),
        _take(sin, chosen),
        decoder,
        dim,
        rotary,
    )  # [B,L,K,N,D]
    value = dequantize_values(
        _take(value_codes, chosen), _take(value_scales, chosen) if value_scales.numel() else value_scales, dim
    )
    logits = (grouped @ key.permute(0, 1, 3, 4, 2)) * scale  # [B,L,N,G,K]
    ring_logits = (grouped.permute(0, 2, 3, 1, 4).flatten(2, 3) @ ring_key.float().permute(0, 2, 3, 1)) * scale
    ring_logits = ring_logits.unflatten(2, (groups, queries))  # [B,N,G,L,W]
    ring_kv = ring_slots.clamp_min(0).long()[:, None, None, :]
    both = torch.cat(
        (
            modify(
                logits.permute(0, 2, 3, 1, 4).flatten(1, 2),
                chosen.unsqueeze(1),
                modifier,
                tensors,
                integers,
                (indices >= 0).unsqueeze(1),
            ),
            modify(
                ring_logits.flatten(1, 2), ring_kv, modifier, tensors, integers, (ring_slots >= 0)[:, None, None, :]
            ),
        ),
        dim=-1,
    )
    weights = softmax(both, sink_logits).unflatten(1, (kv_heads, groups))  # [B,N,G,L,K+W]
    count = indices.shape[-1]
    from_latents = weights[..., :count].permute(0, 3, 1, 2, 4) @ value.permute(0, 1, 3, 2, 4)  # [B,L,N,G,D]
    from_ring = weights[..., count:].flatten(2, 3) @ ring_value.float().permute(0, 2, 1, 3)  # [B,N,G*L,D]
    from_ring = from_ring.unflatten(2, (groups, queries)).permute(0, 3, 1, 2, 4)
    out = from_latents @ value_transform.float().T + from_ring
    return out.flatten(2, 3).to(query.dtype).contiguous()


def decode(
    codes: Tensor,
    scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    ring_key: Tensor,
    ring_value: Tensor,
    query: Tensor,
    key_pre: Tensor,
    key: Tensor,
    value: Tensor,
    encoder: Tensor,
    decoder: Tensor,
    value_transform: Tensor,
    slots: Tensor,
    ring_slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    block_cos: Tensor,
    block_sin: Tensor,
    modifier: str,
    tensors: Sequence[Tensor],
    integers: Sequence[int],
    capacity: int,
    score_rank: int,
    sinks: int,
    rotary: str,
    k: int,
    scale: float,
    head_score: str = "sum",
    sink_logits: Tensor | None = None,
    decoder_codes: Tensor | None = None,
    decoder_scales: Tensor | None = None,
) -> Tensor:
    """A whole decode step of a site: :func:`encode`, :func:`score_select` of the rotated query, then :func:`attend`; in
    one operator so that kernels can run side by side what needs nothing of each other. :func:`record_rows` has noted
    the call's slots before.
    """
    latents = (codes, scales, value_codes, value_scales, ring_key, ring_value)
    encode(*latents, key_pre, key, value, encoder, value_transform, slots)
    chosen = score_select(
        query,
        codes,
        scales,
        decoder,
        block_cos,
        block_sin,
        ring_slots,
        slots,
        modifier,
        tensors,
        integers,
        capacity,
        score_rank,
        sinks,
        rotary,
        k,
        head_score,
        scale,
    )
    return attend(
        query,
        chosen,
        *latents,
        ring_slots,
        cos,
        sin,
        decoder,
        value_transform,
        modifier,
        tensors,
        integers,
        scale,
        rotary,
        sink_logits,
        decoder_codes,
        decoder_scales,
    )


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
) -> Tensor:
    """Attention of ``query [B,L,H,D]`` over *every* cached token, all rebuilt: low-rank KV compression without
    selection.
    """
    key, value = materialize(
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
        capacity,
        rotary,
    )
    return dense_attention(query, key, value, modifier, tensors, integers, scale, sink_logits)


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
) -> tuple[Tensor, Tensor]:
    """Every cached token as dense rotated keys and values ``[B,capacity,N,D]``: exact where the ring holds it, else
    rebuilt.
    """
    dim = ring_key.shape[-1]
    key = rebuild(
        codes[:, :capacity],
        scales[:, :capacity] if scales.numel() else scales,
        cos[:, :capacity],
        sin[:, :capacity],
        decoder,
        dim,
        rotary,
    )
    stored = value_scales[:, :capacity] if value_scales.numel() else value_scales
    value = dequantize_values(value_codes[:, :capacity], stored, dim) @ value_transform.float().T
    kv = torch.arange(capacity, device=codes.device)
    entry = kv % ring_slots.shape[1]
    exact = (ring_slots[:, entry] == kv)[:, :, None, None]
    key = torch.where(exact, ring_key[:, entry].float(), key)
    value = torch.where(exact, ring_value[:, entry].float(), value)
    return key.to(ring_key.dtype), value.to(ring_value.dtype)


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
    """The dense meaning of a site: ``query [B,L,H,D]``, ``key [B,S,N,D]`` (rotated), ``value [B,S,N,Dv]`` ->
    ``[B,L,H,Dv]``.
    """
    return rounding_attention(lambda x: x, query, key, value, modifier, tensors, integers, scale, sink_logits)


def rounding_attention(
    rounded: Callable[[Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor, modifier: str, *rest: Any
) -> Tensor:
    """:func:`dense_attention` with ``rounded`` applied to its fp32 logits at every step, and to its weights."""
    tensors, integers, scale, sink_logits = rest
    kv_heads = key.shape[2]
    grouped = query.float().unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [B,N,G,L,D]
    logits = rounded(rounded(grouped @ key.float().permute(0, 2, 3, 1).unsqueeze(2)) * scale)
    kv = torch.arange(key.shape[1], device=key.device).view(1, 1, 1, -1)
    logits = rounded(modify(logits.flatten(1, 2), kv, modifier, tensors, integers, None))
    weights = rounded(softmax(logits, sink_logits)).unflatten(1, (kv_heads, -1))
    out = weights @ value.float().permute(0, 2, 1, 3).unsqueeze(2)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(query.dtype).contiguous()


# ---- the stateless form: one selection per block of queries
# -------------------------------------------------------------


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
    """Tokens that each block of queries attends: ``[B, ceil(L/query_block), k]`` int32, ascending, padded with -1.

    ``query [B,L,H,D]`` rotated, ``key_pre [B,S,N,D]``; ``encoder [E,Rs]`` and ``decoder [Rs,E]`` are the score ranks
    alone. A block's queries fall into runs (:func:`block_runs`). A key's score is the largest that a run gives it whose
    queries may attend it, and a run scores by its mean query, summed over heads: a mean of all would lose the key that
    a few queries look for. Always selected: the first ``sinks`` keys and the keys within ``recents`` of the block's own
    (query ``q`` stands at key ``q + S - L``). Never: keys masked for every query and head of the block.

    Cost: ``2 Rs S`` flops for each of ``L / 4`` runs, and ``2 Rs (E + 2 Dr S / BLOCK)`` to project it.
    """
    batch, queries, heads, _ = query.shape
    total, kv_heads = key_pre.shape[1], key_pre.shape[2]
    blocks = -(-queries // query_block)
    runs, length = block_runs(query_block)

    def by_run(tensor: Tensor, dim: int) -> Tensor:
        """Dim ``dim`` of queries as ``(blocks, runs, length)``, padded with zeros (False)."""
        after = tensor.dim() - 1 - dim
        padded = torch.nn.functional.pad(tensor, (*[0, 0] * after, 0, blocks * query_block - queries))
        padded = padded.unflatten(dim, (blocks, query_block))
        padded = torch.nn.functional.pad(padded, (*[0, 0] * after, 0, runs * length - query_block))
        return padded.unflatten(dim + 1, (runs, length))

    count = by_run(torch.ones(queries, device=query.device), 0).sum(-1)  # [Q,runs]
    summed = by_run(query.float().unflatten(2, (kv_heads, -1)).sum(3), 1).sum(3)
    mean = (summed / count.clamp_min(1)[..., None, None]).flatten(1, 2)  # [B,Q*runs,N,D]
    latent = key_pre.flatten(2).float() @ encoder.float()  # [B,S,Rs]
    basis = decoder.float().T
    kv = torch.arange(total, device=query.device)
    if rotary == "none":
        scores = (mean.flatten(2) @ basis) @ latent.transpose(1, 2)
    else:
        key_blocks = -(-total // BLOCK)
        fill = key_blocks * BLOCK - total
        rows = [torch.nn.functional.pad(r, (0, 0, 0, fill)).unflatten(1, (key_blocks, BLOCK)) for r in (cos, sin)]
        block_cos, block_sin = block_means(*rows)
        unrotated = apply_rotary_transpose(
            mean.unsqueeze(2), block_cos[:, None, :, None, :], block_sin[:, None, :, None, :], rotary
        )
        projected = unrotated.flatten(3) @ basis  # [B,Q*runs,S/BLOCK,Rs]
        latent = torch.nn.functional.pad(latent, (0, 0, 0, fill)).unflatten(1, (key_blocks, BLOCK))
        scores = projected.transpose(1, 2) @ latent.transpose(2, 3)  # [B,S/BLOCK,Q*runs,BLOCK]
        scores = scores.transpose(1, 2).flatten(2)[..., :total]
    scores = scores.unflatten(1, (blocks, runs))  # [B,Q,runs,S]
    first = torch.arange(blocks, device=query.device).view(-1, 1, 1) * query_block + (total - queries)
    near = (kv > first - recents) & (kv < first + query_block + recents)
    scores = torch.where((kv < sinks) | near, torch.inf, scores)
    parsed = Modifier.parse(modifier)
    seen = (count > 0).unsqueeze(-1)  # a run of padding sees nothing
    if parsed.masks:
        indices = _grid(batch, heads, queries, query.device) | {"kv": kv.view(1, 1, 1, -1)}
        allowed = evaluate(parsed.mask, indices, tensors, integers)
        allowed = allowed.expand(-1, -1, queries, total).any(1)
        seen = by_run(allowed, 1).any(3)
    return select(torch.where(seen, scores, -torch.inf).amax(2), k)


#: The most runs of a block of queries.
RUNS = 16


def block_runs(query_block: int) -> tuple[int, int]:
    """How :func:`block_select` parts a block of queries: ``(runs, queries of a run)``."""
    length = -(-query_block // RUNS)
    return -(-query_block // length), length


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
) -> Tensor:
    """Attention of each block of queries over its selected tokens' exact keys: ``[B,L,H,D]``.

    ``query [B,L,H,D]``, ``key [B,S,N,D]`` (rotated), ``value [B,S,N,Dv]``, ``indices [B,Q,K]`` from
    :func:`block_select`.
    """
    batch, queries, heads, dim = query.shape
    kv_heads = key.shape[2]
    groups = heads // kv_heads
    blocks, count = indices.shape[1:]
    padding = blocks * query_block - queries
    padded = torch.nn.functional.pad(query.float(), (0, 0, 0, 0, 0, padding))
    padded = padded.view(batch, blocks, query_block, kv_heads, groups, dim).permute(0, 1, 3, 4, 2, 5).flatten(3, 4)
    chosen = indices.clamp_min(0).long()
    keys = _take(key.float(), chosen).permute(0, 1, 3, 4, 2)  # [B,Q,N,D,K]
    values = _take(value.float(), chosen).permute(0, 1, 3, 2, 4)  # [B,Q,N,K,Dv]
    logits = ((padded @ keys) * scale).unflatten(3, (groups, query_block))  # [B,Q,N,G,Lq,K]
    logits = logits.permute(0, 2, 3, 1, 4, 5).reshape(batch, heads, blocks * query_block, count)
    per_query = chosen.unsqueeze(2).expand(-1, -1, query_block, -1).flatten(1, 2)  # [B,L,K]
    valid = (indices >= 0).unsqueeze(2).expand(-1, -1, query_block, -1).flatten(1, 2).unsqueeze(1)
    logits, valid, per_query = logits[:, :, :queries], valid[:, :, :queries], per_query[:, :queries]
    weights = softmax(modify(logits, per_query.unsqueeze(1), modifier, tensors, integers, valid), sink_logits)
    weights = torch.nn.functional.pad(weights, (0, 0, 0, padding))
    weights = weights.view(batch, kv_heads, groups, blocks, query_block, count).permute(0, 3, 1, 2, 4, 5)
    out = (weights.flatten(3, 4) @ values).unflatten(3, (groups, query_block))  # [B,Q,N,G,Lq,Dv]
    out = out.permute(0, 1, 4, 2, 3, 5).reshape(batch, blocks * query_block, heads, value.shape[-1])
    return out[:, :queries].to(query.dtype).contiguous().contiguous()
