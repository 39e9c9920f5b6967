#!/bin/bash
# Lays out everything that a package installs. usage: stage.sh DESTDIR PYTHON_VERSION...
#
# The libraries are those of requirements.lock, hash for hash, as wheels for each Python version named; one package so serves
# several releases. pystemd and lxml come from the distribution: they are bound to its libsystemd and libxml2.
# Needs .venv (make venv), and the package index unless PIP_NO_INDEX is set, when build/wheels has to have them all.
# ARCH: x86_64 or aarch64, this machine's without it.
set -euo pipefail
cd "$(dirname "$0")/.."
dest=$1
shift
arch=${ARCH:-$(uname -m)}
py=$PWD/.venv/bin/python
lib=$dest/usr/lib/mpsagent/lib

from_distribution='pystemd|lxml'
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
lock=$work/lock
# A requirement is its first line and the indented ones after it.
awk -v skip="^($from_distribution)==" '/^[A-Za-z]/ { keep = $0 !~ skip } /^#/ { next } keep' requirements.lock >"$lock"

platforms=()
for glibc in 2_36 2_35 2_34 2_31 2_28 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${glibc}_$arch"); done
for old in 2014 2010 1; do platforms+=(--platform "manylinux${old}_$arch"); done

wheels=build/wheels
mkdir -p "$lib" "$wheels"
for version in "$@"; do
    locked=(--quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: --implementation cp
        --python-version "$version" "${platforms[@]}" -r "$lock")
    [ -n "${PIP_NO_INDEX:-}" ] || flock "$wheels" "$py" -m pip download "${locked[@]}" --dest "$wheels"
    "$py" -m pip install --no-index --find-links "$wheels" "${locked[@]}" --no-compile --target "$lib/python$version"
    # Programs and tests of others, and what only a compiler reads.
    rm -rf "$lib/python$version"/{bin,example.py}
    find "$lib/python$version" \( -name '*.pyx' -o -name '*.pxd' -o -name '*.c' -o -name '*.h' -o -name '*.pyi' \) -delete
    find "$lib/python$version" -type d \( -name tests -o -name .hash \) -prune -exec rm -rf {} +
    # Which wheel it was matters; where pip put each file does not, and after the lines above it is not even true.
    find "$lib/python$version" \( -name RECORD -o -name REQUESTED -o -name INSTALLER -o -name direct_url.json \) -delete
    # The agent beside its libraries: a helper process finds both in one place.
    find mpsagent mpsagent_{bench,sim,tools} -type f ! -path '*/__pycache__/*' -print0 | xargs -0 cp --parents -t "$lib/python$version"
done

# What is carried, with versions and licences: a Python that sees these libraries and no others is asked.
install -d "$dest/usr/share/doc/mpsagent"
printf '#!/bin/sh\nPYTHONPATH=%q exec %q -S "$@"\n' "$lib/python$1" "$py" >"$work/python"
chmod +x "$work/python"
"$py" -m cyclonedx_py environment --pyproject pyproject.toml --output-reproducible \
    -o "$dest/usr/share/doc/mpsagent/sbom.cdx.json" "$work/python"

install -d "$dest/usr/bin"
"$py" - <<'PY' | while read -r name entry; do
import tomllib
for name, entry in tomllib.load(open("pyproject.toml", "rb"))["project"]["scripts"].items():
    if name != "mpsagent-kubernetes":  # it is for images (packaging/kubernetes), where its libraries are
        print(name, entry)
PY
    flags=-I
    [ "$name" = mpsagent ] || flags=-IS
    "$py" packaging/launcher.py "$entry" "$flags" >"$dest/usr/bin/$name"
    chmod 755 "$dest/usr/bin/$name"
done

# Small programs that units run.
program() { # program MODULE:FUNCTION PLACE
    install -d "$dest/$(dirname "$2")"
    "$py" packaging/launcher.py "$1" -IS >"$dest/$2"
    chmod 755 "$dest/$2"
}
program mpsagent.system.prepare:main usr/lib/mpsagent/mpsagent-directories
program mpsagent.system.control_start:main usr/lib/mpsagent/mpsagent-control-start
program mpsagent.system.compute_mode:main usr/lib/mpsagent/mpsagent-compute-mode
program mpsagent.system.terminal:main usr/lib/mpsagent/mpsagent-tell
program mpsagent.system.generator:main usr/lib/systemd/system-generators/mpsagent-generator
install -D -m755 systemd/mpsagent-open "$dest/usr/lib/mpsagent/mpsagent-open"

