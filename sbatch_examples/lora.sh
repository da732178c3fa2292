#!/bin/bash
# Tuning a language model with LoRA. The hints repeat the arguments of the trainer: keep both the same.
# Needs TRL 1.15 or later with PEFT (pip install "trl[peft]"): earlier ones do not resume. Other trainers use other names for the same arguments.
#SBATCH --job-name=lora
#SBATCH --gres=mig:auto
#SBATCH --comment="migbatch: model=Qwen/Qwen2.5-7B method=lora dtype=bf16 seq=2k micro_batch=1 checkpointing=on optimizer=adamw"
#SBATCH --cpus-per-task=4
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --output=%x-%j.out

# A request that fits no slice is refused at submission, with alternatives: method=qlora (--load_in_4bit), smaller micro_batch.
# Adapters and checkpoints; a requeued job continues from the last complete one, whose trainer_state.json is written last
# (see elastic_training.sh for lent slices).
output=${OUTPUT:-$SLURM_SUBMIT_DIR/lora-$SLURM_JOB_ID}
state=$(compgen -G "$output/checkpoint-*/trainer_state.json" | sort -V | tail -n 1)
resume=()
# Reading a checkpoint can run code: nothing is read that another user has put there before.
if [ -n "$state" ] && [ -z "$OUTPUT" ] && ! [ -O "$output" ]; then
	echo "$output belongs to another user" >&2
	exit 1
fi
if [ -n "$state" ]; then resume=(--resume_from_checkpoint "${state%/*}"); fi

echo "$MIGBATCH_PROFILE with $MIGBATCH_MEMORY_MIB MiB on $SLURMD_NODENAME, adapters in $output"
# One process: a slice is one device. effective batch = per_device_train_batch_size * gradient_accumulation_steps
srun trl sft --num_processes 1 --model_name_or_path Qwen/Qwen2.5-7B --dataset_name "${DATASET:-trl-lib/Capybara}" \
	--use_peft --lora_r 16 --lora_alpha 32 --dtype bfloat16 --bf16 --max_length 2048 --packing \
	--per_device_train_batch_size 1 --gradient_accumulation_steps 16 --gradient_checkpointing \
	--optim adamw_torch --learning_rate 2e-4 --num_train_epochs 1 --save_steps 100 \
	--output_dir "$output" "${resume[@]}"
