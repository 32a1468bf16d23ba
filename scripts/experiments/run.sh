#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Run a published experiment: scripts/experiments/run.sh NAME [OPTIONS OF evoalign train OR grpo]
# NAME is a file of configs/experiments without .yaml; without a NAME, or with one that is not there, all are listed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

config="configs/experiments/${1:-}.yaml"
if [[ ! -f $config ]]; then
  echo "usage: scripts/experiments/run.sh NAME [OPTIONS]; ${1:+no experiment \"$1\"; }NAME is one of" >&2
  LC_ALL=C # the same order on every machine
  for file in configs/experiments/*.yaml; do echo "  $(basename "$file" .yaml)" >&2; done
  exit 2
fi

command=grpo
if grep -q '^es:' "$config"; then command=train; fi
exec evoalign "$command" "$config" "${@:2}"
