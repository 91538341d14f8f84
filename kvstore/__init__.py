"""The KV-cache transfer service: a store process that keeps KV blocks, and the client by which
workers put and get them.

Start reading at `block_store.py` (a store's state), `client.py` (what workers call) and
`transport/base.py` (how bytes move). Knows no model, no tokens beyond their hashes, no torch and no
engine.
"""
