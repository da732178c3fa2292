#!/bin/bash
# A notebook on a slice. For a browser form instead, see ondemand/ in this directory.
#SBATCH --job-name=jupyter
#SBATCH --gres=mig:auto
#SBATCH --comment="migbatch: mem=9gb"
#SBATCH --cpus-per-task=2
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.out

# It listens on the loopback interface of its node. Other users' jobs on this node can reach it, so it needs a token, in a
# file that only you can read and not in this output; it is in your home directory, where no other user can put one before.
# To use it from your own machine, with the node and port printed below:
#   ssh -L 8888:127.0.0.1:PORT NODE     and then http://127.0.0.1:8888/lab, with the token of the file
port=$((20000 + SLURM_JOB_ID % 20000))
export JUPYTER_TOKEN_FILE=${TOKEN:-$HOME/jupyter-$SLURM_JOB_ID.token}
(umask 077 && head -c 24 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$JUPYTER_TOKEN_FILE") || exit
trap 'rm -f "$JUPYTER_TOKEN_FILE"' EXIT

# Kernels inherit CUDA_VISIBLE_DEVICES: torch.cuda.device_count() is 1, and that device is the slice. The slice is held
# until the job ends: shut the server down (File, Shut Down) when you are done. It exits after an hour without use.
echo "$MIGBATCH_PROFILE with $MIGBATCH_MEMORY_MIB MiB on $SLURMD_NODENAME, port $port, token in $JUPYTER_TOKEN_FILE"
srun jupyter lab --no-browser --ip=127.0.0.1 --port="$port" --ServerApp.port_retries=0 \
	--ServerApp.shutdown_no_activity_timeout=3600 --MappingKernelManager.cull_idle_timeout=3000
