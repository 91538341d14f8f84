"""Draft heads in published formats: small networks on the target's own hidden states, Medusa's
(medusa.py) and EAGLE's (eagle.py), read from their checkpoints (checkpoint.py, load.py)."""
