#!/bin/bash
# Three slices in one job: the batch script sees all of them, task i gets slice i.
#SBATCH --job-name=three
#SBATCH --nodes=1
#SBATCH --ntasks=3
#SBATCH --gres=mig:1g.10gb:3
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out

echo "batch script: $CUDA_VISIBLE_DEVICES ($MIGBATCH_PROFILE)"
srun bash -c 'echo "task $SLURM_PROCID: $CUDA_VISIBLE_DEVICES"; sleep "${WORK_SECONDS:-5}"'
