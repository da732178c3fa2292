#!/bin/bash
# Batch inference that states what it needs; migbatch picks the slice.
# sbatch prints the slice and the reason.
#SBATCH --job-name=bert-batch
#SBATCH --gres=mig:auto
#SBATCH --comment="migbatch: model=bert-large batch=32 slo=200ms"
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out

echo "batch script: $CUDA_VISIBLE_DEVICES ($MIGBATCH_PROFILE)"
# Put your program here; it sees one GPU, its own slice:
#   srun python infer.py --batch-size 32
# Report progress from time to time, and the next prediction gets better. In Python:
#   print(f"items={done}", file=open(os.environ["MIGBATCH_PROGRESS"], "a"))
srun bash -c 'echo "task $SLURM_PROCID: $CUDA_VISIBLE_DEVICES"; sleep "${WORK_SECONDS:-5}"'
# Or report it here, once, if your program printed the number (`migbatch progress --items N --done` does the same).
if [ -n "$ITEMS" ]; then echo "items=$ITEMS seconds=$SECONDS done=1" >> "$MIGBATCH_PROGRESS"; fi
