"""Model the capacity of the cluster for decisions: nodes, GPUs, leases, offers, and free or demanded slices."""
