"""Several tokens a step: proposers draft what comes next as a token tree, one forward pass of the
model verifies all of it, and what the model would have sampled itself is accepted (SpecInfer, Miao
et al., 2024, arXiv 2305.09781).

    manager.py             SpeculationManager: the drafts of one step
    controller.py          SpeculationController: whom to draft for, and which nodes to compute
    proposer.py            the Proposer protocol, DraftTask, Draft, DraftTokens
    token_tree.py          TokenTree
    rejection_sampler.py   which tokens of a tree are accepted
    ngram.py               proposes what followed the same n-gram before
    draft_model.py         a small model proposes
    eagle.py, medusa.py    draft heads propose by the target's hidden states; head_checkpoint.py
    remote.py              draft workers propose; draft_protocol.py, draft_sessions.py (their side)
    loader.py              loads the proposers that the settings name
    config.py              SpeculationConfig
"""
