"""The live page: what the cluster does now, in a browser. See `routes`."""
