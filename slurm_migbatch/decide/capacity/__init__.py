"""The capacity of the cluster as decisions see it: nodes, GPUs, leases, offers, and what is free or demanded."""
