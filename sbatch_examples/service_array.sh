#!/bin/bash
# A service of many equal instances: as many of these tasks run at once as carry 40 requests a second within 100 ms.
# A task that ends makes room for the next one while the load needs it; none is ever stopped, so give them a time limit.
# The array begins a little later, so that Slurm does not start more than are needed before their number is known.
#SBATCH --job-name=service
#SBATCH --array=1-50%8
#SBATCH --begin=now+30
#SBATCH --gres=mig:auto
#SBATCH --comment="migbatch: model=resnet50 role=serve rate=40 slo=100ms"
#SBATCH --time=00:30:00
#SBATCH --output=%x-%A_%a.out

echo "instance $SLURM_ARRAY_TASK_ID: $CUDA_VISIBLE_DEVICES ($MIGBATCH_PROFILE, batches of ${MIGBATCH_BATCH:-8})"
# Put your program here; it takes requests from wherever yours come from, until it is told to end:
#   srun python serve.py --batch-size "${MIGBATCH_BATCH:-8}"
# Let it say what it has served since its start, and how long a batch takes, and the number follows the load itself:
#   print(f"items={served} latency_ms={ms}", file=open(os.environ["MIGBATCH_PROGRESS"], "a"))
served=0
for _ in $(seq "${REQUESTS:-5}"); do
  served=$((served + 1))
  echo "items=$served latency_ms=20" >> "${MIGBATCH_PROGRESS:-/dev/null}"
  sleep "${WORK_SECONDS:-1}"
done
