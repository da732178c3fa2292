#!/bin/bash
# A parameter sweep: every array task gets its own slice as slices become free.
#SBATCH --job-name=sweep
#SBATCH --array=0-3
#SBATCH --gres=mig:auto
#SBATCH --comment="migbatch: model=resnet50 batch=8 items=20000 deadline=2h"
#SBATCH --time=00:10:00
#SBATCH --output=%x-%A_%a.out

echo "batch script: $CUDA_VISIBLE_DEVICES ($MIGBATCH_PROFILE)"
srun bash -c 'echo "task $SLURM_PROCID: $CUDA_VISIBLE_DEVICES"; sleep "${WORK_SECONDS:-5}"'
