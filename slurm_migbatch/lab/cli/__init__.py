"""The commands of the laboratory: bench, eval, simulate."""
