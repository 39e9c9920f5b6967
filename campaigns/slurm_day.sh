#!/bin/bash
# A day in Slurm on a GPU, in about five minutes, as root: ten jobs with totals and two pods; then at the same time, each
# with an MPS of its own, jobs that are stopped as docs/jobs.md says, and jobs that are stopped without.
#
#     campaigns/slurm_day.sh DIR [--sim]
#
# PyTorch; mpsagent importable; Slurm, or its packages in .gpu/slurm/slurm.tar.xz (slurm_packages.sh). In DIR:
# slurm-day.md, and slurm-day.tgz with everything. Exit status: how many parts were not as they should be.
set -uo pipefail
out=$(realpath "$1")
sim=${2:-}
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
all=$(mktemp -d)
failed=0

part() {
    # shellcheck disable=SC2086  # no word where it is empty
    timeout -k 20 230 python3 campaigns/slurm_day.py $sim --only "$1" --seconds "$2" --out "$all/$1" >"$all/$1.txt" 2>&1
}

part day 125 || failed=$((failed + 1))
pids=()
for name in stops_with stops_without; do
    part "$name" 200 &
    pids+=($!)
done
for pid in "${pids[@]}"; do
    wait "$pid" || failed=$((failed + 1))
done
cat "$all"/{day,stops_with,stops_without}/report.md >"$out/slurm-day.md"
tar -C "$all" -czf "$out/slurm-day.tgz" .
rm -rf "$all"
cat "$out/slurm-day.md"
echo "$failed parts were not as they should be"
exit "$failed"
