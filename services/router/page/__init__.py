"""Live page: a read-only dashboard of the cluster, served on the router's HTTP port. See `routes`."""
