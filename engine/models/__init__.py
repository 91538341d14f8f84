"""Models, and how they are loaded. Read interface.py first: what a model does for the engine.

loader                a checkpoint's name -> a verified model
checkpoint_config     what a checkpoint's config files say, and what earlier starts found out
weights               whether weights fit into memory, and where they come from
self_check            what a start tries before it believes a model
llama                 our own decoder, on baton_kernels (Llama, Mistral, Qwen2, Qwen3)
transformers_backend  modelling code of transformers with our paged attention
fusion                faster layers for such a model
weight_streaming      layers that lie in host memory
largest_step          memory of the largest step, measured
"""
