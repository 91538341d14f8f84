"""Our own decoder for the Llama, Mistral, Qwen2 and Qwen3 families, on baton_kernels. The universal
backend is engine/models/transformers_backend.py."""
