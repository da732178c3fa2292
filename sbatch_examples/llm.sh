#!/bin/bash
# A language model asks in the words of its engine: weights and the key-value cache of four sequences must fit.
#SBATCH --job-name=llm
#SBATCH --gres=mig:auto
#SBATCH --comment="migbatch: model=Qwen/Qwen2.5-7B-Instruct engine=vllm max_model_len=8192 max_num_seqs=4 cuda=index"
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out

echo "batch script: $CUDA_VISIBLE_DEVICES ($MIGBATCH_PROFILE)"
# vLLM takes CUDA_VISIBLE_DEVICES for numbers: cuda=index gives it 0 where that can only be this slice.
srun bash -c 'echo "task $SLURM_PROCID: $CUDA_VISIBLE_DEVICES"'

# An OpenAI-compatible server on this node alone: ssh -L 8000:127.0.0.1:PORT NODE, then curl http://127.0.0.1:8000/v1/models
port=$((20000 + SLURM_JOB_ID % 20000))
if command -v vllm >/dev/null; then
  srun vllm serve Qwen/Qwen2.5-7B-Instruct --max-model-len 8192 --max-num-seqs 4 --host 127.0.0.1 --port "$port"
else
  echo "vllm is not installed here: this is where it would serve on port $port"
  sleep "${WORK_SECONDS:-5}"
fi
