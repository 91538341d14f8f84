"""LoRA adapters of one loaded model: read from PEFT folders, several in one batch, none in the KV
of another.

    config           LoraLimits: how many, how large
    adapter          a PEFT folder -> checked tensors and their content digest
    manager          LoraManager: the table of slots, loads, unloads, in-use counts
    stacked_weights  what adapters add to a linear layer: one by one, or all at once in CUDA graphs
"""
