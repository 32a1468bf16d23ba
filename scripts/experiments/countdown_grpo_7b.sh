#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
cd "$(dirname "${BASH_SOURCE[0]}")/../.." && exec evoalign grpo configs/experiments/countdown_grpo_7b.yaml "$@"
