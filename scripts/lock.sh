#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Writes the files requirements/*.lock: of all that is installed for tests, which version.
#
#   scripts/lock.sh              what pyproject.toml, tests/engine_* and examples/harnesses ask for, else what was locked
#   scripts/lock.sh --upgrade    everything as new as these allow; --upgrade-package NAME, one package
#
# One file holds for every system and Python that is supported. torch is not in it: scripts/install.sh chooses it by
# machine, and what it needs beside CUDA is. No hashes: pip would ask for one of torch's builds as well. A package's
# address is not in it either, so that any index or mirror does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

lock() {
  local file=$1
  shift
  printf '%s\n' filelock fsspec jinja2 networkx setuptools sympy typing-extensions | # what torch needs
    ${UV:-.venv/bin/uv} pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest --no-annotate \
      --excludes <(echo torch) --custom-compile-command scripts/lock.sh --output-file "$file" "$@" - >/dev/null
}

lock requirements/test.lock "$@" pyproject.toml --group dev
lock requirements/vllm.lock "$@" pyproject.toml tests/engine_vllm/requirements.txt
lock requirements/sglang.lock "$@" pyproject.toml tests/engine_sglang/requirements.txt
for name in verifiers mini_swe_agent inspect_ai; do
  lock "requirements/$name.lock" "$@" "examples/harnesses/$name/requirements.txt"
done
