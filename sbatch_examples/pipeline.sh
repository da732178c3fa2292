#!/bin/bash
# Jobs that depend on each other, each on a slice of the size that it needs: the large slice is not held while data is
# prepared or results are evaluated. Run it on a login node, not with sbatch: bash pipeline.sh
# With DEADLINE=4h all jobs must finish within four hours: they get larger slices if that is needed. Jobs of unknown
# duration count with --time.
#SBATCH --cpus-per-task=2
#SBATCH --time=02:00:00
#SBATCH --output=%x-%j.out

model=Qwen/Qwen2.5-1.5B
case $1 in
prepare) # your program reads raw data and writes the training data; it needs a small part of a GPU
	srun "${PYTHON:-python3}" "${PREPARE:-$SLURM_SUBMIT_DIR/prepare.py}" --output "$2/data"
	;;
train) # TRL with PEFT: pip install "trl[peft]"
	srun trl sft --num_processes 1 --model_name_or_path "$model" --dataset_name "$2/data" \
		--use_peft --lora_r 16 --lora_alpha 32 --dtype bfloat16 --bf16 --max_length 2048 --packing \
		--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --gradient_checkpointing \
		--output_dir "$2/adapter"
	;;
evaluate) # pip install "lm_eval[hf]"
	srun lm_eval --model hf --model_args "pretrained=$model,peft=$2/adapter,dtype=bfloat16,max_length=2048" \
		--tasks hellaswag --batch_size 4 --output_path "$2/scores"
	;;
'')
	set -e
	run=${RUN:-$PWD/pipeline-$(date +%Y%m%d-%H%M%S)}
	mkdir "$run"
	# afterok: a job starts when the previous one has succeeded. If that fails, the later ones are cancelled
	# (--kill-on-invalid-dep). No slice is kept free for them meanwhile.
	submit() { sbatch --parsable --kill-on-invalid-dep=yes "$@"; }
	name=run-${run##*/}
	name=${name//[^A-Za-z0-9._-]/-}
	tied=${DEADLINE:+pipeline=${name:0:64} deadline=$DEADLINE}
	tuning="model=$model method=lora dtype=bf16 seq=2k micro_batch=2 checkpointing=on"
	# delay the first one until migbatchd has seen the others
	first=$(submit --job-name=prepare --gres=mig:1g.10gb --time=00:30:00 --comment="migbatch: $tied" \
		${DEADLINE:+--begin=now+15} "$0" prepare "$run")
	second=$(submit --job-name=train --dependency="afterok:$first" --gres=mig:auto \
		--comment="migbatch: $tuning $tied" "$0" train "$run")
	third=$(submit --job-name=evaluate --dependency="afterok:$second" --gres=mig:auto \
		--comment="migbatch: model=$model engine=transformers dtype=bf16 max_model_len=2k batch=4 items=40k $tied" \
		"$0" evaluate "$run")
	echo "jobs $first (prepare), $second (train), $third (evaluate); results in $run"
	;;
*)
	echo "pipeline.sh: unknown stage '$1'; run it without arguments to submit all of them" >&2
	exit 2
	;;
esac
