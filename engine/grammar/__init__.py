"""Structured output: what a request's GrammarSpec allows, as one bit per token and step. The
grammars are llguidance's.

    config.py         GrammarLimits: what a grammar may cost
    errors.py         what can be wrong with one, by whose mistake it is
    source.py         a GrammarSpec as a grammar of llguidance
    json_schema.py    the front before its JSON schemas: rewrites, and refusals by path and keyword
    formats.py        values of `format` as patterns
    costs.py          what the library's own limits do not bound
    vocabulary.py     the bytes of each token, from the checkpoint's tokenizer.json
    compile_server.py a process of its own that compiles in children which can be killed
    compiler.py       the engine's side of it
    state.py          GrammarState: where one output is in its grammar
    fill.py           masks of one step, made while the model runs
    service.py        GrammarService: the package's surface

Knows nothing of requests, blocks or steps; the engine's loop drives it.
"""
