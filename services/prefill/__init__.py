"""The prefill worker: one prompt in, its first token and a handle on its KV out."""
