#!/bin/bash
# Builds dist/mpsagent-VERSION-1.ARCH.rpm, for Fedora and for enterprise releases with Python 3.12 or newer (pystemd comes from
# EPEL there). Needs rpmbuild (Debian's package `rpm` will do) and no root. PYTHONS: the Python versions to carry libraries
# for. DIST: where to put it.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v rpmbuild >/dev/null || { echo 'rpmbuild is missing (Debian: apt-get install rpm)' >&2; exit 1; }
. packaging/reproducible.sh
[ -x .venv/bin/cyclonedx-py ] || make venv
version=${VERSION:-$(.venv/bin/python -c 'import mpsagent; print(mpsagent.__version__)')}
read -ra pythons <<<"${PYTHONS:-3.12 3.13 3.14}"
. packaging/pythons.sh

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
packaging/stage.sh "$work/stage" "${pythons[@]}"
# Where this family of distributions looks.
install -d "$work/stage/usr/share/zsh"
mv "$work/stage/usr/share/zsh/vendor-completions" "$work/stage/usr/share/zsh/site-functions"
install -D -m644 LICENSE "$work/stage/usr/share/licenses/mpsagent/LICENSE"

sed -e "s|@VERSION@|$version|" -e "s|@STAGE@|$work/stage|" -e "s|@PYTHONS@|${pythons[*]}|" \
    -e "s|@LOWEST@|$lowest|" -e "s|@UPPER@|$upper|" packaging/rpm/mpsagent.spec.in >"$work/mpsagent.spec"
rpmbuild -bb --quiet --define "_topdir $work/rpm" --define "_rpmdir $work/out" --define '_build_id_links none' \
    --define '_buildhost localhost' --define 'use_source_date_epoch_as_buildtime 1' \
    --define 'clamp_mtime_to_source_date_epoch 1' "$work/mpsagent.spec"
dist=${DIST:-dist}
mkdir -p "$dist"
# The one that was built last: a pattern names it.
rm -f "$dist"/mpsagent-*.rpm
cp "$work"/out/*/*.rpm "$dist/"
ls -1 "$dist"/mpsagent-"$version"-*.rpm
