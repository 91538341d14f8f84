"""The front door: validates, makes tokens of text, chooses workers, joins both legs, makes text of
tokens. No torch.
"""
