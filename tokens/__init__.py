"""Text to token ids and back: tokenizer, chat template, incremental text with stop strings. No
torch, no RPC.
"""
