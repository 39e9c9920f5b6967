#!/bin/bash
# Everything that is shown on real MPS, in one run of about six minutes on a machine with 16 cores or more:
#
#     campaigns/session.sh DIR
#
# The scene of disorder on all GPUs, by turns with an instance for each GPU and at the same time all users together; then
# the scenes of run.py with small counts in five lanes, and a service's day in a booted systemd beside them; then ResNet-50
# alone. Root, a GPU, PyTorch; mpsagent importable; the package in .gpu/mpsagent.deb (system_tree.sh). In DIR: session.tgz with all output, and what each part says at its end. No setting of
# a GPU is touched. Exit status: how many parts were not as they should be.
set -uo pipefail
out=$1
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
all=$(mktemp -d)
failed=0

pids=()
mkdir "$all/turns" "$all/together"
campaigns/disorder.sh "$all/turns" 180 "--server own --instances each --seed ${SEED:-61} --clients ${CLIENTS:-700} --seconds 45 --drain 100" &
pids+=($!)
campaigns/disorder.sh "$all/together" 180 "--sharing together --seed ${SEED:-62} --clients ${CLIENTS:-700} --seconds 45 --drain 100" &
pids+=($!)
for pid in "${pids[@]}"; do
    wait "$pid" || failed=$((failed + 1))
done

lanes=(
    limits,starvation,whole-program,rank,jobs,leases
    change,together,totals,drain,denied
    ladder,sigkill,fault,full,dying
    hang,dead-waiter
)
pids=()
for number in "${!lanes[@]}"; do
    timeout -k 20 190 python3 campaigns/run.py --quick --only "${lanes[$number]}" --out "$all/scenes-$number" >"$all/scenes-$number.txt" 2>&1 &
    pids+=($!)
done
timeout -k 20 190 python3 campaigns/system.py --out "$all/system" >"$all/system.txt" 2>&1 &
pids+=($!)
for pid in "${pids[@]}"; do
    wait "$pid" || failed=$((failed + 1))
done
grep -hE '^(kept|NOT KEPT|skipped|well|WRONG|[0-9]+ of)' "$all"/scenes-*.txt "$all/system.txt" | cut -c1-230

timeout -k 20 150 python3 campaigns/gate.py --only cost --seconds 140 --out "$all/gate" 2>&1 | tee "$all/gate.txt" | grep ANSWER
[ "${PIPESTATUS[0]}" = 0 ] || failed=$((failed + 1))
tar -C "$all" -czf "$out/session.tgz" . && rm -rf "$all"
echo "$failed parts were not as they should be"
exit "$failed"
