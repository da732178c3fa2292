"""Decide what waiting jobs are changed to, another profile or throttle: the dispatch stage."""
