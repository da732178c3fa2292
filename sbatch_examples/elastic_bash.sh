#!/bin/bash
# elastic_training.sh without the library: any program that works in steps, a checkpoint file, and USR1 handled in bash.
#SBATCH --job-name=elastic-bash
#SBATCH --gres=mig:auto
#SBATCH --comment="migbatch: role=train mem=8gb min=1g.10gb max=3g.40gb signal=usr1"
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --time=1-00:00:00
#SBATCH --output=%x-%j.out

CHECKPOINT=${CHECKPOINT:-$SLURM_SUBMIT_DIR/elastic-$SLURM_JOB_ID.state}
signal=
trap 'signal=USR1' USR1
trap 'signal=TERM' TERM

# Same as `migbatch progress --steps N --checkpoint`, for nodes without that command.
report() { if [ -n "$MIGBATCH_PROGRESS" ]; then echo "$*" >>"$MIGBATCH_PROGRESS"; fi; }

# The checkpoint is written to a temporary file and renamed: a job may be killed at any moment. Not every file system can
# sync a directory. A subshell, so that USR1 does not end sync or mv; it is saved even if that cannot be reported.
save() (
	trap '' USR1
	echo "$step $state" >"$CHECKPOINT.new" && sync "$CHECKPOINT.new" && mv -f "$CHECKPOINT.new" "$CHECKPOINT" || exit
	sync "${CHECKPOINT%/*}" 2>/dev/null
	report "steps=$step checkpoint=$(date +%s.%N)"
	exit 0
)

step=0 state=1
if [ -e "$CHECKPOINT" ]; then
	# Bash runs commands in what it computes with, so the numbers must not be another user's.
	if ! [ -O "$CHECKPOINT" ]; then
		echo "$CHECKPOINT belongs to another user" >&2
		exit 1
	fi
	read -r step state <"$CHECKPOINT"
	report "steps=$step restored=$step"
fi
first=$step
echo "from step $step on $MIGBATCH_PROFILE"

while [ "$step" -lt "${STEPS:-600}" ]; do
	# Your program does one step here, or a few; it must survive the USR1 that every process of the job gets.
	(
		trap '' USR1
		exec sleep "${STEP_SECONDS:-0.1}"
	)
	code=$?
	case $code in
	0) state=$(((state * 31 + step) % 1000003)) step=$((step + 1)) ;;
	138) signal=USR1 ;; # the signal arrived before the program could ignore it
	143) signal=TERM ;;
	*) exit "$code" ;;
	esac

	if [ "$signal" = TERM ]; then
		save
		exit 143
	elif [ "$signal" = USR1 ]; then
		signal=
		if save; then
			# After saving and reporting, pause until TERM; continue if none comes.
			end=$((SECONDS + ${IDLE_SECONDS:-120}))
			while [ -z "$signal" ] && [ "$SECONDS" -lt "$end" ]; do sleep 0.2; done
			if [ "$signal" = TERM ]; then exit 143; fi
		else
			signal=${signal:-USR1} # not saved: try again
		fi
	elif [ "$((step % ${EVERY:-100}))" -eq 0 ]; then
		save
	fi
done
if ! save; then # the next run continues from the last checkpoint
	if [ "$signal" = TERM ]; then exit 143; fi
	exit 1
fi
report "steps=$step items=$((step - first)) seconds=$SECONDS done=1"
echo "state $state after step $step"
