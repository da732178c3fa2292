#!/bin/bash
# A training on slices that inference does not need, of any size between min and max. When its slice is wanted back it
# is told by USR1, saves, and is requeued. It goes on later on whatever size there is then, with the same result.
#SBATCH --job-name=elastic
#SBATCH --gres=mig:auto
#SBATCH --comment="migbatch: role=train mem=8gb min=1g.10gb max=3g.40gb signal=usr1"
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --time=1-00:00:00
#SBATCH --output=%x-%j.out

# USR1 goes to every process of the job, and bash would die of it. The training sets a handler of its own.
trap '' USR1 USR2

# The Python that your training runs in; it needs slurm-migbatch (`pip install slurm-migbatch`), and nothing else of it.
exec "${PYTHON:-python3}" "${TRAINING:-$SLURM_SUBMIT_DIR/elastic_training.py}" \
	"${CHECKPOINTS:-$SLURM_SUBMIT_DIR/elastic-$SLURM_JOB_ID}" "${STEPS:-600}" "${STEP_SECONDS:-0.1}"
