#!/bin/bash
# Measures a model on one slice, so that jobs that name the model get the smallest slice that is fast enough.
# On another slice: sbatch --gres=mig:1g.10gb profile-model.sh. Each job writes its own table.
#SBATCH --job-name=profile-model
#SBATCH --gres=mig:2g.20gb
#SBATCH --time=00:30:00
#SBATCH --requeue
#SBATCH --output=%x-%j.out

# make(batch, input_size) prepares a model and returns a function that processes one batch; this one multiplies
# matrices, on the GPU if torch is installed. Put your own into a file beside this script and set BENCH.
if [ -z "$BENCH" ]; then
	BENCH=$PWD/bench-$SLURM_JOB_ID.py
	# A new file: who else may write in this directory could have put a program there before.
	rm -f "$BENCH"
	set -o noclobber
	cat >"$BENCH" <<'PYTHON' || exit
def make(batch, width):
    try:
        import torch
    except ImportError:
        rows = [[1.0] * width for _ in range(batch)]
        return lambda: [sum(a * b for a, b in zip(row, row)) for row in rows]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = torch.nn.Linear(width, width, device=device)
    items = torch.rand(batch, width, device=device)

    @torch.inference_mode()
    def step():
        layer(items)

    return step
PYTHON
fi

# Without torch, try it on the CPU: sbatch --export=ALL,DEVICE=cpu profile-model.sh
# PLOT=curves.svg draws the curves, if matplotlib is installed with migbatch (extra `plot`).
# --resume: a requeued job continues where it stopped.
NAME=${MODEL:-linear}
srun --ntasks=1 migbatch profile run "$BENCH:make" --model "$NAME" --batches "${BATCHES:-1-64}" \
	--inputs "${INPUTS:-256,1024}" ${DEVICE:+--device "$DEVICE"} --resume \
	-o "${NAME//\//_}-$SLURM_JOB_ID.csv" ${PLOT:+--plot "$PLOT"}

# An administrator imports the tables: migbatch profile import NAME-*.csv
