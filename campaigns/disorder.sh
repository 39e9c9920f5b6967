#!/bin/bash
# The scene of disorder on the real MPS of this machine:
#
#     campaigns/disorder.sh DIR SECONDS "--server shared --seed 23 --clients 1000" ...
#
# One run for each argument, each bounded by SECONDS. In DIR: one .txt and one .tgz (verdict, records, logs, policy,
# answers of the driver) for each. Root and a GPU. No setting of a GPU is touched. Exit status: how many runs were not good.
set -uo pipefail
out=$1 most=$2
shift 2
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
failed=0
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
