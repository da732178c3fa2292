"""Compute and apply the changes of `migbatch install` to a host: lines of a site's files to change, and their undo.

The decisions are pure: `slurmedit` composes those on slurm.conf (`catalogline`, `partitionlines`), on gres.conf
(`gresconf`, `devices`) and on topology.conf; `scripts` and `undo` are others. `files` and `hosts` read and write.
"""
