"""The device cache: its layout, its memory, the pool of blocks, and the prefix cache on top of the
pool."""
