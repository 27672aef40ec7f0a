"""Finding attention: one file per part of a site (attention, rotary, heads, mask, KV cache, projection)."""
