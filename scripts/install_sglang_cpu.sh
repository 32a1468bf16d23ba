#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes a virtual environment for tests/engine_sglang: SGLang and torch for the CPU, and evoalign, editable.
#
#   scripts/install_sglang_cpu.sh [VENV]               VENV is .venv-sglang unless given
#   PYTHON=python3.12 scripts/install_sglang_cpu.sh    which Python (3.11 or newer); default python3
#
# Of what SGLang asks for, only that comes which text needs (tests/engine_sglang/requirements.txt). Its kernels are published
# for CUDA alone, so that tests/engine_sglang/shim takes their place, and adapters lie in memory that is not pinned. It is
# for tests: a machine with a GPU takes `pip install 'evoalign[sglang]'`.
set -euo pipefail

version=0.5.23
venv=${1:-.venv-sglang}
python=$venv/bin/python

say() { printf '==> %s\n' "$*" >&2; }
stop() {
  printf 'evoalign: %s\n' "$*" >&2
  exit 1
}

# As in install.sh.
install() {
  "$python" -m uv pip install --quiet --python "$python" "$@" 2>/dev/null || "$python" -m pip install --quiet "$@"
}

install_sglang() {
  say "SGLang $version for the CPU"
  install --no-deps "sglang==$version" 'torchvision==0.28.0' 'xgrammar==0.2.8' ||
    stop "pip cannot install sglang $version (Linux only)."
}

# Not into the files that are there, which may be links into uv's cache: sed writes new ones.
make_it_start() {
  local site
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  cp -r tests/engine_sglang/shim/. "$site/"
  { grep -rlE 'pin_memory=True|\.pin_memory\(\)' "$site/sglang/srt/lora" || true; } | # none in a second installation
    xargs -r sed -i 's/pin_memory=True/pin_memory=torch.cuda.is_available()/; s/\.pin_memory()/.contiguous()/'
}

WITH='--requirement tests/engine_sglang/requirements.txt' LOCK=requirements/sglang.lock TORCH=cpu "$(dirname "${BASH_SOURCE[0]}")/install.sh" "$venv"
install_sglang
make_it_start
