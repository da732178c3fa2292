"""Measure the cost of parts of the product on this machine, as ratios."""
