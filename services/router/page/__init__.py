"""Live page: a read-only view of the cluster in a browser, served on the router's HTTP port."""
