#!/bin/bash
# Packs what campaigns/slurm_day.py runs on a machine that has no Slurm or no network: Debian's Slurm and munge with their
# libraries, as a tree of /usr, in .gpu/slurm/ (about 5 MB). On the Debian whose Slurm is to be taken; needs apt and root.
# usage: [DIST=somewhere-else] slurm_packages.sh
set -euo pipefail
cd "$(dirname "$0")/.."
out=${DIST:-$PWD/.gpu/slurm}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/debs" "$work/root" "$work/root/usr"
for path in bin sbin lib; do
    mkdir "$work/root/usr/$path"
    ln -s "usr/$path" "$work/root/$path" # packages of before /usr was one
done
packages=(
    slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2
    # what they need and a small system may not have; where it has them, its own are taken
    libmunge2 libhwloc15 liblz4-1 libnuma1 libreadline8 libdbus-1-3 libjson-c5 liblua5.1-0 libyaml-0-2 libbz2-1.0
    libgcrypt20 libgpg-error0 libsystemd0 libcap2 libbpf1 libelf1 libmnl0 libbsd0 libmd0
)
(cd "$work/debs" && apt-get -o APT::Sandbox::User=root download "${packages[@]}" >"$work/log" 2>&1) || { tail "$work/log" >&2 && exit 1; }
for file in "$work"/debs/*.deb; do
    dpkg-deb --fsys-tarfile "$file" | tar --extract --keep-directory-symlink --directory "$work/root"
done
cd "$work/root"
for name in slurmctld slurmd slurmstepd; do # what its installation makes
    ln -s "$name-wlm" "usr/sbin/$name"
done
rm -rf usr/share usr/lib/systemd usr/include
tar --create --numeric-owner --owner=0 --group=0 usr | xz -T0 -6 >"$out/new.tar.xz"
mv "$out/new.tar.xz" "$out/slurm.tar.xz"
(cd "$work/debs" && ls) >"$out/packages.txt"
ls -l "$out"
