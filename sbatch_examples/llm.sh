#!/bin/bash
# A language model asks by memory: weights plus the key-value cache must fit.
#SBATCH --job-name=llm
#SBATCH --gres=mig:auto
#SBATCH --comment="migbatch: mem=34gb batch=8 input=2k"
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out

echo "batch script: $CUDA_VISIBLE_DEVICES ($MIGBATCH_PROFILE)"
srun bash -c 'echo "task $SLURM_PROCID: $CUDA_VISIBLE_DEVICES"; sleep "${WORK_SECONDS:-5}"'
