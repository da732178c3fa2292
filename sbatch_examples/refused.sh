#!/bin/bash
# Refused at submission: `mig:1g` means a count of 2^30 to Slurm. The message says what to write instead.
#SBATCH --job-name=refused
#SBATCH --gres=mig:1g
#SBATCH --time=00:10:00

echo "this never runs"
