#!/bin/sh
set -e
if [ "$1" = remove ]; then
    if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
    if [ -d /var/lib/migbatch ]; then
        echo "@name@: /var/lib/migbatch (the record of jobs, the journal) stays; purging the package deletes it"
    fi
fi
# only where no other role's package is there, which has the same directories
if [ "$1" = purge ] && [ ! -e "@prefix@/bin/migbatch" ]; then
    echo "@name@: deleting /var/lib/migbatch (the record of jobs, the journal) and /etc/migbatch"
    rm -rf /var/lib/migbatch /etc/migbatch
fi
