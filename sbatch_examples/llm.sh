#!/bin/bash
# A language model asks in the words of its engine: weights and the key-value cache of four sequences must fit.
#SBATCH --job-name=llm
#SBATCH --gres=mig:auto
#SBATCH --comment="migbatch: model=Qwen/Qwen2.5-7B-Instruct engine=vllm max_model_len=8192 max_num_seqs=4"
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out

echo "batch script: $CUDA_VISIBLE_DEVICES ($MIGBATCH_PROFILE)"
# a real job: vllm serve Qwen/Qwen2.5-7B-Instruct --max-model-len 8192 --max-num-seqs 4
srun bash -c 'echo "task $SLURM_PROCID: $CUDA_VISIBLE_DEVICES"; sleep "${WORK_SECONDS:-5}"'
