#!/bin/bash
# Builds dist/mpsagent_VERSION_ARCH.deb, one package for Debian 12 and 13. Needs no root. VERSION: another version than the
# project's. PYTHONS: the Python versions to carry libraries for. DIST: where to put it. COMPRESSION: xz, or none in a hurry.
set -euo pipefail
cd "$(dirname "$0")/../.."
. packaging/reproducible.sh
[ -x .venv/bin/cyclonedx-py ] || make venv
version=${VERSION:-$(.venv/bin/python -c 'import mpsagent; print(mpsagent.__version__)')}
arch=$(dpkg --print-architecture)
read -ra pythons <<<"${PYTHONS:-3.11 3.13}"
. packaging/pythons.sh

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 755 "$root"
packaging/stage.sh "$root" "${pythons[@]}"

doc=$root/usr/share/doc/mpsagent
install -D -m644 packaging/debian/copyright "$doc/copyright"
{
    echo "mpsagent ($version) unstable; urgency=medium"
    echo
    echo "  * What changed is in the project's history."
    echo
    echo " -- mpsagent maintainers <mpsagent@maintainers.invalid>  $(date -R -u -d "@$SOURCE_DATE_EPOCH")"
} | gzip -9n >"$doc/changelog.gz"
install -D -m644 packaging/debian/lintian-overrides "$root/usr/share/lintian/overrides/mpsagent"

install -d "$root/DEBIAN"
(cd "$root" && find etc -type f -printf '/%p\n' | sort) >"$root/DEBIAN/conffiles"
(cd "$root" && find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
sed -e "s/@VERSION@/$version/" -e "s/@ARCH@/$arch/" -e "s/@PYTHON@/$(debian_dependency)/" \
    -e "s/@SIZE@/$(find "$root" -printf '%y %s\n' | awk '{ size += $1 == "f" ? int(($2 + 1023) / 1024) : 1 } END { print size }')/" packaging/debian/control.in >"$root/DEBIAN/control"
for script in preinst postinst prerm postrm; do
    sed "s/@PYTHONS@/${pythons[*]}/" "packaging/debian/$script" >"$root/DEBIAN/$script"
    chmod 755 "$root/DEBIAN/$script"
done
install -m644 packaging/debian/triggers "$root/DEBIAN/triggers"
chmod 644 "$root/DEBIAN/conffiles" "$root/DEBIAN/md5sums" "$root/DEBIAN/control"

dist=${DIST:-dist}
mkdir -p "$dist"
# The one that was built last: a pattern names it.
rm -f "$dist"/mpsagent_*.deb
dpkg-deb --root-owner-group "-Z${COMPRESSION:-xz}" --build "$root" "$dist/mpsagent_${version}_$arch.deb" >/dev/null
ls -1 "$dist/mpsagent_${version}_$arch.deb"
