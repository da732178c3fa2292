"""Decisions as pure functions over plain values: the simulator and the live loops call the same ones.

Nothing here knows Slurm, a database, a driver or a clock; each module names the published idea that it follows, and
says what of it is a reconstruction.
"""
