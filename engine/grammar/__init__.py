"""Structured output: what a request's GrammarSpec allows, as one bit per token and step.

    config.py         GrammarLimits: what a grammar may cost
    errors.py         what can be wrong with one, by whose mistake it is
    regex.py          the regular expressions that are understood, parsed and written anew
    schema.py         the JSON schemas that are understood, keyword by keyword
    classes.py        character classes without what is no text
    source.py         a GrammarSpec checked and brought into one of three forms
    emptiness.py      whether a grammar has any text at all that the vocabulary can spell
    vocabulary.py     the bytes of each token, from the checkpoint's tokenizer.json
    compile_server.py a process of its own that compiles in children which can be killed
    compiler.py       our side of it
    workers.py        threads that may be given up on
    state.py          GrammarState: where one output is in its grammar
    jump.py           forced text, cut into tokens anew
    fill.py           bitmasks of one step, filled while the model runs
    compilation.py    Compilation: one spec on its way to being a grammar
    service.py        GrammarService: the package's surface

Knows nothing of requests, blocks or steps; the engine's loop drives it.
"""
