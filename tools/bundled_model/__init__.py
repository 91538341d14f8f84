"""How the bundled demo checkpoints are made: corpus, tokenizer, training, evaluation, card."""
