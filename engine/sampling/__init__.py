"""Sampling of one token from each row of logits, by the parameters of the row's request.

    sampler.py             Sampler.begin -> PendingSample; documents the order of the processors
    metadata.py            SamplingRequest and SamplerOutput of one row; SamplingMetadata
    logits_processors.py   penalties, bias and hard masks
    token_history.py       a sequence's tokens, as penalties and bans need them
    logprobs.py            log probabilities of the model's own distribution, and those of traces
    copies.py              asynchronous copies of small arrays to a device and back

Temperature, top-k, top-p, min-p and the noise are in baton_kernels/sampling.py and noise.py. The
package knows no sequence, no block and no model. Engine thread only.
"""
