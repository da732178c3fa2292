"""Decide which idle slices are lent to training jobs, and which loans end: the lending stage."""
