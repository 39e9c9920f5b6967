#!/bin/bash
# Runs .ci/run on a clone of HEAD in a Debian that has nothing but `make`, several times, each from the start.
#
#   tests/fresh.sh [-d DIRECTORY] [-r RELEASE] [-s SOURCE] [-c COMMAND] TIMES KIND...
#
# KIND: `chroot`, `container` (podman, privileged), `confined` (podman as it is by default), `booted` (its own systemd, in
# namespaces and a cgroup of its own); several take turns. RELEASE: bookworm, or another of Debian's. SOURCE: where the clone
# lies in it (default /srv/mpsagent; in /root/mpsagent no other user comes to it).
# DIRECTORY (default /var/cache/mpsagent-fresh) keeps a log of each run, and so that only the first run downloads: the
# bare Debian, the .deb files of apt, pip's wheels and NVIDIA's programs. Everything else is made anew for each run.
# COMMAND is run by `sh -e` in the clone instead of .ci/run; as another user than root, for instance:
#   -c 'make venv && useradd -m tester && chown -R tester . && setpriv --reuid tester --regid tester --init-groups .ci/run'
# Needs root, debootstrap, a Debian mirror and PyPI; podman and
# crun for containers. Says one line for each run; the status is 0 if each passed. It may be killed in any way: processes and
# mounts are those of namespaces that end with it.
set -euo pipefail

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
    env -i "${SETTINGS[@]}" chroot "$root" sh -ec "cd $SOURCE && $COMMAND"
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
        cd $SOURCE && exec env -i \"\$@\" sh -ec \"\$COMMAND\""
    podman --root "$root.podman" --runroot /run/podman --storage-driver vfs --cgroup-manager cgroupfs \
        --events-backend none run --rm --network host --cgroups disabled --env COMMAND "$@" --rootfs "$root" \
        sh -c "$inside" sh "${SETTINGS[@]}"
}

# Without devices that this machine's systemd would look after, and with the release's own /tmp.
in_booted() {
    root=$1
    mount --bind "$root" "$root"
    cd "$root"
    mount -t proc proc proc
    mount -t sysfs -o ro sysfs sys
    mount -t cgroup2 cgroup2 sys/fs/cgroup
    mount -t tmpfs -o mode=755 tmpfs dev
    for node in null zero full random urandom tty fuse net/tun; do
        [ -e "/dev/$node" ] || continue
        mkdir -p "$(dirname "dev/$node")"
        : >"dev/$node"
        mount --bind "/dev/$node" "dev/$node"
    done
    mkdir dev/shm dev/pts
    mount -t tmpfs -o mode=1777 tmpfs dev/shm
    mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
    ln -s pts/ptmx dev/ptmx
    ln -s /proc/self/fd dev/fd
    mount -t tmpfs -o mode=755 tmpfs run
    : >fresh.log
    mount --bind "$LOG" fresh.log
    printf '%s\n' "cd $SOURCE" "$(printf 'exec env -i%s sh -ec %q' "$(printf ' %q' "${SETTINGS[@]}")" "$COMMAND")" >fresh.sh
    cat >etc/systemd/system/fresh.service <<END
[Unit]
SuccessAction=exit-force
FailureAction=exit-force
[Service]
ExecStart=/bin/bash /fresh.sh
StandardOutput=append:/fresh.log
StandardError=inherit
TasksMax=infinity
Delegate=yes
END
    mkdir -p etc/systemd/system/multi-user.target.wants .outside
    ln -s ../fresh.service etc/systemd/system/multi-user.target.wants/
    pivot_root . .outside
    umount -l /.outside
    exec env -i container=fresh "${SETTINGS[1]}" /lib/systemd/systemd --system --unit=multi-user.target --show-status=no
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
    booted) in_booted "$3" ;;
    esac
    exit
fi

# Read to its end before it runs: the file may be changed meanwhile.
{
directory=/var/cache/mpsagent-fresh release=bookworm
export COMMAND=.ci/run SOURCE=/srv/mpsagent LOG
while getopts d:r:s:c: option; do
    case $option in
    d) directory=$OPTARG ;;
    r) release=$OPTARG ;;
    s) SOURCE=$OPTARG ;;
    c) COMMAND=$OPTARG ;;
    *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
