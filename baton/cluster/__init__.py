"""A cluster on this machine: `config` describes it, `plan` makes its command lines, `supervisor`
keeps its processes running, `local_cluster` starts and stops it, `state` lets commands find it.
"""
