"""Code shared by prefill and decode workers: the engine's thread, the store connector, KV handles
and the registry heartbeat."""
