#!/bin/bash
# The tests of this directory with the Slurm of Debian 13 (24.11), beside everything else of this machine. As root.
# usage: debian13.sh [TREE]     TREE: a tree of trixie with slurmctld, slurmd, slurm-client, munge, iproute2 and python3;
# made with debootstrap from a Debian mirror where it is not there, without TREE a temporary one.
set -euo pipefail
cd "$(dirname "$0")/../.."
tree=${1:-}
if [ -z "$tree" ]; then
    tree=$(mktemp -d)
    trap 'rm -rf "$tree"' EXIT
fi
if [ ! -x "$tree/usr/sbin/slurmd" ]; then
    debootstrap --variant=minbase --include=slurmctld,slurmd,slurm-client,munge,iproute2,procps,python3 trixie "$tree" >/dev/null
fi
chroot "$tree" slurmd -V
MPSAGENT_SLURM_TREE=$(readlink -f "$tree") .venv/bin/python -m pytest -q tests/slurm --durations=0
