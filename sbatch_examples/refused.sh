#!/bin/bash
# Refused at submission: Slurm reads `mig:1g` as a count of 2^30. The message says what to write instead.
#SBATCH --job-name=refused
#SBATCH --gres=mig:1g
#SBATCH --time=00:10:00

echo "this never runs"
