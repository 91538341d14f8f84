"""Models and their loading. interface.py defines what the engine needs of a model.

loader                a checkpoint's name -> a verified model
checkpoint_config     contents of a checkpoint's config files, cached between starts
weights               memory checks of weights, and their sources
self_check            checks of a model at start
llama                 our own decoder, on baton_kernels (Llama, Mistral, Qwen2, Qwen3)
transformers_backend  modelling code of transformers with our paged attention
fusion                faster layers for such a model
weight_streaming      layers that lie in host memory
largest_step          memory of the largest step, measured
"""
