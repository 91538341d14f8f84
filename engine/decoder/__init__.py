"""Launching of LlamaDecoder's steps (engine/models/llama.py): the tensors of a step, tables of rows
that stay on the device, and CUDA graphs."""
