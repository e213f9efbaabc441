#!/usr/bin/env bash
# ResNet-50 on CIFAR-10 as two stages, on eight devices four replicas of each.
#
#   bash examples/run_pipeline.sh DATA_PATH Ascend|GPU|CPU [overrides of the configuration...]
#
# DATA_PATH is the folder of cifar-10-binary.tar.gz. Each rank writes to rank_<n>.log in a folder of this run, which is
# named at the start; the run's outputs are there too.
#
# Without RANK_TABLE_FILE, torchrun starts the processes of this machine. With it, the script starts a process for each
# device that the table has on this machine, as MindSpore's scripts do; run it on each server of the table.
#
#   DEVICE_NUM  devices of this machine (8; 2 on CPU); with a rank table the table tells
#   NUM_STAGES  stages (2)
#   SERVER_ID   which server of the rank table this is, where its address does not tell
#   LOG_DIR     folder of the logs and outputs (logs/run_pipeline/<time>)
#   PYTHON      interpreter (python)
set -euo pipefail

usage() {
    echo "Usage: bash $0 DATA_PATH Ascend|GPU|CPU [overrides...]" >&2
    exit 2
}

fail() {
    echo "Error: $1" >&2
    exit 2
}

[ $# -ge 2 ] || usage
case "$2" in
    Ascend) accelerator=npu default_devices=8 ;;
    GPU) accelerator=gpu default_devices=8 ;;
    CPU) accelerator=cpu default_devices=2 ;;
    *) echo "Error: the device is Ascend, GPU or CPU, got '$2'" >&2; usage ;;
esac
[ -f "$1/cifar-10-binary.tar.gz" ] || fail "there is no cifar-10-binary.tar.gz in '$1': DATA_PATH is its folder"
data=$(cd "$1" && pwd)
shift 2

examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python}
# One folder for all ranks: each would choose its own by the time at which it starts.
logs=${LOG_DIR:-logs/run_pipeline/$(date +%Y-%m-%d_%H-%M-%S)}
mkdir -p "$logs"
export LOGS=$(cd "$logs" && pwd)

pids=()
# An interrupt, and the first process that fails, end the others, which would wait for it.
end_processes() {
    # shellcheck disable=SC2046  # one word each
    kill $(jobs -pr) 2>/dev/null || return 0
    for _ in {1..100}; do
        [ -n "$(jobs -pr)" ] || return 0
        sleep 0.1
    done
    # shellcheck disable=SC2046
    kill -9 $(jobs -pr) 2>/dev/null || true
}
trap end_processes EXIT
trap 'exit 130' INT TERM

# What every rank runs; the rank's number comes from the variable that its launcher sets.
train() { # variable num_nodes devices overrides...
    local variable=$1 nodes=$2 devices=$3
    shift 3
    command=(
        "$python" "$examples/train.py" experiment=resnet50_cifar10
        "data.data_dir='$data'"
        "trainer.accelerator=$accelerator" "trainer.devices=$devices" "+trainer.num_nodes=$nodes"
        "trainer.strategy.num_stages=${NUM_STAGES:-2}"
        "hydra.run.dir='$LOGS'" "hydra.job.name=train_rank\${oc.env:$variable}"
        "$@"
    )
}

if [ -z "${RANK_TABLE_FILE:-}" ]; then
    devices=${DEVICE_NUM:-$default_devices}
    train RANK 1 "$devices" "$@"
    echo "$devices processes by torchrun, logs in $LOGS"
    # shellcheck disable=SC2016  # the rank's shell is to see $RANK
    "$python" -m torch.distributed.run --standalone --nproc_per_node "$devices" --no-python \
        bash -c 'exec "$@" >"$LOGS/rank_$RANK.log" 2>&1' bash "${command[@]}" &
    pids+=($!)
else
    export RANK_TABLE_FILE=$(realpath "$RANK_TABLE_FILE")
    started=$("$python" -m lightning_pipeline rank-table processes "$RANK_TABLE_FILE" ${SERVER_ID:+--server "$SERVER_ID"})
    mapfile -t processes <<<"$started"
    devices=${#processes[@]}
    size=$(sed -n 's/.* RANK_SIZE=\([0-9]*\) .*/\1/p' <<<"${processes[0]}")
    train RANK_ID $((size / devices)) "$devices" "$@"
    echo "$devices of $size processes from $RANK_TABLE_FILE, logs in $LOGS"
    for variables in "${processes[@]}"; do
        rank=${variables#RANK_ID=}
        # shellcheck disable=SC2086  # three assignments
        env $variables "${command[@]}" >"$LOGS/rank_${rank%% *}.log" 2>&1 &
        pids+=($!)
    done
fi

for _ in "${pids[@]}"; do
    wait -n || {
        status=$?
        end_processes
        echo "Error: a process failed with exit code $status; the ends of the logs:" >&2
        tail -n 5 "$LOGS"/rank_*.log >&2
        exit "$status"
    }
done
echo "All processes have ended; the results are in the log of rank 0."
