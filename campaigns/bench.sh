#!/bin/bash
# `mpsagent-cli bench` on a GPU, in about five minutes:
#
#     campaigns/bench.sh DIR
#
# PyTorch's workloads without MPS and together, the rules for cutting the GPU on a mix of ours, and three of ours again. Root, a GPU,
# mpsagent importable, PyTorch for the first python3 in PATH. In DIR: each run's table, JSON and page; a time stands before each line of progress. No setting of a GPU is
# touched, nothing is left behind. Exit status: how many of the three did not measure everything.
set -uo pipefail
out=$1
cd "$(dirname "$0")/.."
failed=0

bench() { # name, seconds at most, options
    echo "== $1: ${*:3}"
    timeout -k 10 "$2" python3 -m mpsagent.cli.main --socket /nonexistent bench --yes --anyway --html "$out/bench-$1.html" "${@:3}" \
        2> >(while IFS= read -r line; do echo "$(date +%T.%1N) $line"; done) | tee "$out/bench-$1.txt"
    [ "${PIPESTATUS[0]}" = 0 ] || failed=$((failed + 1))
}

bench mix 80 --provision launches=2,train,nbody --seconds 3
bench torch 220 --modes off,together --workloads resnet,resnet16,mnist --processes 1,8 --seconds 3 --python "$(command -v python3)"
bench three 120 --modes off,together,apart --workloads block,nbody,train --processes 1,4,16 --seconds 2
echo "$failed of 3 did not measure everything"
exit "$failed"
