if [ "$1" -eq 0 ]; then
    if [ -e /var/lib/migbatch/install/record.json ]; then
        echo "@name@: Slurm would run programs that are gone, and drain nodes." >&2
        echo "@name@: run this first: migbatch install --role @role@ --uninstall --apply" >&2
        exit 1
    fi
    if [ -n "@unit@" ] && [ -d /run/systemd/system ]; then systemctl disable --now "@unit@"; fi
fi
