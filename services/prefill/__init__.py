"""Prefill worker: takes one prompt, and returns its first token and a handle to its KV."""
