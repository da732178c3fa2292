#!/bin/sh
# a directory on local disk for each job
/bin/mkdir -p "/var/tmp/scratch-$SLURM_JOB_ID"
