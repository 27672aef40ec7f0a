"""transformers: :class:`SalsCache`, a KV cache for ``generate()`` and ``model(...)`` without dense keys and values.

```python
model.forward = torch.compile(model.forward, backend="sals")
cache = SalsCache(model.config, max_cache_len=32768, device=model.device)
model.generate(**inputs, past_key_values=cache, max_new_tokens=512)
```
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from ..kernels.virtual import UNTOUCHABLE, write
from ..virtual import VirtualCache, handles, placed


class SalsLayer(StaticLayer):
    """One layer of a :class:`SalsCache`: two handles of one element and a token counter."""

    def __init__(self, max_cache_len: int, device: torch.device) -> None:
        super().__init__(max_cache_len=max_cache_len)
        self.device = device
        self.key_handle, self.value_handle = handles(device)
        with torch.inference_mode(False):  # such tensors count writes, and may be written to outside of it
            self.cumulative_length = torch.zeros((), dtype=torch.int64, device=device)
        torch._dynamo.mark_static_address(self.cumulative_length, guard=False)
        self.is_initialized = True

    @property
    def keys(self) -> Tensor:
        """There are no ``[B, N, S, D]`` to see: raises ``RuntimeError`` with the remedy."""
        raise RuntimeError(UNTOUCHABLE)

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        """transformers' layers begin with None."""

    @property
    def values(self) -> Tensor:
        """There are no ``[B, N, S, D]`` to see: raises ``RuntimeError`` with the remedy."""
        raise RuntimeError(UNTOUCHABLE)

    @values.setter
    def values(self, value: Tensor | None) -> None:
        """transformers' layers begin with None."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is allocated here, whatever ``[B, N, L, D]`` comes."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The layer's whole keys and values ``[B, N, max_cache_len, D]`` after ``key_states [B, N, L, D]`` joined them;
        they exist in a graph compiled by ``backend="sals"`` alone. Raises ``RuntimeError`` elsewhere, ``ValueError``
        for keys on another device than the cache's.
        """
        if key_states.device != self.device:
            raise ValueError(
                f"this SalsCache is on {self.device} and the keys on {key_states.device}; create it with "
                f"SalsCache(..., device=model.device)"
            )
        slots = torch.arange(key_states.shape[2], device=self.device) + self.cumulative_length
        self.cumulative_length.add_(key_states.shape[2])
        keys = write(self.key_handle, key_states, slots, self.max_cache_len)
        return keys, write(self.value_handle, value_states, slots, self.max_cache_len)

    def offload(self) -> None:
        """Latents stay on the device."""

    def prefetch(self) -> None:
        """Latents stay on the device."""


class SalsCache(StaticCache):
    """A ``Cache`` whose full-attention layers hold latents, a ring of recent tokens and rotary rows instead of keys and
    values; its other layers (sliding windows, say) are transformers' own static ones.

    Every forward pass over it must run through a model compiled with ``backend="sals"``; anything else raises, with the
    remedy. A context of no more than ``budget`` tokens is kept exact. ``crop``, ``reset``, ``reorder_cache`` (beam
    search), ``batch_repeat_interleave`` and ``batch_select_indices`` act on the latents.

    Args:
        config: the model's configuration.
        max_cache_len: capacity ``S`` in tokens.
        device: where the model runs (default: torch's default device). One device for all layers.

    Raises ``TypeError`` for ``offloading``, which a compressed cache does not have, and ``ValueError`` for a model
    without full-attention layers.
    """

    def __init__(
        self, config: Any, max_cache_len: int, device: torch.device | str | None = None, **kwargs: Any
    ) -> None:
        if kwargs:
            raise TypeError(f"SalsCache takes config, max_cache_len and device, not {', '.join(kwargs)}")
        super().__init__(config=config, max_cache_len=max_cache_len)
        place = placed(device)
        self.layers = [SalsLayer(max_cache_len, place) if type(la) is StaticLayer else la for la in self.layers]
        own = [la for la in self.layers if isinstance(la, SalsLayer)]
        if not own:
            raise ValueError("this model has no full-attention layers, so a SalsCache would compress nothing")
        self.state = VirtualCache([la.key_handle for la in own], [la.cumulative_length for la in own], max_cache_len)

    def _others(self) -> list[Any]:
        return [la for la in self.layers if not isinstance(la, SalsLayer)]

    def nbytes(self) -> int:
        """Bytes that the compressed layers hold, everything counted."""
        return self.state.nbytes()

    def reset(self) -> None:
        """Forget all tokens; the memory stays allocated (``release`` frees it)."""
        self.state.reset()
        for layer in self._others():
            layer.reset()

    def release(self) -> None:
        """Forget all tokens and free the memory; the next call allocates it anew, of any batch size."""
        self.reset()
        self.state.drop()

    def crop(self, tokens: int) -> None:
        """Remove the last ``-tokens`` tokens; a positive number is the length to keep (transformers before 5.20)."""
        self.state.crop(tokens if tokens <= 0 else min(0, tokens - self.state.tokens))
        for layer in self._others():
            layer.crop(tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` of the batch becomes what row ``beam_idx[i]`` was; ``beam_idx [B]``."""
        self.state.reorder(beam_idx)
        for layer in self._others():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row of the batch ``repeats`` times: ``[B, ...]`` becomes ``[B * repeats, ...]``."""
        self._no_others("batch_repeat_interleave")
        self.state.select(torch.arange(self.state.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows ``indices`` of the batch: indices ``[K]``, or a boolean mask ``[B]``."""
        self._no_others("batch_select_indices")
        self.state.select(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def _no_others(self, method: str) -> None:
        if self._others():
            raise NotImplementedError(f"transformers' static sliding layers have no {method}()")
