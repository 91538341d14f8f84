"""Decode worker: takes over prompts by handle and streams their tokens, one message per engine
step."""
