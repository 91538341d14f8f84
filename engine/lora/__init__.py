"""LoRA adapters of one loaded model: read from PEFT folders, several in one batch. Adapters never
share KV blocks.

    limits           LoraLimits: number and sizes of adapters
    adapter          a PEFT folder -> checked tensors and their content digest
    manager          LoraManager: the table of slots, loads, unloads, in-use counts
    stacked_weights  products of adapters: one adapter at a time, or all at once in CUDA graphs
"""
