#!/bin/sh
set -e
if [ "$1" = configure ]; then
    if [ -d /run/systemd/system ]; then
        systemctl daemon-reload
        # an upgrade: what runs would import from files that have changed; a first installation starts nothing
        if [ -n "$2" ] && [ -n "@unit@" ]; then systemctl try-restart "@unit@"; fi
    fi
    if [ -z "$2" ]; then echo "@name@: nothing of Slurm's was changed; next: migbatch install --role @role@"; fi
fi
