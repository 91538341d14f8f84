"""The parts that models are made of: paged attention of each kind of cache and device, and linear
layers with what is fused around them and what adapters add."""
