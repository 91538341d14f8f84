"""Errors of this package.

CheckpointError    the checkpoint is missing, broken or of a kind we refuse; one line that says what
                   and how to fix it
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Permanent until somebody does what the message says."""
