"""Speculative decoding with token trees (SpecInfer, Miao et al., 2024, arXiv 2305.09781): proposers
draft the next tokens as a tree, one forward pass of the model verifies the tree, and the tokens
that the model would have sampled itself are accepted.

    manager.py             SpeculationManager: the drafts of one step
    controller.py          SpeculationController: the calls of proposers, and the nodes to verify
    proposer.py            the Proposer protocol, DraftTask, Draft, DraftTokens
    token_tree.py          TokenTree
    rejection_sampler.py   acceptance of a tree's tokens
    ngram.py               n-gram lookup in the sequence itself
    draft_model.py         a proposer that runs a small model
    eagle.py, medusa.py    draft heads on the target's hidden states; head_checkpoint.py
    remote.py              a proposer that calls draft workers; draft_protocol.py,
                           draft_sessions.py (their side)
    loader.py              loads the proposers that the settings name
    config.py              SpeculationConfig
"""
