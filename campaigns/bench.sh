#!/bin/bash
# `mpsagent-cli bench` on a GPU, in about five minutes:
#
#     campaigns/bench.sh DIR
#
# PyTorch's workloads without MPS and together, the rules for cutting the GPU on a mix of ours and on programs of one's own (clients
# that compute 0.2 s and say nothing, and one that tells of its steps), and three of ours again. Root, a GPU, mpsagent importable,
# PyTorch for the first python3 in PATH. In DIR: each run's table, JSON and page; a time stands before each line of progress. No setting of a GPU is
# touched, nothing is left behind. Exit status: how many of the four did not measure everything.
set -uo pipefail
out=$1
cd "$(dirname "$0")/.."
own=$(mktemp -d)
trap 'rm -rf "$own"' EXIT
chmod 755 "$own"
install -m 644 tests/conformance/cuda_client.py "$own"
cat >"$own/steps.py" <<'PY'
import ctypes, itertools
import cuda_client
cuda = cuda_client.Driver()
cuda.call("cuInit", ctypes.c_uint(0))
cuda.primary_context(cuda.device(0)[1])
for number in itertools.count(1):
    if cuda.launch(b"spin", 2_000_000) or cuda.synchronize():
        raise SystemExit("the GPU is lost")
    if number % 20 == 0:
        print("steps", number, flush=True)
PY
chmod 644 "$own/steps.py"
failed=0

bench() { # name, seconds at most, options
    echo "== $1: ${*:3}"
    timeout -k 10 "$2" python3 -m mpsagent.cli.main --socket /nonexistent bench --yes --anyway --html "$out/bench-$1.html" "${@:3}" \
        2> >(while IFS= read -r line; do echo "$(date +%T.%1N) $line"; done) | tee "$out/bench-$1.txt"
    [ "${PIPESTATUS[0]}" = 0 ] || failed=$((failed + 1))
}

bench mix 80 --provision launches=2,train,nbody --seconds 3
bench torch 220 --modes off,together --workloads resnet,resnet16,mnist --processes 1,8 --seconds 3 --python "$(command -v python3)"
bench own 80 --program "runs=/usr/bin/python3 -S -E $own/cuda_client.py work 20" --program "tells=/usr/bin/python3 $own/steps.py" \
    --provision "runs*2=1,tells=2,train=1" --seconds 4
bench three 120 --modes off,together,apart --workloads block,nbody,train --processes 1,4,16 --seconds 2
echo "$failed of 4 did not measure everything"
exit "$failed"
