#!/bin/bash
# A hostile day in a call: runs hostile.py once for each list of words, at the same time, and prints what came of each.
#
#     campaigns/hostile.sh DIR SECONDS WORDS... [+ WORDS...]
#
# In DIR: hostile.tgz with tables, JSON and logs of each. Root, 16 cores; a GPU where no --sim is said; mpsagent importable.
# Exit status: how many of the runs had a row that is not held.
set -uo pipefail
out=$1 seconds=$2
shift 2
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
unset OUT
mkdir -p "$out"
all=$(mktemp -d)
pids=() words=() number=0
begin() {
    number=$((number + 1))
    timeout -k 20 $((seconds + 60)) "${PYTHON:-python3}" campaigns/hostile.py --seconds "$seconds" --out "$all/$number" \
        "${words[@]}" >"$all/$number.txt" 2>&1 &
    pids+=($!)
    echo "$number: ${words[*]}"
    words=()
}
for word in "$@"; do
    if [ "$word" = + ]; then begin; else words+=("$word"); fi
done
begin
failed=0
for pid in "${pids[@]}"; do
    wait "$pid" || failed=$((failed + 1))
done
tail -n $((70 / number)) "$all"/*.txt
tar -C "$all" -czf "$out/hostile.tgz" .
rm -rf "$all"
exit "$failed"
