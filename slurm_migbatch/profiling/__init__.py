"""What was measured: one neutral table, what fills it, and the command that measures a model where it stands."""
