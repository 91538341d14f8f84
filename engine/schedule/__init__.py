"""Which requests get how many tokens in the next step: a pure function over values."""
