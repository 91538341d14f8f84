"""Load on a running cluster, and what came of it: `baton bench serve`. See `run` for how it is sent
and `report` for what the figures mean.
"""
