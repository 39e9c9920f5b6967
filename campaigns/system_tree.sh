#!/bin/bash
# Packs what campaigns/system.py boots on a machine that has no systemd or no network: a small Debian and our package, in
# .gpu/ (about 45 MB); a Debian that is there already is kept. Needs root, debootstrap and the Debian archive.
# usage: [DIST=somewhere-else] system_tree.sh [bookworm | trixie]
set -euo pipefail
cd "$(dirname "$0")/.."
release=${1:-bookworm}
case $release in
bookworm) python=3.11 ;;
trixie) python=3.13 ;;
*) echo "system_tree.sh: bookworm or trixie, not $release" >&2 && exit 2 ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=${DIST:-$PWD/.gpu}
mkdir -p "$out"

tree() {
    packages=systemd,systemd-sysv,dbus,python3,python3-pystemd,procps
    debootstrap --variant=minbase --include="$packages" "$release" "$work/root" >"$work/log" || { tail "$work/log" >&2 && exit 1; }
    cd "$work/root"
    # Nobody reads, installs or translates anything in there.
    rm -rf usr/share/doc/* usr/share/man/* usr/share/info usr/share/locale/* usr/share/i18n usr/share/zoneinfo/right \
        var/cache/apt/* var/lib/apt/lists/* var/cache/debconf/*-old var/log/* usr/lib/x86_64-linux-gnu/gconv dev/*
    find . -name __pycache__ -type d -prune -exec rm -rf {} +
    tar --create --numeric-owner --one-file-system . | xz -T0 -6 >"$out/new.tar.xz"
    mv "$out/new.tar.xz" "$out/debian.tar.xz"
}
[ -e "$out/debian.tar.xz" ] || (tree)

rm -f "$out"/*.deb
PYTHONS=$python DIST=$work/package packaging/debian/build.sh >/dev/null
mv "$work"/package/*.deb "$out/mpsagent.deb"
ls -l "$out"
