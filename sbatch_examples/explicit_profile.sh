#!/bin/bash
# Request an explicit profile. Nothing is rewritten.
#SBATCH --job-name=two-g
#SBATCH --gres=mig:2g.20gb
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out

echo "batch script: $CUDA_VISIBLE_DEVICES ($MIGBATCH_PROFILE)"
srun bash -c 'echo "task $SLURM_PROCID: $CUDA_VISIBLE_DEVICES"; sleep "${WORK_SECONDS:-5}"'
