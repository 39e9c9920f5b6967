#!/bin/bash
# What a machine with several GPUs shows, in lanes beside each other, each on GPUs of its own:
#
#     campaigns/lanes.sh start DIR LANE ...   begins these and returns
#     campaigns/lanes.sh wait DIR SECONDS OUT waits for them, at most so long; what there is goes to OUT, one .tgz a lane
#
# With four GPUs, beside each other in 11 minutes:
#     pause     GPU 0      two PyTorch trainings in slices of 20 s, PAUSE_SECONDS (600)
#     bench     GPU 1      mpsagent-cli bench
#     disorder  GPU 2, 3   the scene of disorder: an instance for each; then on one: shared, together, apart, pause
#     reference GPU 2      after the disorder on both: the undisturbed training that pause compares with
#
# With two, in 9 minutes:
#     work      GPU 0      sharing modes (modes.py) with PyTorch, what agent and gate cost
#     seeds     GPU 1      the seeds of the field; then limits of users at once
#     cores     none       make bench's hand-over, start and requests on the simulator, where there are cores enough
#
# With four, in 7 minutes:
#     trial     GPU 0      the fault isolation trial
#     service   GPU 1, 2   placement; then Slurm's day beside totals, leases and programs outside MPS
#     shared    GPU 3      the scene of disorder with a shared server
#
# With two, in 6 minutes:
#     outside   GPU 0      programs outside MPS, Slurm's paused jobs, 80 faults
#     programs  GPU 1      mpsagent-cli bench with PyTorch, rules for cutting the GPU, programs of one's own (bench.sh)
#
# With four, in 9 minutes, the default and ends on a busy GPU (the driver makes contexts slowly then):
#     ends0     GPU 0      a rule for ends; ends by mpsagent on a busy GPU
#     ends1     GPU 1      the same
#     common    GPU 2      launchers and debuggers; ends by turns and by idle_timeout; JAX without mpsagent
#     default   GPU 3      what the default costs, on 16 processors of its own
#
# With two, in 9 minutes, disorder of 400 clients in each way of sharing:
#     own       GPU 0      turns with a server for each user; then with one server for all
#     users     GPU 1      a daemon for each user; then all together; then turns that end in a pause
#     world     none       the seeded world for WORLD_SECONDS (400) on all processors but 16
#
# With four, in 10 minutes: default and world, and then
#     plain     GPU 0 to 2 Ctrl-C, SIGTERM and SIGKILL of a user's program next to others of the same user, behind the gate
#
# Root, PyTorch, mpsagent importable; for service and outside also .gpu (system_tree.sh, slurm_packages.sh). No setting of a GPU is
# touched. Exit status of wait: how many lanes have not ended well.
set -uo pipefail
self=$(readlink -f "$0")
cd "$(dirname "$self")/.."
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$PWD:${PYTHONPATH:-}"
export PATH="$PATH:/usr/local/nvidia/bin:/usr/local/cuda/bin"
cli=(python3 -c "from mpsagent.cli.main import main; main()")

pause() {
    export PAUSE_SECONDS=${PAUSE_SECONDS:-600} PAUSE_REFERENCE=$all/reference/out.txt
    campaigns/only.sh 0 python3 campaigns/gate.py --only pause --seconds 900 --out "$all/pause"
}

bench() {
    local command=(campaigns/only.sh 1 "${cli[@]}" bench --yes) status=0
    campaigns/only.sh 1 nvidia-smi
    "${command[@]}" --seconds 1 --html "$all/bench/bench.html" --svg "$all/bench/bench.svg" || status=1
    return $status
}

disorder() {
    local status=0
    mkdir "$all/disorder/two" "$all/disorder/one"
    campaigns/only.sh 2,3 campaigns/disorder.sh "$all/disorder/two" 190 \
        "--server own --instances each --seed ${SEED:-71} --clients 1000 --seconds 60 --drain 100" || status=1
    touch "$all/two-ended"
    campaigns/only.sh 3 campaigns/disorder.sh "$all/disorder/one" 180 \
        "--server shared --seed 72 --clients 1000 --seconds 60 --drain 100" \
        "--sharing together --seed 73 --clients 400 --seconds 30 --drain 60" \
        "--sharing apart --seed 74 --clients 200 --seconds 25 --drain 60" \
        "--server shared --action pause --seed 75 --clients 200 --seconds 25 --drain 90" || status=1
    return $status
}

reference() {
    until [ -e "$all/two-ended" ]; do sleep 1; done
    CUBLAS_WORKSPACE_CONFIG=:4096:8 CUDA_MPS_PIPE_DIRECTORY=/nonexistent \
        campaigns/only.sh 2 python3 campaigns/gate_train.py 1000000000 "${REFERENCE_SECONDS:-310}"
}

work() {
    local status=0
    campaigns/only.sh 0 timeout -k 20 330 python3 campaigns/modes.py --only throughput,latency --out "$all/work" || status=1
    campaigns/only.sh 0 timeout -k 20 170 python3 campaigns/gate.py --only cost --out "$all/work/cost" || status=1
    return $status
}

seeds() {
    local status=0
    campaigns/only.sh 1 timeout -k 20 360 python3 benchmarks/seeds/run.py --out "$all/seeds" || status=1
    campaigns/only.sh 1 timeout -k 20 300 python3 campaigns/run.py --only limits,together --out "$all/seeds/limits" || status=1
    return $status
}

