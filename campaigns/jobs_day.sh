#!/bin/bash
# What jobs and pods must show on a GPU, in four and a half minutes at most, as root:
#
#     campaigns/jobs_day.sh DIR [--sim]
#
# A day in Slurm with pods of containerd (slurm_day.py), and beside it what `mpsagent-cli run` costs; then what two users
# make of the GPU beside NVML's figures (gate.py, use); then the rows of the field's table with JPEG by multiprocessors.
# PyTorch, grpcio and mpsagent importable; .gpu/slurm and .gpu/containerd (slurm_packages.sh, containerd_packages.sh).
# In DIR: jobs-day.tgz with everything. Exit status: how many parts were not as they should be.
set -uo pipefail
out=$(realpath "$1")
sim=${2:-}
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
all=$(mktemp -d)
failed=0
SECONDS=0

part() { # name, seconds, command
    local since=$SECONDS
    # shellcheck disable=SC2086  # no word where it is empty
    timeout -k 15 "$(($2 + 5))" python3 "${@:3}" $sim --out "$all/$1" >"$all/$1.txt" 2>&1
    local status=$?
    echo "== $1: exit status $status after $((SECONDS - since)) s"
    return $status
}

part cost 40 campaigns/run_cost.py --seconds 30 &
cost=$!
part day 125 campaigns/slurm_day.py --only day --seconds 125 || failed=$((failed + 1))
wait $cost || failed=$((failed + 1))
part use 70 campaigns/gate.py --only use --quick --seconds 70 || failed=$((failed + 1))
left=$((250 - SECONDS))
part seeds $((left + 10)) benchmarks/seeds/run.py --seconds 1.5 --limit "$left" --only jpeg-own jpeg-gpu || failed=$((failed + 1))

tar -C "$all" -czf "$out/jobs-day.tgz" .
grep -v '^#' "$all/cost.txt"
sed -n '/^| step/,$p' "$all/day/report.md" | grep -v -e '^\[{' -e '^$' -e '^    slurmctld' -e '^    munged' | cut -c1-260 | head -60
grep -E '^(##|- PROBLEM|\|)|energy of both' "$all/use/gate.md" | head -20
grep -vE '^simulated|^$' "$all/seeds.txt" | awk '/^ /{printf "  %s", $1 ": " $2 " " $3 " " $4; next} {printf "\n%s", $0} END {print ""}' | cut -c1-250
rm -rf "$all"
echo "$failed parts were not as they should be, $SECONDS s"
exit "$failed"
