#!/bin/bash
# Runs a command that sees only some of this machine's GPUs, as in a container: in a mount namespace whose /dev has their
# device files and no others:
#
#     campaigns/only.sh 2,3 COMMAND ARGUMENT ...
#
# The numbers are those of /dev/nvidiaN. Root. Nothing is changed outside the namespace. Exit status: the command's.
set -euo pipefail
if [ "${MPSAGENT_ONLY:-}" != "$$" ]; then
    export MPSAGENT_ONLY=$$
    exec unshare --mount --propagation private "$0" "$@"
fi
wanted=",$1,"
shift
dev=$(mktemp -d /tmp/dev.XXXXXX)
# nodev: the driver's libraries make missing device files by themselves, which must not open; those bound here do.
mount -t tmpfs -o mode=0755,nosuid,nodev devices "$dev"
for path in /dev/* /dev/.[!.]*; do
    name=${path#/dev/}
    if [[ $name =~ ^nvidia([0-9]+)$ && $wanted != *",${BASH_REMATCH[1]},"* ]]; then
        continue
    elif [ "$name" = ptmx ]; then # the kernel looks for pts beside it
        ln -s pts/ptmx "$dev/ptmx"
    elif [ -L "$path" ]; then
        cp -a "$path" "$dev/$name"
    elif [ -d "$path" ]; then
        mkdir "$dev/$name" && mount --rbind "$path" "$dev/$name"
    elif [ -e "$path" ]; then
        touch "$dev/$name" && mount --bind "$path" "$dev/$name"
    fi
done
mount --move "$dev" /dev
rmdir "$dev"
exec "$@"
