"""The simulator: clusters of GPUs with MIG, replayed traces, and the policies that the live loops use."""
