"""From a row of logits to one token, by the request's own parameters.

    sampler.py             Sampler.begin -> PendingSample; documents the order of the processors
    metadata.py            SamplingRequest in, SamplerOutput out, for one row; SamplingMetadata
    logits_processors.py   penalties, bias and hard masks
    token_history.py       what penalties and bans must know of the tokens so far
    logprobs.py            log probabilities of the model's own distribution, and of a trace's
    copies.py              small arrays on their way to a device and back

Temperature, top-k, top-p, min-p and the noise are baton_kernels/sampling.py and noise.py. Knows no
sequence, no block, no model. Engine thread only.
"""
