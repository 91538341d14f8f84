"""The model fingerprint: two engines may exchange KV only if theirs are equal.

A digest over everything that a block's bytes depend on beside the tokens: weights, config,
tokenizer, the dtype of the KV and the block layout. Not in it: device, threads, how linears run,
tensor-parallel degree. Pure; any thread.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_NOT_MODEL = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
)
"""Keys of config.json that say nothing about what is computed; the dtype used is in the layout."""


def normalised_config(config: Mapping[str, Any]) -> str:
    """config.json as one line that does not depend on the order of keys or on what saved it."""
    kept = {key: value for key, value in config.items() if key not in _NOT_MODEL}
    return json.dumps(kept, sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def fingerprint(
    *, weights_digest: str, config: Mapping[str, Any], tokenizer_digest: str, layout: str
) -> str:
    """Hex, 64 characters.

    Args:
        layout: KvLayout.fingerprint_part.
    """
    digest = hashlib.blake2b(digest_size=32, person=b"baton-model-v1")
    for part in (weights_digest, normalised_config(config), tokenizer_digest, layout):
        data = part.encode()
        digest.update(
            len(data).to_bytes(8, "little") + data
        )  # so that no two lists of parts look alike
    return digest.hexdigest()
