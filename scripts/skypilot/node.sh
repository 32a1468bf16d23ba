#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What every machine of scripts/skypilot/train.yaml runs: the first starts a Ray cluster and trains, the others join it.
#
#   scripts/skypilot/node.sh CONFIG [OPTIONS OF evoalign train]
#
# The token is in EVOALIGN_RAY_TOKEN. The job comes to what the first machine comes to: SkyPilot ends a job where any
# machine fails, so that the others say nothing. Only what was started here is ended: SkyPilot has a Ray of its own.
set -euo pipefail
umask 077

config=${1:?usage: scripts/skypilot/node.sh CONFIG [OPTIONS OF evoalign train]}
mapfile -t addresses <<<"${SKYPILOT_NODE_IPS:?run this with SkyPilot}"
rank=${SKYPILOT_NODE_RANK:?run this with SkyPilot}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=${EVOALIGN_RAY_TOKEN:?give the token: --secret EVOALIGN_RAY_TOKEN}
export RAY_USAGE_STATS_ENABLED=0
unset RAY_ADDRESS RAY_AUTH_TOKEN_PATH
patience=${EVOALIGN_JOIN_SECONDS:-600}
port=${EVOALIGN_RAY_PORT:-6379}
gpus=${SKYPILOT_NUM_GPUS_PER_NODE:-0}
common=(--node-ip-address="${addresses[$rank]}" --num-gpus="$gpus" --temp-dir=/tmp/ray-evoalign --disable-usage-stats
  --block)

# shellcheck disable=SC2329  # by trap
take_down() {
  trap '' TERM INT
  if [[ -n $(jobs -p) ]]; then
    # shellcheck disable=SC2046  # one word a pid
    kill -TERM $(jobs -p) 2>/dev/null || true
    wait || true
  fi
}
trap take_down EXIT
trap 'exit 143' TERM INT

# until_true SECONDS COMMAND: asked every two seconds.
until_true() {
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    if ((SECONDS > end)); then return 1; fi
    sleep 2
  done
}

# shellcheck disable=SC2329  # by until_true
is_there() { timeout 5 bash -c "exec 3<>/dev/tcp/${addresses[0]}/$port" 2>/dev/null; }

# shellcheck disable=SC2329  # by until_true
is_whole() {
  timeout 60 python - "${addresses[0]}:$port" "${#addresses[@]}" 2>/dev/null <<'PYTHON'
import sys

import ray

ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
sys.exit(sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]))
PYTHON
}

if ((rank > 0)); then
  until_true "$patience" is_there || exit 0
  while is_there; do # the port answers before others can join
    ray start --address="${addresses[0]}:$port" "${common[@]}" </dev/null &
    wait $! || sleep 2
  done
  exit 0
fi

ray start --head --port="$port" --include-dashboard=false "${common[@]}" </dev/null &
if ! until_true "$patience" is_whole; then
  echo "not all of ${#addresses[@]} machines have joined within $patience s" >&2
  exit 1
fi
evoalign train "$config" --set engine.name=ray --set "engine.address=${addresses[0]}:$port" \
  --set "engine.replicas=$((${#addresses[@]} * (gpus > 0 ? gpus : 1)))" --resume "${@:2}" &
wait $! && status=0 || status=$?
exit "$status"
