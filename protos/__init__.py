"""The wire of Baton: `.proto` files beside their committed stubs (`make protos`).

- `inference.proto`: clients to the router.
- `prefill.proto`, `decode.proto`: the router to its workers.
- `kvstore.proto`: workers to a KV store.
- `draft.proto`: decode workers to draft workers.
- `common.proto`: the words that they share.
"""
