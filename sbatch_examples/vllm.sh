#!/bin/bash
# A language model, requested with the option names of its engine: weights and the KV cache of four sequences must fit.
#SBATCH --job-name=vllm
#SBATCH --gres=mig:auto
#SBATCH --comment="migbatch: model=Qwen/Qwen2.5-7B-Instruct engine=vllm dtype=bf16 max_model_len=8192 max_num_seqs=4"
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

# vLLM expects numbers in CUDA_VISIBLE_DEVICES: engine=vllm sets it to 0 if that can only be this slice; here is the UUID.
echo "batch script: $MIGBATCH_DEVICES ($MIGBATCH_PROFILE)"
srun bash -c 'echo "task $SLURM_PROCID: $MIGBATCH_DEVICES"'

# An OpenAI-compatible server on the loopback interface, which other users' jobs on this node can reach: it requires a
# key. The key is in a file that only you can read, in your home directory, where no other user can put one before, and
# in the environment, never on a command line. To use it:
#   ssh -L 8000:127.0.0.1:PORT NODE
#   curl -H "Authorization: Bearer $(cat ~/vllm-JOB.key)" http://127.0.0.1:8000/v1/models
port=$((20000 + SLURM_JOB_ID % 20000))
key=${KEY:-$HOME/vllm-$SLURM_JOB_ID.key}
trap 'rm -f "$key"' EXIT
(umask 077 && head -c 24 /dev/urandom | base64 >"$key") || exit
VLLM_API_KEY=$(cat "$key")
export VLLM_API_KEY

# The cache in bytes, because gpu_memory_utilization may refer to the whole GPU: per token this model has keys and values
# of 28 layers of 4 heads of 128 numbers of 2 bytes, 56 KiB; four sequences of 8192 tokens have 1.75 GiB.
if command -v vllm >/dev/null; then
	echo "on $SLURMD_NODENAME, port $port, key in $key"
	srun vllm serve Qwen/Qwen2.5-7B-Instruct --dtype bfloat16 --max-model-len 8192 --max-num-seqs 4 \
		--kv-cache-memory-bytes $((2 * 28 * 4 * 128 * 2 * 8192 * 4)) --host 127.0.0.1 --port "$port"
else
	echo "vllm is not installed: it would serve on port $port"
	sleep "${WORK_SECONDS:-5}"
fi
