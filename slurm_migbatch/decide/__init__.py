"""What migbatchd decides, as pure functions: `core.decide(snapshot, memory)` gives the actions to apply.

Nothing here asks Slurm, a node, a database or a clock: all that is known comes in the snapshot.
"""
