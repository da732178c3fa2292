"""Run root's part on compute nodes: the hooks' executor, its journal, the resident agent and repairs.

Only the standard library, `slurm_migbatch.mig` and (through `mig/nvml/`) pynvml are imported here.
"""
