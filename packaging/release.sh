#!/bin/bash
# Builds wheel, .deb and .rpm in $DIST (dist) twice, and prints their checksums. The second time it is another directory, user,
# umask, locale, zone and year, and there is no network: only the locked wheels that the first build has fetched. Fails where the
# two differ by a byte, or lintian or rpmlint finds an error. Needs git, rpm, lintian, rpmlint, faketime, namespaces; no root.
set -euo pipefail
cd "$(dirname "$0")/.."
DIST=$(realpath -m "${DIST:-dist}")
again=$(mktemp -d)
trap 'rm -rf "$again"' EXIT
mkdir -p "$DIST"
rm -f "$DIST"/*.{whl,deb,rpm}
build() { "$@" make --silent --old-file .venv/.up-to-date wheel deb rpm >/dev/null; }

make venv
export DIST
build env

git ls-files -z | (umask 077 && xargs -0 cp --parents -t "$again")
mkdir "$again/build"
ln -s "$PWD/.venv" "$again"
ln -s "$PWD/build/wheels" "$again/build"
export GIT_DIR=$PWD/.git
(
    cd "$again"
    umask 077
    DIST=$again/dist PIP_NO_INDEX=1 LC_ALL=C TZ=Asia/Tokyo build \
        unshare --user --map-user=1234 --map-group=1234 --net faketime -f '+1000d'
)
same=true
for file in "$DIST"/*.{whl,deb,rpm}; do
    cmp "$file" "$again/dist/${file##*/}" || same=false
done
$same || { echo 'The two builds differ; diffoscope shows where.' >&2; exit 1; }
lintian --fail-on error "$DIST"/*.deb
rpmlint -c packaging/rpm/rpmlint.toml "$DIST"/*.rpm
cd "$DIST"
sha256sum -- *.{whl,deb,rpm} | tee SHA256SUMS
