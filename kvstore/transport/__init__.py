"""Transports: ways to move the bytes of KV blocks between a worker and a store, or out of another
worker's cache (shared memory, NIXL, gRPC, CUDA IPC); `base` has the contract."""
