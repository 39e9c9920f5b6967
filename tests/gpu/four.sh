#!/bin/bash
# What a machine with four GPUs shows in ten minutes, in lanes beside each other; no GPU has two lanes:
#
#     tests/gpu/four.sh start DIR            begins all lanes and returns
#     tests/gpu/four.sh wait DIR SECONDS OUT waits for them, at most so long; what there is goes to OUT, one .tgz a lane
#
#     pause     GPU 0      two PyTorch trainings in slices of 20 s, PAUSE_SECONDS (600)
#     bench     GPU 1      mpsagent-cli bench, and bench --provision
#     disorder  GPU 2, 3   the scene of disorder: an instance for each of both, then on one: shared, together, apart, pause
#     reference GPU 2      after the disorder on both: the undisturbed training that pause compares with
#
# Root, PyTorch, mpsagent importable. No setting of a GPU is touched. Exit status of wait: how many lanes have not ended well.
set -uo pipefail
self=$(readlink -f "$0")
cd "$(dirname "$self")/../.."
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$PWD:${PYTHONPATH:-}"
export PATH="$PATH:/usr/local/nvidia/bin:/usr/local/cuda/bin"
lanes=(pause bench disorder reference)

pause() {
    export PAUSE_SECONDS=${PAUSE_SECONDS:-600} PAUSE_REFERENCE=$all/reference/out.txt
    tests/gpu/only.sh 0 python3 tests/gpu/gate.py --only pause --seconds 900 --out "$all/pause"
}

bench() {
    local command=(tests/gpu/only.sh 1 python3 -c "from mpsagent.interfaces.cli import main; main()" bench --yes)
    local status=0
    tests/gpu/only.sh 1 nvidia-smi
    "${command[@]}" --seconds 1 --html "$all/bench/bench.html" --svg "$all/bench/bench.svg" || status=1
    "${command[@]}" --seconds 2 --provision launches=2,train=1,nbody=1 || status=1
    "${command[@]}" --seconds 2 --modes off,together --workloads resize --processes 1,18 || status=1
    return $status
}

disorder() {
    local status=0
    mkdir "$all/disorder/two" "$all/disorder/one"
    tests/gpu/only.sh 2,3 tests/gpu/disorder.sh "$all/disorder/two" 190 0 \
        "--server own --instances each --seed ${SEED:-71} --clients 1000 --seconds 60 --drain 100" || status=1
    touch "$all/two-ended"
    tests/gpu/only.sh 3 tests/gpu/disorder.sh "$all/disorder/one" 180 0 \
        "--server shared --seed 72 --clients 1000 --seconds 60 --drain 100" \
        "--sharing together --seed 73 --clients 400 --seconds 30 --drain 60" \
        "--sharing apart --seed 74 --clients 200 --seconds 25 --drain 60" \
        "--server shared --action pause --seed 75 --clients 200 --seconds 25 --drain 90" || status=1
    return $status
}

reference() {
    until [ -e "$all/two-ended" ]; do sleep 1; done
    CUBLAS_WORKSPACE_CONFIG=:4096:8 CUDA_MPS_PIPE_DIRECTORY=/nonexistent \
        tests/gpu/only.sh 2 python3 tests/gpu/gate_train.py 1000000000 "${REFERENCE_SECONDS:-310}"
}

all=$2
case $1 in
start)
    for lane in "${lanes[@]}"; do
        mkdir -p "$all/$lane"
        setsid "$self" lane "$all" "$lane" </dev/null >"$all/$lane/out.txt" 2>&1 &
    done
    ;;
lane)
    "$3"
    echo $? >"$all/$3/status"
    ;;
wait)
    end=$((SECONDS + $3)) failed=0
    while [ $SECONDS -lt $end ] && [ "$(cat "$all"/*/status 2>/dev/null | wc -l)" -lt ${#lanes[@]} ]; do sleep 1; done
    for lane in "${lanes[@]}"; do
        status=$(cat "$all/$lane/status" 2>/dev/null || echo "not ended")
        [ "$status" = 0 ] || failed=$((failed + 1))
        echo "=== $lane: $status"
        tail -n 12 "$all/$lane/out.txt" | cut -c1-300
        tar -C "$all" -czf "$4/$lane.tgz" "$lane"
    done
    exit $failed
    ;;
esac
