#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Train on all nodes of a Slurm job, with engine ray: a Ray cluster that lives as long as the job.
#
#   sbatch --nodes=4 --gpus-per-node=8 scripts/slurm/train.sh CONFIG [OPTIONS OF evoalign train]
#
# evoalign, the model and the run's folder are where every node sees them, and `evoalign`, `python` and `ray` on the PATH
# that the job is submitted with. There is one replica a GPU (a node, where the job has none), unless the options say
# `--set engine.replicas=N`, as with tensor parallelism. A job that is requeued goes on where the run was; one that comes
# to its time limit has itself requeued.
#
#SBATCH --job-name=evoalign
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
set -euo pipefail
umask 077

config=${1:?usage: sbatch scripts/slurm/train.sh CONFIG [OPTIONS OF evoalign train]}
: "${SLURM_JOB_ID:?run this with sbatch}" "${SLURM_JOB_NODELIST:?run this with sbatch}"
patience=${EVOALIGN_JOIN_SECONDS:-300}
own=${SLURM_SUBMIT_DIR:-$PWD}/.evoalign-ray-$SLURM_JOB_ID
port=$((20000 + SLURM_JOB_ID % 10000)) # of this job's own, where nodes are shared
steps=() run='' requeue=''

say() { printf '%s %s\n' "$(date +%T)" "$*" >&2; }

# All that was started ends here, however this ends.
# shellcheck disable=SC2329  # by trap
take_down() {
  trap '' TERM INT USR1
  if [[ -n $run ]]; then # it ends its generation and writes down where it is, if there is time
    kill -TERM "$run" 2>/dev/null || true
    for ((second = 0; second < 90; second++)); do
      kill -0 "$run" 2>/dev/null || break
      sleep 1
    done
    kill -KILL "$run" 2>/dev/null || true
  fi
  if ((${#steps[@]})); then
    kill -TERM "${steps[@]}" 2>/dev/null || true
    wait "${steps[@]}" || true
    srun --nodes="${#nodes[@]}" --ntasks-per-node=1 rm -rf "/tmp/ray-$SLURM_JOB_ID" </dev/null || true
  fi
  rm -rf "$own"
  if [[ -n $requeue ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
}
trap take_down EXIT
trap 'exit 143' TERM INT
trap 'say "the time limit is near: the job is requeued"; requeue=yes; exit 0' USR1

# The token goes through a file that this user alone reads: what is on a command line all users see.
rm -rf "$own"
mkdir "$own"
python -c 'import secrets; print(secrets.token_hex(32), end="")' >"$own/token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$own/token RAY_USAGE_STATS_ENABLED=0
unset RAY_AUTH_TOKEN RAY_ADDRESS

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
gpus=${SLURM_GPUS_ON_NODE:-0}
cpus=${SLURM_CPUS_PER_TASK:-1}

# By the name that Slurm has for a node: the address within the cluster.
address_of() { getent ahostsv4 "$1" | awk 'NR == 1 { print $1 }'; }

# `ray start` on a node, as a step of the job. Its temporary folder is short, as sockets lie in it.
start() {
  local node=$1
  shift
  srun --nodes=1 --ntasks=1 --cpus-per-task="$cpus" --nodelist="$node" \
    ray start "$@" --node-ip-address="$(address_of "$node")" --num-cpus="$cpus" --num-gpus="$gpus" \
    --temp-dir="/tmp/ray-$SLURM_JOB_ID" --disable-usage-stats --block </dev/null >"$own/$node.log" 2>&1 &
  steps+=($!)
}

# has NODES: whether so many have joined.
has() {
  timeout 5 bash -c "exec 3<>/dev/tcp/${address/://}" 2>/dev/null || return 1
  timeout 60 python - "$address" "$1" 2>/dev/null <<'PYTHON'
import sys

import ray

ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
sys.exit(sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]))
PYTHON
}

wait_for() {
  local end=$((SECONDS + patience)) step
  until has "$1"; do
    for step in "${steps[@]}"; do
      if ! kill -0 "$step" 2>/dev/null || ((SECONDS > end)); then
        say "a node did not join in $patience s, or left:"
        tail -n 20 "$own"/*.log >&2
        exit 1
      fi
    done
    sleep 2
  done
}

head_address=$(address_of "${nodes[0]}")
address=$head_address:$port
start "${nodes[0]}" --head --port="$port" --include-dashboard=false
wait_for 1 # nobody can join a head that is not yet there
for node in "${nodes[@]:1}"; do start "$node" --address="$address"; done
wait_for "${#nodes[@]}"
replicas=$((${#nodes[@]} * (gpus > 0 ? gpus : 1)))
say "${#nodes[@]} nodes have joined; $replicas replicas"

evoalign train "$config" --set engine.name=ray --set "engine.address=$address" --set "engine.replicas=$replicas" \
  --resume "${@:2}" &
run=$!
wait "$run" && status=0 || status=$?
run=''
exit "$status"
