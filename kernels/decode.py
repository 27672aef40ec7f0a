"""The Triton launcher of ``sals::decode``: a whole decode step of a site, in four launches (six by ``"mass"``).

1. the new tokens' latents (in parts) and values, and beside them the projected queries (``score.py``, ``mass.py``);
2. scores (by ``"mass"`` in three launches), and beside them the new tokens' latents summed and quantised;
3. the selection (``select.py``);
4. attention (``attend.py``), whose ring programs need not wait for the selection.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .attend import attend
from .encode import encode, plan_encode
from .select import score_select


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
    """See ``reference.decode``."""
    latents = (codes, scales, value_codes, value_scales, ring_key, ring_value)
    new = (key_pre, key, value, encoder, value_transform, slots)
    encoding = cleared = None
    if query.shape[1] <= ring_slots.shape[1]:
        encoding = plan_encode(*latents, *new)
        rows, kv_heads = query.shape[0] * query.shape[1], key_pre.shape[2]
        cleared = torch.empty((rows * kv_heads,), dtype=torch.int32, device=query.device)
    else:
        # Scores then read what this call wrote.
        encode(*latents, *new)
    chosen = score_select(
        query, codes, scales, decoder, block_cos, block_sin, ring_slots, slots, modifier, tensors, integers, capacity,
        score_rank, sinks, rotary, k, head_score, scale, encoding, cleared,
    )  # fmt: skip
    return attend(
        query, chosen, *latents, ring_slots, cos, sin, decoder, value_transform, modifier, tensors, integers, scale,
        rotary, sink_logits, decoder_codes, decoder_scales, arrived=cleared,
    )  # fmt: skip
