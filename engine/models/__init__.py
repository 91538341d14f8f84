"""How a model is loaded and run: Hugging Face modelling code with our paged attention, generic
fusion and packed linears."""
