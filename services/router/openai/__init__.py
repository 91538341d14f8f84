"""The OpenAI API over HTTP: bodies to requests for the front desk, its messages to answers.

`shapes`, `records` and `fields` say what a body may hold, `completions`, `chat` and `embeddings`
translate both ways, `routes` serves. Knows nothing of workers.
"""
