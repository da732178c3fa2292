"""What parts of the product cost on this machine, as ratios."""
