"""LoRA adapters of one loaded model: read from PEFT folders, several in one batch, none in the KV
of another.

    config      LoraLimits: how many, how large
    peft        adapter_config.json: what we take, what is refused by name
    files       a folder -> checked tensors and their content digest
    deltas      what one linear layer adds, per adapter, to the rows of a step that ask for it
    site        a linear layer that adapters can add to, and how it is made to
    stacks      the same for all adapters at once, where CUDA graphs read it
    registry    Adapters: the table of slots, loads, unloads, in-use counts
    roots       which cache root belongs to which adapter
"""
