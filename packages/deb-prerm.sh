#!/bin/sh
set -e
# "remove in-favour" is a change to the package of another role, which has the same programs in the same place
if [ "$1" = remove ] && [ "$2" != in-favour ]; then
    if [ -e /var/lib/migbatch/install/record.json ]; then
        echo "@name@: Slurm would run programs that are gone, and drain nodes." >&2
        echo "@name@: run this first: migbatch install --role @role@ --uninstall --apply" >&2
        exit 1
    fi
    if [ -n "@unit@" ] && [ -d /run/systemd/system ]; then systemctl disable --now "@unit@"; fi
    # byte code of another interpreter (migbatch install --python), which no package owns
    find "@prefix@" -name __pycache__ -prune -exec rm -rf {} +
fi
