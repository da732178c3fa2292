#!/bin/bash
# The same without the library: any program that works in steps, a checkpoint file, and USR1 handled in bash.
#SBATCH --job-name=elastic-bash
#SBATCH --gres=mig:auto
#SBATCH --comment="migbatch: role=train mem=8gb min=1g.10gb max=3g.40gb signal=usr1"
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --time=1-00:00:00
#SBATCH --output=%x-%j.out

CHECKPOINT=${CHECKPOINT:-$SLURM_SUBMIT_DIR/elastic-$SLURM_JOB_ID.state}
told=
trap 'told=USR1' USR1
trap 'told=TERM' TERM

# What is told here is also what `migbatch progress --steps N --checkpoint` tells, where that command is on the node.
report() { if [ -n "$MIGBATCH_PROGRESS" ]; then echo "$*" >>"$MIGBATCH_PROGRESS"; fi; }

# A checkpoint is written beside its place and renamed when it is whole: a job may be killed at any moment.
save() {
	echo "$step $state" >"$CHECKPOINT.new" && sync "$CHECKPOINT.new" && mv -f "$CHECKPOINT.new" "$CHECKPOINT" &&
		sync "${CHECKPOINT%/*}" && report "steps=$step checkpoint=$(date +%s.%N)"
}

step=0 state=1
if [ -e "$CHECKPOINT" ]; then
	read -r step state <"$CHECKPOINT"
	report "steps=$step restored=$step"
fi
first=$step
echo "from step $step on $MIGBATCH_PROFILE"

while [ "$step" -lt "${STEPS:-600}" ]; do
	# Your program does one step here, or a few; it is not to die of the USR1 that every process of the job gets.
	(
		trap '' USR1
		exec sleep "${STEP_SECONDS:-0.1}"
	)
	code=$?
	case $code in
	0) state=$(((state * 31 + step) % 1000003)) step=$((step + 1)) ;;
	138) told=USR1 ;; # it was told before this script was, or before it could ignore it
	143) told=TERM ;;
	*) exit "$code" ;;
	esac

	if [ "$told" = TERM ]; then
		save
		exit 143
	elif [ "$told" = USR1 ]; then
		told=
		if save; then
			# Saved and told, it stands still until TERM comes, and goes on where nothing comes.
			end=$((SECONDS + ${IDLE_SECONDS:-120}))
			while [ -z "$told" ] && [ "$SECONDS" -lt "$end" ]; do sleep 0.2; done
			if [ "$told" = TERM ]; then exit 143; fi
		else
			told=${told:-USR1} # it stays asked for
		fi
	elif [ "$((step % ${EVERY:-100}))" -eq 0 ]; then
		save
	fi
done
save
report "steps=$step items=$((step - first)) seconds=$SECONDS done=1"
echo "state $state after step $step"
