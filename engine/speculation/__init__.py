"""Several tokens a step: drafters guess what comes next as a token tree, one forward pass of the
model computes all of it, and what the model would have drawn itself is kept (SpecInfer, Miao et
al., 2024, arXiv 2305.09781).

tree.py what is guessed, drafter.py who guesses, ngram.py from the text so far, acceptance.py the
stochastic rules, expansion.py how much is worth guessing, speculator.py all of them for one step.
"""
