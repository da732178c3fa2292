#!/bin/bash
# Training on idle inference slices, of any size between min and max. When its slice is reclaimed it gets USR1, writes a
# checkpoint, and is requeued. It continues later on whatever size is idle then, with the same result.
# No mem=: the program fills its slice. With mem= another job of yours may share the slice, and get what mem= leaves.
#SBATCH --job-name=elastic
#SBATCH --gres=mig:auto
#SBATCH --comment="migbatch: role=train min=1g.10gb max=3g.40gb signal=usr1"
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --time=1-00:00:00
#SBATCH --output=%x-%j.out

# USR1 is sent to every process of the job and would kill bash. The training program sets its own handler.
trap '' USR1 USR2

# The Python of your training program; it needs only migbatch without extras (`pip install DIR`, a checkout or a wheel).
exec "${PYTHON:-python3}" "${TRAINING:-$SLURM_SUBMIT_DIR/elastic_training.py}" \
	"${CHECKPOINTS:-$SLURM_SUBMIT_DIR/elastic-$SLURM_JOB_ID}" "${STEPS:-600}" "${STEP_SECONDS:-0.1}"
