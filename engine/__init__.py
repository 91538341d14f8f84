"""The inference engine: one model on one device, tokens in, tokens and KV blocks out. Prefill and
decode workers share it; it knows no RPC and no asyncio.

Import names from the modules: `engine.config`, `engine.request`, `engine.engine`, `engine.errors`,
`engine.testing.fake_model`.
"""
