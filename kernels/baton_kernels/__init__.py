"""Operations on the paged KV cache. Importing it compiles nothing. Knows nothing but torch.

`baton_kernels.reference` holds every operation in plain torch: what runs on CPU, and the truth that
faster ones are tested against.
"""
