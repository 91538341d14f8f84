"""The engine as a library: `LLM`, and clients of an engine in this process, in a process of its
own, and of several at once.

Import names from the modules. Knows engines and tokenizers; no service and no store.
"""
