#!/bin/sh
# Installs the Debian packages that building the virtual environment needs; with `tests` also those without which tests
# are skipped, as far as they can be had. Quick when all are there. usage: system-packages.sh [PYTHON [tests]]
set -eu
python=${1:-python3}
missing=

want() { # want PACKAGE COMMAND...: PACKAGE is missing when COMMAND fails
    package=$1
    shift
    "$@" >/dev/null 2>&1 || missing="$missing $package"
}

want python3 "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'
want python3-venv "$python" -c 'import ensurepip, venv'
# pystemd comes as source only: it needs a compiler, Python's headers and libsystemd's.
want gcc command -v gcc
want python3-dev "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
want libc6-dev test -e /usr/include/stdlib.h
want pkg-config command -v pkg-config
want libsystemd-dev test -e /usr/include/systemd/sd-bus.h
want ca-certificates test -e /etc/ssl/certs/ca-certificates.crt
want procps command -v ps

install() { # install PACKAGE...: no service of theirs is enabled or started; the status is apt-get's
    echo "== apt-get install $*"
    "$(dirname "$0")/install-packages.sh" "$@"
}

if [ -n "$missing" ] && ! command -v apt-get >/dev/null; then
    echo "These Debian packages, or what your distribution calls them, are missing:$missing" >&2
    exit 1
fi
if [ -n "$missing" ] && [ "$(id -u)" -ne 0 ]; then
    echo "Debian packages are missing; as root: apt-get install -y$missing" >&2
    exit 1
fi
# shellcheck disable=SC2086  # a list of words on purpose
[ -z "$missing" ] || install $missing

# Only tests use these, and only as root; without them they are skipped, with the reason.
if [ "${2:-}" != tests ] || [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    exit 0
fi
missing=
want systemd command -v systemd-analyze
want systemd-sysv test -e /sbin/init
want dbus command -v dbus-daemon
want util-linux command -v unshare
want acl command -v setfacl
want mandoc command -v mandoc
want curl command -v curl
want tmux command -v tmux
want zsh command -v zsh
want fish command -v fish
want chromium command -v chromium
want podman command -v podman
want crun command -v crun
# Jobs of a real Slurm; its units start nothing without a slurm.conf.
want slurmctld command -v slurmctld
want slurmd command -v slurmd
want slurm-client command -v sbatch
want munge command -v munged
want iproute2 command -v ip
# The package of before is built from the history.
want git command -v git
# What `make release` needs.
want rpm command -v rpmbuild
want lintian command -v lintian
want rpmlint command -v rpmlint
want faketime command -v faketime
# The package is tried out in a systemd booted for it: what it depends on has to be there. It uses the system's Python.
want python3-pystemd /usr/bin/python3 -I -c 'import pystemd'
# shellcheck disable=SC2086
[ -z "$missing" ] || install $missing || for package in $missing; do
    install "$package" || echo "$package cannot be had: what needs it is not tested" >&2
done
