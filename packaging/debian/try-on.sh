#!/bin/bash
# Installs the package on a clean Debian, uses it, upgrades it, removes and purges it, and shows what is left behind.
# usage: try-on.sh RELEASE DEB [ROOT]     RELEASE: bookworm, trixie. ROOT: a debootstrap tree to use instead of making one;
# it is not changed. Needs root, debootstrap and a Debian mirror.
set -euo pipefail
release=$1
deb=$(readlink -f "$2")
work=$(mktemp -d)
finish() {
    umount -R "$work/root" 2>/dev/null || true
    umount "$work" 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT
mount -t tmpfs tmpfs "$work"
mkdir "$work"/{base,upper,work,root}
base=${3:-$work/base}
[ -n "${3:-}" ] || debootstrap --variant=minbase "$release" "$base" >/dev/null
mount -t overlay overlay -o "lowerdir=$base,upperdir=$work/upper,workdir=$work/work" "$work/root"
mount -t proc proc "$work/root/proc"
mount --bind /dev "$work/root/dev"
cp /etc/resolv.conf "$work/root/etc/resolv.conf"
for certificates in /etc/ssl/certs /usr/local/share/ca-certificates; do
    [ -d "$work/root$certificates" ] || continue
    cp -rT "$certificates" "$work/root$certificates" 2>/dev/null || true
done

inside() { chroot "$work/root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive "$@"; }
step() { printf '== %s: %s\n' "$release" "$*"; }
tree() { (cd "$work/root" && { find etc usr var/lib/mpsagent run/mpsagent var/log/nvidia-mps 2>/dev/null || true; } | sort) >"$1"; }

cp "$deb" "$work/root/mpsagent.deb"
inside apt-get -qq update
step 'the packages it depends on'
inside apt-get -qq install -y --no-install-recommends python3 python3-pystemd systemd >/dev/null
rm -rf "$work/root/usr/lib/python3/dist-packages/__pycache__"
tree "$work/before"

step 'install'
inside apt-get -qq install -y --no-install-recommends /mpsagent.deb
inside getent group mpsagent-admin
inside mpsagent-cli --help >/dev/null
inside mpsagent --help >/dev/null
inside mpsagent-sim --help >/dev/null
inside mpsagent-gate --help >/dev/null
inside mpsagent-cli policy check
inside /usr/bin/python3 -I -c 'from pystemd.systemd1 import Manager, Unit'

step 'upgrade keeps the policy'
echo '# mine' >>"$work/root/etc/mpsagent/policy.toml"
inside dpkg -i /mpsagent.deb >/dev/null
tail -n 1 "$work/root/etc/mpsagent/policy.toml" | grep -qx '# mine'

step 'remove, then purge'
inside apt-get -qq remove -y mpsagent >/dev/null
test -e "$work/root/etc/mpsagent/policy.toml"
inside apt-get -qq purge -y mpsagent >/dev/null
tree "$work/after"
if ! diff "$work/before" "$work/after"; then
    echo 'purge left something behind, or took something along' >&2
    exit 1
fi
if inside getent group mpsagent-admin; then
    echo 'purge left the group behind' >&2
    exit 1
fi
step 'as before'
