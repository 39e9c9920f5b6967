# shellcheck shell=sh
# What the hooks of Slurm share. Settings of a site stand in /etc/mpsagent/slurm.conf, in sh, under the same names.
# shellcheck disable=SC2034  # each hook reads some of these
PATH=/usr/sbin:/usr/bin:/sbin:/bin
client=mpsagent-cli # with options, if it needs any
memory=             # "share": a job with N % of the threads has N % of the memory, too; empty: its user's limit
processes=          # a number: so many processes of a job have its share together, each an equal part, and the next one waits;
                    # "$SLURM_JOB_NTASKS": its tasks; empty: each process has the job's share
shards=             # how many gres/shard each GPU has: a job with N of them on G GPUs has N/(shards*G) of each
gpustat=            # "/run/gpustat": which job a GPU has, in a file for each, as jobstats reads it
dcgm=               # a directory: which jobs each GPU has, as dcgm-exporter reads it with --hpc-job-mapping-dir
gpus=/run/mpsagent-slurm.gpus # the same for the hooks, where one of the two is wanted
longest=31d         # a lease whose epilog never ran ends then, if no health check has found it before
patience=20         # seconds that an agent which does not answer is asked again: a restart must fit
answer=5            # seconds for one answer
comment=AdminComment # or "Comment": the health check writes there why a job waits and how long it has; empty: nowhere
comments=/run/mpsagent-slurm.comments # what it has written
proctrack=          # ProctrackType of slurm.conf; empty: slurmctld is asked
known=/run/mpsagent-slurm.proctrack # what it has answered
node=${SLURMD_NODENAME:-$(hostname -s)}
job=${SLURM_JOB_ID:-}
uid=${SLURM_JOB_UID:-}
name=slurm-$job # of the job's lease
# The job's cgroup as slurmstepd makes it: proctrack/cgroup with version 2, or version 1.
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    cgroup="/system.slice/*slurmstepd.scope/job_$job"
else
    cgroup="/slurm*/uid_$uid/job_$job"
fi
settings=${MPSAGENT_SLURM_SETTINGS:-/etc/mpsagent/slurm.conf}
set +u # settings may name a variable that not every hook has, such as SLURM_JOB_NTASKS
# shellcheck disable=SC1090
[ ! -r "$settings" ] || . "$settings"
set -u

# ask WORD...: mpsagent-cli, again and again while the agent does not answer; what it says is then in $said.
ask() {
    end=$(($(date +%s) + patience))
    while :; do
        # shellcheck disable=SC2086  # options of the client are words
        said=$(timeout -k 1 "$answer" $client "$@" 2>&1 </dev/null) && return 0
        status=$?
        case $status in
        3) ;;
        124 | 137) said="mpsagent-cli $1 had no answer within $answer s" ;;
        *) return "$status" ;;
        esac
        [ "$(date +%s)" -lt "$end" ] || return "$status"
        sleep 1
    done
}

# line TEXT [LENGTH]: one line for people. Parts of what the agent says may come from users.
line() { printf '%s' "$1" | head -n 1 | tr -cd '[:print:]' | cut -c "1-${2:-160}"; }

say() { logger -t mpsagent-slurm -- "$1" 2>/dev/null || true; printf 'mpsagent: %s\n' "$1" >&2; }

# The node's $state and $reason; fails where slurmctld does not answer.
look() {
    shown=$(timeout -k 1 10 scontrol --oneliner show node "$node" 2>/dev/null) || return 1
    state=${shown#* State=} state=${state%% *}
    case $shown in *" Reason="*) reason=${shown#* Reason=} ;; *) reason= ;; esac
}

# drain WHY: no further jobs come here. A node that is drained already has its reason, and keeps it.
drain() {
    look || return 1
    case $state in *DRAIN*) return 0 ;; esac
    timeout -k 1 10 scontrol update "nodename=$node" state=drain "reason=mpsagent: $1"
}

# map JOB UID GPU...: a job is on these GPUs; unmap JOB: it is on none any more. jobstats knows one job for a GPU: where
# there are several, the GPU's figures are no one's.
map() (
    [ -n "$gpustat$dcgm" ] || exit 0
    mkdir -p "$gpus" ${gpustat:+"$gpustat"} ${dcgm:+"$dcgm"} && chmod 700 "$gpus" || exit 1 # who may read a file may lock it
    exec 9>"$gpus/lock" && flock -w 5 9 || exit 1
    of=$1 its=$2
    shift 2
    for gpu; do
        echo "$of $its" >>"$gpus/$gpu"
        tell_gpu "$gpu"
    done
)

unmap() (
    [ -n "$gpustat$dcgm" ] && [ -d "$gpus" ] || exit 0
    exec 9>"$gpus/lock" && flock -w 5 9 || exit 1
    for path in "$gpus"/[0-9]*; do
        grep -q "^$1 " "$path" 2>/dev/null || continue
        sed -i "/^$1 /d" "$path"
        tell_gpu "${path##*/}"
    done
)

tell_gpu() {
    rows=$(sort -nu "$gpus/$1")
    one=$rows
    [ "$(echo "$rows" | wc -l)" = 1 ] || one=
    [ -z "$gpustat" ] || put "$gpustat/$1" "$one"
    [ -z "$dcgm" ] || put "$dcgm/$1" "$(echo "$rows" | cut -d ' ' -f 1)"
}

# put FILE TEXT: readers never find half a file. Without a text there is none.
put() {
    [ -n "$2" ] || { rm -f "$1" && return; }
    echo "$2" >"${1%/*}/.new" && chmod 644 "${1%/*}/.new" && mv "${1%/*}/.new" "$1"
}

# Asks slurmctld for ProctrackType. Slurm should not be asked for every job, so the answer is kept for the prolog.
learn_proctrack() {
    found=$(timeout -k 1 5 scontrol show config 2>/dev/null | sed -n 's/^ProctrackType *= *//p')
    [ -n "$found" ] && printf '%s\n' "$found" >"$known.$$" && mv "$known.$$" "$known"
}

# Whether each job has a cgroup of its own; yes where that is not known: a lease that fits no process gives nothing away.
has_cgroup() {
    [ -n "$proctrack" ] || [ -r "$known" ] || learn_proctrack || return 0
    [ -n "$proctrack" ] || read -r proctrack <"$known"
    case $proctrack in */linuxproc | */pgid) return 1 ;; esac
}
