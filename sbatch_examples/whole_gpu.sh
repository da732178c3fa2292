#!/bin/bash
# A script written for whole GPUs runs unchanged: on MIG partitions one GPU becomes the full profile.
#SBATCH --job-name=whole
#SBATCH --gpus=1
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out

echo "batch script: $CUDA_VISIBLE_DEVICES ($MIGBATCH_PROFILE)"
srun bash -c 'echo "task $SLURM_PROCID: $CUDA_VISIBLE_DEVICES"; sleep "${WORK_SECONDS:-5}"'
