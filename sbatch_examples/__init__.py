"""Runnable jobs, installed as the package slurm_migbatch.sbatch_examples."""
