if [ "$1" -eq 0 ]; then
    if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
    if [ -d "@prefix@" ]; then
        # byte code of another interpreter (migbatch install --python), which no package owns
        find "@prefix@" -name __pycache__ -prune -exec rm -rf {} +
        find "@prefix@" -depth -type d -empty -delete
    fi
    if [ -d /var/lib/migbatch ]; then
        echo "@name@: /var/lib/migbatch (the record of jobs, the journal) stays; delete it by hand where nobody needs it"
    fi
fi
