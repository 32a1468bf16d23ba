#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
cd "$(dirname "${BASH_SOURCE[0]}")/../.." && exec evoalign train configs/experiments/countdown_lora_7b.yaml "$@"
