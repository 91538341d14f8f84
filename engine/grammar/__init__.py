"""Structured output: the tokens that a request's GrammarSpec allows, as one bit per token and step.
The grammars are llguidance's.

    config.py          GrammarLimits: limits of one grammar's cost
    errors.py          errors of grammars
    source.py          a GrammarSpec as a grammar of llguidance
    json_schema.py     JSON schemas: rewrites, and rejections by path and keyword
    formats.py         values of `format` as patterns
    costs.py           bounds that the library's own limits lack
    vocabulary.py      the bytes of each token, from the checkpoint's tokenizer.json
    compile_server.py  a process that compiles in children, which can be killed
    compiler.py        the engine's client of it
    state.py           GrammarState: the position of one output in its grammar
    fill.py            masks of one step, filled while the model runs
    service.py         GrammarService: the package's interface

It knows no requests, blocks or steps; the engine's loop calls it.
"""
