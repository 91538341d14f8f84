"""Draft worker service: a small model on a device of its own that drafts tokens for speculative
decoding on decode workers.
"""
