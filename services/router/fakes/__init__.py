"""Prefill and decode workers without a model: real gRPC servicers that draw tokens from a hash.

For tests and demonstrations of the router. They keep the promises of real workers: each reservation
ends with exactly one last word, a broken stream cancels what came over it, a cancel is answered,
partial handles bring no leases. `Gate`s hold a request in a state for as long as a test wants. The
tokens depend on (seed, prompt, position) only, so both fakes go on from each other.
"""
