"""A cluster on this machine: what it consists of, its processes, and the traces that it leaves.

`config` says what is asked for, `plan` makes command lines of it, `supervisor` keeps the processes,
`local_cluster` starts and stops them all, `state` tells this user's other commands of it.
"""
