"""What `migbatch install` writes to a host: which lines of a site's files must change, and how that is undone.

The decisions (`slurmconf`, `slurmedit`, `scripts`, `undo`) are pure; `files` and `record` read and write.
"""
