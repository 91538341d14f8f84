"""The device KV cache: its layout, its memory, the block pool, and the prefix cache on top of the
pool."""
