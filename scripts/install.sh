#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes a virtual environment and installs evoalign into it, editable, with its development tools.
#
#   scripts/install.sh [VENV]                  VENV is .venv unless given
#   PYTHON=python3.12 scripts/install.sh       which Python (3.11 or newer); default python3
#   TORCH='torch==2.12.0' scripts/install.sh   which torch, as pip takes it, options included; cpu: a build for the CPU
#   WITH='--group docs' scripts/install.sh     what else, as pip takes it; default '--group dev'
#   LOCK= scripts/install.sh                   the file of versions, requirements/test.lock; empty: the newest that fit
#
# Which torch, where TORCH is not given: the plain one on macOS and where an NVIDIA driver answers; a build for
# the CPU everywhere else, because the plain one brings gigabytes of CUDA libraries that such a machine cannot use.
set -euo pipefail

tools='pip==26.3 uv==0.13.9'
cpu_torch='torch==2.13.0+cpu' # the local version tag: no build with CUDA can match it
venv=${1:-.venv}
base_python=${PYTHON:-python3}
python=$venv/bin/python

say() { printf '==> %s\n' "$*" >&2; }
stop() {
  printf 'evoalign: %s\n' "$*" >&2
  exit 1
}

check_python() {
  command -v "$base_python" >/dev/null 2>&1 ||
    stop "no $base_python here; install Python 3.11 or newer, or set PYTHON=/path/to/python3.11."
  "$base_python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    stop "$base_python is $("$base_python" -c 'import platform; print("Python", platform.python_version())')," \
      "but evoalign needs 3.11 or newer; set PYTHON=/path/to/python3.11."
}

make_venv() {
  say "environment in $venv"
  "$base_python" -m venv "$venv" ||
    stop "$base_python cannot make a virtual environment; install its venv module (Debian: apt install python3-venv)."
  local -a pinned
  read -ra pinned <<<"$tools"
  "$python" -m pip install --quiet "${pinned[@]}"
}

# uv takes seconds where pip takes minutes. Where it cannot, as from indexes that pip alone is told of, pip does.
install() {
  "$python" -m uv pip install --quiet --python "$python" "$@" 2>/dev/null || "$python" -m pip install --quiet "$@"
}

install_torch() {
  if [ "${TORCH:-}" = cpu ]; then
    install_cpu_torch
  elif [ -n "${TORCH:-}" ]; then
    say "torch as TORCH says: $TORCH"
    local -a wanted
    read -ra wanted <<<"$TORCH"
    install "${wanted[@]}" || stop "pip cannot install TORCH='$TORCH'; set TORCH to a torch it can install."
  elif [ "$(uname -s)" = Darwin ] || nvidia-smi >/dev/null 2>&1; then
    say "the plain torch"
    install 'torch>=2.10,<3' ||
      stop "pip found no torch for this machine; set TORCH to a torch that pip can install, such as TORCH='torch==2.12.0'."
  else
    install_cpu_torch
  fi
}

install_cpu_torch() {
  say "torch for the CPU"
  install "$cpu_torch" && return
  say "no $cpu_torch there; asking uv, which knows where builds for the CPU are"
  "$python" -m uv pip install --python "$python" --torch-backend=cpu "${cpu_torch%+cpu}" && return
  stop "found no torch for the CPU; set TORCH to a torch that pip can install, such as TORCH='torch==2.13.0' (with CUDA)."
}

if [ -z "${UV_FIND_LINKS:-}" ] && [ -n "${PIP_FIND_LINKS:-}" ]; then export UV_FIND_LINKS=$PIP_FIND_LINKS; fi
if [ -z "${UV_DEFAULT_INDEX:-}" ] && [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX=$PIP_INDEX_URL; fi
check_python
make_venv
install_torch
WITH=${WITH:---group dev}
LOCK=${LOCK-requirements/test.lock}
say "evoalign, with $WITH, in ${LOCK:+the versions of }${LOCK:-the newest versions}"
read -ra with <<<"$WITH${LOCK:+ --constraint $LOCK}"
install --editable . "${with[@]}"