trial() {
    local status=0
    campaigns/only.sh 0 timeout -k 20 "$((${TRIAL_SECONDS:-270} + 75))" python3 campaigns/fault_trial.py --gpus 1 \
        --faults 1000 --bare-faults 100 --each 12 --seconds "${TRIAL_SECONDS:-270}" --out "$all/trial" || status=1
    return $status
}

service() {
    local status=0 pids=()
    campaigns/only.sh 1,2 timeout -k 20 120 python3 campaigns/modes.py --gpu 0,1 --only placement \
        --out "$all/service/placement" || status=1
    campaigns/only.sh 1 timeout -k 20 250 python3 campaigns/slurm_day.py --out "$all/service/slurm" &
    pids+=($!)
    campaigns/only.sh 2 timeout -k 20 200 python3 campaigns/run.py --only leases,totals --out "$all/service/totals" || status=1
    campaigns/only.sh 2 timeout -k 20 110 python3 campaigns/gate.py --only outside --out "$all/service/outside" || status=1
    wait "${pids[@]}" || status=1
    return $status
}

outside() {
    local status=0
    campaigns/only.sh 0 timeout -k 10 150 python3 campaigns/gate.py --only outside --out "$all/outside" || status=1
    campaigns/only.sh 0 timeout -k 10 100 python3 campaigns/slurm_day.py --only paused --seconds 90 --out "$all/outside/slurm" || status=1
    campaigns/only.sh 0 timeout -k 10 110 python3 campaigns/fault_trial.py --only agent --faults 80 --each 20 \
        --seconds 40 --out "$all/outside/trial" || status=1
    return $status
}

programs() {
    campaigns/only.sh 1 campaigns/bench.sh "$all/programs"
}

shared() {
    campaigns/only.sh 3 campaigns/disorder.sh "$all/shared" 290 \
        "--server shared --seed 82 --clients 1000 --seconds 60"
}

cores() {
    python3 benchmarks/bench.py --only handover --only start --only requests --out "$all/cores/bench.md"
}

cores=$(nproc --all)

beside_default() { taskset -cp "0-$((cores - 17))" $$; } # this lane leaves 16 processors to it

ends() { # GPU, directory
    beside_default
    campaigns/only.sh "$1" timeout -k 10 160 python3 campaigns/busy_ends.py --seconds 130 --only rules \
        --rules drained-all10000,all10000 --victims torch:exit,graph:exit,torch:stay --out "$2/rules"
    campaigns/only.sh "$1" timeout -k 10 265 python3 campaigns/busy_ways.py --seconds 225 --out "$2/ways"
}

ends0() { ends 0 "$all/ends0"; }

ends1() { ends 1 "$all/ends1"; }

common() {
    local status=0 place=$all/common
    beside_default
    campaigns/only.sh 2 timeout -k 10 180 python3 campaigns/launchers.py --out "$place" || status=1
    campaigns/only.sh 2 timeout -k 10 190 python3 campaigns/busy_ways.py --turns --seconds 150 --out "$place/ways" || status=1
    campaigns/only.sh 2 timeout -k 10 90 python3 campaigns/busy_ends.py --seconds 60 --only people --victims jax:exit \
        --out "$place/people"
    return $status
}

default() {
    campaigns/only.sh 3 taskset -c "$((cores - 16))-$((cores - 1))" python3 campaigns/default_cost.py --out "$all/default"
}

own() {
    mkdir "$all/own/disorder"
    campaigns/only.sh 0 campaigns/disorder.sh "$all/own/disorder" 215 \
        "--server own --seed ${SEED:-351} --clients 400 --seconds 50 --drain 150" \
        "--server shared --seed ${SEED:-352} --clients 400 --seconds 50 --drain 150"
}

users() {
    mkdir "$all/users/disorder"
    campaigns/only.sh 1 campaigns/disorder.sh "$all/users/disorder" 215 \
        "--sharing apart --seed ${SEED:-354} --clients 400 --seconds 50 --drain 150" \
        "--sharing together --seed ${SEED:-353} --clients 400 --seconds 50 --drain 150" \
        "--server shared --action pause --seed ${SEED:-355} --clients 250 --seconds 40 --drain 150"
}

plain() {
    until [ ! -e "$all/default" ] || [ -e "$all/default/status" ]; do sleep 1; done
    beside_default
    timeout -k 10 "$((${PLAIN_SECONDS:-240} + 50))" python3 campaigns/busy_ways.py --gpus 3 \
        --ways plain-int,plain-term,plain-kill --works "${PLAIN_WORKS:-}" --crowd light --pool 6 \
        --seconds "${PLAIN_SECONDS:-240}" --out "$all/plain"
}

world() {
    taskset -c "0-$((cores - 17))" python3 -m tests.world --jobs "$((cores - 16))" --seconds "${WORLD_SECONDS:-400}" \
        --out "$all/world/stories"
}

all=$2
case $1 in
start)
    shift 2
    for lane; do
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
    lanes=("$all"/*/)
    while [ $SECONDS -lt $end ] && [ "$(cat "$all"/*/status 2>/dev/null | wc -l)" -lt ${#lanes[@]} ]; do sleep 1; done
    for lane in "${lanes[@]}"; do
        lane=$(basename "$lane")
        status=$(cat "$all/$lane/status" 2>/dev/null || echo "not ended")
        [ "$status" = 0 ] || failed=$((failed + 1))
        echo "=== $lane: $status"
        tail -n 12 "$all/$lane/out.txt" | cut -c1-300
        tar -C "$all" -czf "$4/$lane.tgz" "$lane"
    done
    exit $failed
    ;;
esac
