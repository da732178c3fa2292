"""What root runs on a compute node: hooks, journal, reconcile and the node agent."""
