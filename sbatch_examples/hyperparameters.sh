#!/bin/bash
# A hyperparameter grid: each array task is one combination, on its own slice, as slices become free.
# %6 leaves room for other users; without it as many run as fit. Where idle slices are lent, role=train lets a task be
# requeued at any time: leave it out if your program does not continue from checkpoints.
#SBATCH --job-name=grid
#SBATCH --array=0-8%6
#SBATCH --gres=mig:auto
#SBATCH --comment="migbatch: role=train mem=8gb"
#SBATCH --cpus-per-task=2
#SBATCH --time=02:00:00
#SBATCH --output=%x-%A_%a.out

rates=(1e-4 3e-4 1e-3)
decays=(0 0.01 0.1)
rate=${rates[SLURM_ARRAY_TASK_ID / ${#decays[@]}]}
decay=${decays[SLURM_ARRAY_TASK_ID % ${#decays[@]}]}

# Put your program here. Each task writes its own file, so that tasks do not wait for or overwrite each other.
# `migacct -j JOB -o JobID,Profile,MeasMemory,Elapsed` shows afterwards what each task used of its slice.
result=${RESULTS:-$SLURM_SUBMIT_DIR}/grid-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID.json
echo "learning rate $rate, weight decay $decay on $MIGBATCH_PROFILE ($CUDA_VISIBLE_DEVICES)"
srun "${PYTHON:-python3}" "${TRAINING:-$SLURM_SUBMIT_DIR/train.py}" \
	--learning-rate "$rate" --weight-decay "$decay" --output "$result"
