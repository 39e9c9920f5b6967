#!/bin/bash
# `mpsagent-cli bench` on a GPU, in about four minutes:
#
#     campaigns/bench.sh DIR
#
# PyTorch's workloads without MPS and together, programs of one's own (clients that compute 0.2 s and say nothing, and one that tells of
# its steps), and three of ours. Root, a GPU, mpsagent importable, PyTorch for the first python3 in PATH. In DIR: each run's table; a time
# stands before each line of progress. No setting of a GPU is touched, nothing is left behind. Exit status: how many of the three did not
# measure everything.
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
    timeout -k 10 "$2" python3 -m mpsagent.cli.main --socket /nonexistent bench --yes --anyway "${@:3}" \
        2> >(while IFS= read -r line; do echo "$(date +%T.%1N) $line"; done) | tee "$out/bench-$1.txt"
    [ "${PIPESTATUS[0]}" = 0 ] || failed=$((failed + 1))
}

bench torch 220 --modes off,together --workloads resnet,resnet16,mnist --processes 1,8 --seconds 3 --python "$(command -v python3)"
bench own 80 --program "runs=/usr/bin/python3 -S -E $own/cuda_client.py work 20" --program "tells=/usr/bin/python3 $own/steps.py" \
    --modes off,together --processes 1,2 --seconds 4
bench three 120 --modes off,together,apart --workloads block,nbody,train --processes 1,4,16 --seconds 2
echo "$failed of 3 did not measure everything"
exit "$failed"
