"""`baton preflight`: what a chart needs of a cluster, what the cluster has, the gap."""
