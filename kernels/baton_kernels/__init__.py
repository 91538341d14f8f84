"""Operations on the paged KV cache. Importing the package compiles nothing and needs only torch.

`baton_kernels.attention_reference` holds paged attention in plain torch; the other modules hold a
reference version beside each kernel, which runs on CPU and which tests compare the kernel with.
"""
