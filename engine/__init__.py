"""One model on one device: tokens in, tokens and KV blocks out. Shared by prefill and decode; knows
no RPC and no asyncio.

Import names from the modules: `engine.config`, `engine.request`, `engine.engine`, `engine.errors`,
`engine.fake`.
"""
