"""From a row of logits to one token, by the request's own parameters: `pipeline.draw` is the way
in, and documents the order of the processors.

    row.py         what goes in (Draw) and what comes out (Drawn) for one row
    check.py       ranges of every parameter; torch-free
    recipe.py      what one Sampling asks for, worked out once and not every step
    history.py     what penalties and bans must know of the tokens so far, kept up token by token
    penalties.py   repetition, presence, frequency, logit bias
    masks.py       allowed ids, bad words, no-repeat n-gram, grammar bitmask, min-tokens
    truncation.py  top-k, top-p, min-p, as one threshold per row
    choose.py      argmax over the support with noise
    logprobs.py    log probabilities of the model's own distribution
    dense.py       the few passes over whole [rows, vocabulary] arrays that all of these share

Knows no sequence, no block, no model. Engine thread only, except check.py.
"""
