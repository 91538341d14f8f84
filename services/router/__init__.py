"""Router service: validates requests, tokenizes prompts, chooses workers, joins the prefill and the
decode part of each request, and detokenizes the output. Imports no torch.
"""