install -D -m644 -t "$dest/usr/lib/systemd/system" systemd/*.service systemd/*.socket
install -D -m644 systemd/nvidia-mps.service.d-mpsagent.conf "$dest/usr/lib/systemd/system/nvidia-mps.service.d/mpsagent.conf"
install -D -m644 systemd/mpsagent.sysusers.conf "$dest/usr/lib/sysusers.d/mpsagent.conf"
install -D -m644 systemd/mpsagent.tmpfiles.conf "$dest/usr/lib/tmpfiles.d/mpsagent.conf"
install -D -m644 systemd/mpsagent.preset "$dest/usr/lib/systemd/system-preset/80-mpsagent.preset"
install -D -m644 systemd/mpsagent.catalog "$dest/usr/lib/systemd/catalog/mpsagent.catalog"
install -D -m755 systemd/50-mpsagent.environment-generator "$dest/usr/lib/systemd/user-environment-generators/50-mpsagent"
install -D -m644 systemd/mpsagent.profile.sh "$dest/etc/profile.d/mpsagent.sh"
install -D -m644 systemd/mpsagent.logrotate "$dest/etc/logrotate.d/mpsagent"
install -d "$dest/etc/mpsagent"
# The same text, with its pointers set to where things are once installed.
sed -e 's|^#:schema \./|#:schema /usr/share/mpsagent/|' -e 's|docs/policy\.md describes|mpsagent-policy(5) describes|' \
    policies/policy.toml >"$dest/etc/mpsagent/policy.toml"
chmod 644 "$dest/etc/mpsagent/policy.toml"
install -d "$dest/etc/mpsagent/policy.d"
install -D -m644 -t "$dest/usr/share/doc/mpsagent/examples" policies/*.toml
install -D -m755 -t "$dest/usr/share/mpsagent/slurm" packaging/slurm/{prolog,epilog,task-prolog,health-check}
install -m644 -t "$dest/usr/share/mpsagent/slurm" packaging/slurm/common.sh
install -D -m755 -t "$dest/usr/share/mpsagent/containers" packaging/containers/mpsagent-runtime
install -D -m644 -t "$dest/usr/share/mpsagent/kubernetes" packaging/kubernetes/*.yaml
install -D -m644 -t "$dest/usr/share/mpsagent/prometheus" packaging/prometheus/*
install -D -m644 -t "$dest/usr/share/mpsagent/ansible" packaging/ansible/*
install -D -m644 policies/policy.schema.json "$dest/usr/share/mpsagent/policy.schema.json"
# README's names hold there, too: docs/ lies beside it.
install -D -m644 -t "$dest/usr/share/doc/mpsagent" README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md
sed -i 's|\bpolicies/|examples/|g' "$dest/usr/share/doc/mpsagent/README.md"
install -D -m644 -t "$dest/usr/share/doc/mpsagent/docs" docs/*.md
cp -r docs/measured docs/develop docs/pictures "$dest/usr/share/doc/mpsagent/docs/"
find "$dest/usr/share/doc/mpsagent/docs" -type f -exec chmod 644 {} +

for page in packaging/man/*.[1-8]; do
    install -D -m644 -t "$dest/usr/share/man/man${page##*.}" "$page"
done
install -d "$dest/usr/share/man/man5"
"$py" packaging/man/policy_page.py docs/policy.md >"$dest/usr/share/man/man5/mpsagent-policy.5"
find "$dest/usr/share/man" -type f -exec gzip -9n {} +
complete() { # complete SHELL PLACE
    install -d "$dest/$(dirname "$2")"
    .venv/bin/mpsagent-cli completion "$1" >"$dest/$2"
}
complete bash usr/share/bash-completion/completions/mpsagent-cli
complete zsh usr/share/zsh/vendor-completions/_mpsagent-cli
complete fish usr/share/fish/vendor_completions.d/mpsagent-cli.fish

find "$dest" -type d -exec chmod 755 {} +
find "$lib" -type f -exec chmod 644 {} +
