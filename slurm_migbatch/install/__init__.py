"""Compute and apply the changes of `migbatch install` to a host: lines of a site's files to change, and their undo.

The decisions (`slurmconf`, `slurmedit`, `catalogline`, `scripts`, `undo`) are pure; `files` and `hosts` read and write.
"""
