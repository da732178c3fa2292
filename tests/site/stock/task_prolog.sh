#!/bin/sh
echo "export SCRATCH=/var/tmp/scratch-$SLURM_JOB_ID"
