"""The KV-cache transfer service: a store process, and the client that workers use.

Start reading at `store.py` (what is true), `client.py` (what workers call) and `transport/base.py`
(what moving bytes means). Knows no model, no tokens beyond their hashes, no torch and no engine.
"""
