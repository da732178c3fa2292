if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    # an upgrade: what runs would import from files that have changed; a first installation starts nothing
    if [ "$1" -gt 1 ] && [ -n "@unit@" ]; then systemctl try-restart "@unit@"; fi
fi
if [ "$1" -eq 1 ]; then echo "@name@: nothing of Slurm's was changed; next: migbatch install --role @role@"; fi
