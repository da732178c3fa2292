"""Measurements of what migbatch costs, as ratios within one run, and the bars they are held against."""
