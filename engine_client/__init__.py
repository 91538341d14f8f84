"""The engine as a library: `LLM`, and clients of an engine in this process, in a child process, and
of several engines at once.

Import names from the modules. Knows engines and tokenizers; no service and no store.
"""
