"""How steps of our own decoder (engine/models/llama.py) are launched: the tensors of a step, rows
that stay on the device, and CUDA graphs."""
