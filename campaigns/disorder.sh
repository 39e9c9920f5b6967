#!/bin/bash
# The scene of disorder on the real MPS of this machine, and before it clients killed around their hand-over:
#
#     campaigns/disorder.sh DIR SECONDS ROUNDS "--server shared --seed 23 --clients 1000" ...
#
# ROUNDS times 100 killed clients in each form, with the gate and without (handover_deaths.py), then one run for each argument, each bounded by
# SECONDS. In DIR: one .txt and one .tgz (verdict, records, logs, policy, answers of the driver) for each. Root and a GPU.
# No setting of a GPU is touched. Exit status: how many runs were not good.
set -uo pipefail
out=$1 most=$2 rounds=$3
shift 3
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
failed=0
for round in $(seq "$rounds"); do
    # The same without the gate, for comparison: what does MPS itself stand?
    for only in clients bare; do
        place=$(mktemp -d)
        timeout -k 20 60 python3 campaigns/handover_deaths.py --only "$only" --seconds 20 --seed "$round" --out "$place" ||
            failed=$((failed + 1))
        sed "s/^/$only $round: /" "$place/handover-deaths.txt" >>"$out/deaths.txt"
        rm -rf "$place"
    done
done
number=0
for arguments; do
    number=$((number + 1))
    place=$(mktemp -d)
    # shellcheck disable=SC2086 # several words on purpose
    timeout -k 20 "$most" python3 -m tests.disorder.run --real $arguments --out "$place" 2>&1 | tee "$out/run-$number.txt" | tail -n 60
    [ "${PIPESTATUS[0]}" = 0 ] || failed=$((failed + 1))
    tar -C "$place" -czf "$out/run-$number.tgz" . && rm -rf "$place"
done
exit "$failed"
