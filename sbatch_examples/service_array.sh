#!/bin/bash
# A service of equal instances: as many tasks run at once as are needed to serve 40 requests per second within 100 ms.
# When a task ends the next one starts if the load needs it; tasks are never stopped, so set a time limit.
# The array begins a little later, so that Slurm does not start more than are needed before their number is known.
#SBATCH --job-name=service
#SBATCH --array=1-50%8
#SBATCH --begin=now+30
#SBATCH --gres=mig:auto
#SBATCH --comment="migbatch: model=resnet50 role=serve rate=40 slo=100ms"
#SBATCH --time=00:30:00
#SBATCH --output=%x-%A_%a.out

echo "instance $SLURM_ARRAY_TASK_ID: $CUDA_VISIBLE_DEVICES ($MIGBATCH_PROFILE, batches of ${MIGBATCH_BATCH:-8})"
# Put your program here; it serves requests until it is terminated:
#   srun python serve.py --batch-size "${MIGBATCH_BATCH:-8}"
# Report the items served since the start and the time of a batch, and the number of tasks follows the actual load:
#   print(f"items={served} latency_ms={ms}", file=open(os.environ["MIGBATCH_PROGRESS"], "a"))
served=0
for _ in $(seq "${REQUESTS:-5}"); do
  served=$((served + 1))
  echo "items=$served latency_ms=20" >> "${MIGBATCH_PROGRESS:-/dev/null}"
  sleep "${WORK_SECONDS:-1}"
done
