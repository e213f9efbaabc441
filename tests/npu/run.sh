#!/usr/bin/env bash
# Runs the tests of this folder in .venv-npu, an environment of its own: without CANN, an installed torch_npu makes
# `import torch` fail, so it must not be in .venv. Ends with 0 and a sentence where they cannot run.
set -euo pipefail
cd "$(dirname "$0")/../.."

VENV=.venv-npu
LOG=$VENV/install.log

not_here() {
    echo "test-npu: nothing was run, because $1"
    exit 0
}

install() {
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@" >>"$LOG" 2>&1 ||
        not_here "pip could not install $* ($(tail -n 1 "$LOG"))"
}

[ "$(uname -s)" = Linux ] || not_here "torch_npu is for Linux"
command -v g++ >/dev/null || not_here "there is no g++ to compile the stand-in for CANN"

if [ ! -e "$VENV/.stamp" ] || [ pyproject.toml -nt "$VENV/.stamp" ] || [ constraints.txt -nt "$VENV/.stamp" ]; then
    "${PYTHON:-python3}" -m venv "$VENV"
    : >"$LOG"
    # torch comes first and alone: pip then takes a build that it has at hand instead of whatever torch_npu asks for.
    install torch numpy
    install --no-deps --only-binary :all: torch-npu
    install -e . pyyaml pytest pytest-timeout scikit-learn torchmetrics transformers  # the last three for habits
    touch "$VENV/.stamp"
fi

# Loaded by `import torch`, torch_npu would look for CANN before the stand-in is there.
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1
exec "$VENV/bin/python" -m pytest tests/npu "$@"