[[ ${1:-} =~ ^[1-9][0-9]*$ ]] && [ $# -ge 2 ] || usage
times=$1
shift
for kind in "$@"; do [[ $kind =~ ^(chroot|container|confined|booted)$ ]] || usage; done

here=$(cd "$(dirname "$0")/.." && pwd)
# Root runs what is in it, and writes there: who made it first would be root.
[ -d "$directory" ] || [ -L "$directory" ] || mkdir -m 700 -p "$directory"
if [ -L "$directory" ] || [ "$(stat -c '%u %a' "$directory")" != "$(id -u) 700" ]; then
    echo "$directory must be a directory of user $(id -u) alone (mode 0700): remove it, or name another one (-d)" >&2
    exit 1
fi
mkdir -p "$directory/logs"
exec 9>"$directory/lock"
flock -n 9 || { echo "another one runs in $directory" >&2; exit 1; }
# Nothing is mounted here, whatever became of the last run: its mounts were of its own namespace.
child=
# Where a booted system may make groups of its own.
group=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/self/mounts)$(sed -n 's/^0:://p' /proc/self/cgroup)/mpsagent-fresh-$$
leave() {
    [ -z "$child" ] || kill -KILL "$child" 2>/dev/null || true
    [ ! -d "$group" ] || find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
    rm -rf "$directory"/run "$directory"/run.podman "$directory/$release"*.new
}
trap leave EXIT
trap 'exit 143' TERM HUP
trap 'exit 130' INT
leave

prepare() { # prepare BASE PACKAGES
    [ ! -d "$1" ] || return 0
    debootstrap --variant=minbase --include="$2" "$release" "$1.new" >"$directory/logs/debootstrap.log" 2>&1
    cp -L /etc/resolv.conf "$1.new/etc/resolv.conf"
    mkdir -p "$1.new/etc/ssl/certs" "$1.new/usr/local/share/ca-certificates"
    cp -rLT /etc/ssl/certs "$1.new/etc/ssl/certs"
    cp -rLT /usr/local/share/ca-certificates "$1.new/usr/local/share/ca-certificates"
    mv "$1.new" "$1"
}

status=0
for ((number = 1; number <= times; number++)); do
    for kind in "$@"; do
        leave
        base=$directory/$release packages=make
        if [ "$kind" = booted ]; then base=$base.booted packages=make,systemd-sysv,dbus,libpam-systemd; fi
        prepare "$base" "$packages"
        cp -aT "$base" "$directory/run"
        for cache in "${CACHES[@]}"; do
            mkdir -p "$directory/cache$cache" "$directory/run$cache"
            cp -aT "$directory/cache$cache" "$directory/run$cache"
        done
        git clone --quiet --depth 1 "file://$here" "$directory/run$SOURCE"
        LOG=$directory/logs/$(date -u +%m%d-%H%M)-$release-$kind-$number.log
        : >"$LOG"
        enter=()
        if [ "$kind" = booted ]; then
            mkdir -p "$group"
            # shellcheck disable=SC2016
            enter=(sh -c 'echo 0 >"$0/cgroup.procs"; exec "$@"' "$group")
        fi
        from=$SECONDS
        ended=0
        # In the background, so that this shell hears signals; without this shell it ends too.
        "${enter[@]}" setpriv --pdeathsig KILL unshare --mount --pid --ipc --cgroup --fork --kill-child -- \
            "$0" --inside "$kind" "$directory/run" </dev/null >>"$LOG" 2>&1 9>&- &
        child=$!
        wait "$child" || ended=$?
        child=
        [ "$ended" -eq 0 ] || status=1
        echo "$kind $number of $times: $(tail -n 1 "$LOG"); status $ended, $((SECONDS - from)) s in all; $LOG"
        for cache in "${CACHES[@]}"; do
            cp -auT "$directory/run$cache" "$directory/cache$cache"
        done
    done
done
exit "$status"
}
