"""Models in plain PyTorch that keep KV buffers of their own: :class:`LatentCache` takes the buffers' place.

Where a layer has ``k_cache`` and ``v_cache`` and writes ``k_cache[:, :, input_pos] = k`` (gpt-fast's ``KVCache``), it
gets one of the cache's layers and calls its ``update``:

```python
cache = LatentCache(len(model.layers), capacity=32768, device="cuda")
for block, layer in zip(model.layers, cache.layers):
    block.attention.kv_cache = layer          # update(input_pos, k, v) -> keys, values, as before
model = torch.compile(model, backend="sals")
```
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kernels.virtual import write
from ..virtual import VirtualCache, handles, placed


class LatentLayer(nn.Module):
    """One layer of a :class:`LatentCache`; it has no parameters and nothing in ``state_dict()``."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        super().__init__()
        self.capacity = capacity
        self.key_handle, self.value_handle = handles(device)

    def update(self, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's whole keys and values ``[B, N, capacity, D]`` after ``key`` and ``value`` ``[B, N, L, D]`` were
        written at ``slots [L]``, consecutive ones. Keys are rotated already, where a model rotates them. Raises
        ``RuntimeError`` outside of a graph compiled by ``backend="sals"``.
        """
        keys = write(self.key_handle, key, slots, self.capacity)
        return keys, write(self.value_handle, value, slots, self.capacity)


class LatentCache(VirtualCache):
    """The KV cache of a whole model, as latents. ``reset``, ``crop``, ``reorder``, ``select``, ``drop`` and ``nbytes``
    act on all layers at once.

    Args:
        layers: attention layers.
        capacity: tokens ``S``.
        device: where the model runs (default: torch's default device).
    """

    def __init__(self, layers: int, capacity: int, device: torch.device | str | None = None) -> None:
        self.layers = [LatentLayer(capacity, placed(device)) for _ in range(layers)]
        super().__init__([layer.key_handle for layer in self.layers], [], capacity)
