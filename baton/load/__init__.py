"""The load generator of `baton bench serve`: `workload` makes requests, `senders` send them,
`runner` times them, `report` has the figures.
"""
