"""Layers that models consist of: paged attention for each kind of cache and device, and linear
layers with the operations fused around them and their LoRA adapters."""
