"""Checkpoints: from a name to a folder with whole, safe files, and digests of its parts.

Torch-free and without any other package of ours. `bundled/` holds the models that come with Baton.
"""

from checkpoints.digests import Progress, config_digest, tokenizer_digest, weights_digest
from checkpoints.errors import CheckpointError
from checkpoints.files import weight_files
from checkpoints.resolve import Checkpoint, bundled_names, resolve

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Progress",
    "bundled_names",
    "config_digest",
    "resolve",
    "tokenizer_digest",
    "weight_files",
    "weights_digest",
]
