#!/bin/bash
# Packs what campaigns/pod_stop.py runs on a machine without containerd or without a network: containerd 1.7 of Debian 13,
# and the runc of the Debian this runs on, in .gpu/containerd/ (about 25 MB). Needs apt, gcc and root.
# usage: [DIST=somewhere-else] containerd_packages.sh
set -euo pipefail
cd "$(dirname "$0")/.."
out=${DIST:-$PWD/.gpu/containerd}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work"/{lists,archives}/partial "$work"/{debs,root,bin}
echo 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main' >"$work/sources.list"
theirs=(-o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work")
(
    cd "$work/debs"
    apt-get -qq "${theirs[@]}" -o APT::Sandbox::User=root update
    apt-get -qq "${theirs[@]}" -o APT::Sandbox::User=root download containerd
    apt-get -qq -o APT::Sandbox::User=root download runc libseccomp2
)
for file in "$work"/debs/*.deb; do dpkg-deb --extract "$file" "$work/root"; done
cp "$work"/root/usr/bin/{containerd,containerd-shim-runc-v2,ctr} "$work"/root/usr/sbin/runc "$work/bin"
cp --dereference "$work"/root/usr/lib/x86_64-linux-gnu/libseccomp.so.2 "$work/bin"
# The program of a pod's own container, which no registry is asked for.
echo 'int pause(void); int main(void) { for (;;) pause(); }' | gcc -static -O -o "$work/bin/pause" -x c -
tar --create --numeric-owner --owner=0 --group=0 --directory "$work/bin" . | xz -T0 -9 >"$out/containerd.tar.xz"
(cd "$work/debs" && ls) >"$out/packages.txt"
ls -l "$out"
