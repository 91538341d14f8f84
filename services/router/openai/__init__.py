"""OpenAI-compatible HTTP API: translates JSON bodies to GenerateRequests for RouterService, and its
messages to answers. Knows no workers.

`schemas` says what a body may hold, `chat` and `completions` (embeddings included) translate in
both directions, `answers` holds what their answers share, `routes` serves the paths.
"""
