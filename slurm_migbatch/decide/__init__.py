"""migbatchd's decisions, as pure functions: `core.decide(snapshot, memory)` returns the actions to apply.

Nothing here queries Slurm, a node, a database or a clock: all input is in the snapshot.
"""
