#!/bin/bash
/bin/rmdir "/var/tmp/scratch-$SLURM_JOB_ID"
