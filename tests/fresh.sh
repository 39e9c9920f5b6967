#!/bin/bash
# Runs .ci/run on a clone of HEAD in a Debian that has nothing but `make`, several times, each from the start.
#
#   tests/fresh.sh [-d DIRECTORY] [-r RELEASE] [-c COMMAND] TIMES KIND...
#
# KIND: `chroot`, `container` (podman, privileged), `confined` (podman as it is by default); several take turns.
# DIRECTORY (default /var/tmp/mpsagent-fresh) keeps a log of each run, and so that only the first run downloads: the
# bare Debian, the .deb files of apt, pip's wheels and NVIDIA's programs. Everything else is made anew for each run.
# COMMAND is run by a shell in the clone instead of .ci/run. Needs root, debootstrap, a Debian mirror and PyPI; podman and
# crun for containers. Says one line for each run; the status is 0 if each passed. It may be killed in any way: processes and
# mounts are those of namespaces that end with it.
set -euo pipefail

SOURCE=/srv/mpsagent
CACHES=(/var/cache/apt/archives /root/.cache/pip /var/cache/mpsagent-tests)

# All that a run needs, inside its own mount and pid namespace: prepare ROOT, then start `.ci/run` in it.
in_chroot() {
    root=$1
    # A mount point, as everything that pivots its root demands one.
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys"
    mount --rbind /dev "$root/dev"
    mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
    mount -t tmpfs tmpfs "$root/dev/shm"
    cd "$root"
    env -i "${SETTINGS[@]}" chroot "$root" sh -c "cd $SOURCE && $COMMAND"
}

in_container() {
    root=$1
    shift
    # What podman keeps beside its state: not this machine's. A crun of Debian 12 does not start beside a version 2 of
    # cgroups that has controllers.
    cp -L /etc/resolv.conf "$root/etc/resolv.conf"
    ! mountpoint -q /sys/fs/cgroup/unified || umount /sys/fs/cgroup/unified
    mount -t tmpfs -o mode=755 tmpfs /run
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    # Where it may, the container gets what podman left out; it is its first process that goes on.
    inside="[ -e /sys/fs/cgroup/cgroup.controllers ] || { mkdir -p /sys/fs/cgroup/unified &&
            mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified; } 2>/dev/null
        cd $SOURCE && exec env -i \"\$@\" sh -c \"\$COMMAND\""
    podman --root "$root.podman" --runroot /run/podman --storage-driver vfs --cgroup-manager cgroupfs \
        --events-backend none run --rm --network host --cgroups disabled --env COMMAND "$@" --rootfs "$root" \
        sh -c "$inside" sh "${SETTINGS[@]}"
}

# This machine's ways to the network, and nothing else of its environment.
SETTINGS=(HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
mapfile -t -O 2 SETTINGS < <(env | grep -E '^(PIP_(CERT|INDEX_URL|DEFAULT_TIMEOUT)|SSL_CERT_FILE|(https?|no)_proxy)=' || true)

if [ "${1:-}" = --inside ]; then
    mount --make-rprivate /
    mount -t proc proc /proc
    case $2 in
    chroot) in_chroot "$3" ;;
    container) in_container "$3" --privileged ;;
    confined) in_container "$3" ;;
    esac
    exit
fi

# Read to its end before it runs: the file may be changed meanwhile.
{
directory=/var/tmp/mpsagent-fresh release=bookworm
export COMMAND=.ci/run
while getopts d:r:c: option; do
    case $option in
    d) directory=$OPTARG ;;
    r) release=$OPTARG ;;
    c) COMMAND=$OPTARG ;;
    *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
[[ ${1:-} =~ ^[1-9][0-9]*$ ]] && [ $# -ge 2 ] || usage
times=$1
shift
for kind in "$@"; do [[ $kind =~ ^(chroot|container|confined)$ ]] || usage; done

here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$directory/logs"
exec 9>"$directory/lock"
flock -n 9 || { echo "another one runs in $directory" >&2; exit 1; }
# Nothing is mounted here, whatever became of the last run: its mounts were of its own namespace.
child=
leave() {
    [ -z "$child" ] || kill -KILL "$child" 2>/dev/null || true
    rm -rf "$directory"/run "$directory"/run.podman "$directory/$release.new"
}
trap leave EXIT
trap 'exit 143' TERM HUP
trap 'exit 130' INT
leave

base=$directory/$release
if [ ! -d "$base" ]; then
    debootstrap --variant=minbase --include=make "$release" "$base.new" >"$directory/logs/debootstrap.log" 2>&1
    cp -L /etc/resolv.conf "$base.new/etc/resolv.conf"
    mkdir -p "$base.new/etc/ssl/certs" "$base.new/usr/local/share/ca-certificates"
    cp -rLT /etc/ssl/certs "$base.new/etc/ssl/certs"
    cp -rLT /usr/local/share/ca-certificates "$base.new/usr/local/share/ca-certificates"
    mv "$base.new" "$base"
fi

status=0
for ((number = 1; number <= times; number++)); do
    for kind in "$@"; do
        leave
        cp -aT "$base" "$directory/run"
        for cache in "${CACHES[@]}"; do
            mkdir -p "$directory/cache$cache" "$directory/run$cache"
            cp -aT "$directory/cache$cache" "$directory/run$cache"
        done
        git clone --quiet --depth 1 "file://$here" "$directory/run$SOURCE"
        log=$directory/logs/$(date -u +%m%d-%H%M)-$kind-$number.log
        from=$SECONDS
        ended=0
        # In the background, so that this shell hears signals; without this shell it ends too.
        setpriv --pdeathsig KILL unshare --mount --pid --ipc --cgroup --fork --kill-child -- \
            "$0" --inside "$kind" "$directory/run" </dev/null >"$log" 2>&1 9>&- &
        child=$!
        wait "$child" || ended=$?
        child=
        [ "$ended" -eq 0 ] || status=1
        echo "$kind $number of $times: $(tail -n 1 "$log"); status $ended, $((SECONDS - from)) s in all; $log"
        for cache in "${CACHES[@]}"; do
            cp -auT "$directory/run$cache" "$directory/cache$cache"
        done
    done
done
exit "$status"
}
