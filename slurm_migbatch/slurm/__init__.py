"""Parse and write Slurm's formats (GRES strings, node lists, times), and provide the client."""
