"""Define the commands of the laboratory: bench, eval, simulate."""
