#!/usr/bin/env bash
# Runs the default tests with the oldest versions that pyproject.toml allows, and with the newest, in environments that it
# makes under .versions. "oldest" or "newest" as the first argument runs one of the two; what follows goes to pytest.
#
# The package index has torch for GPUs only: where PyTorch's own can be reached, PIP_EXTRA_INDEX_URL=
# https://download.pytorch.org/whl/cpu saves several gigabytes.
set -euo pipefail
cd "$(dirname "$0")/../.."

ROOT=.versions
OLDEST_PYTHON=${OLDEST_PYTHON:-python3.10}
NEWEST_PYTHON=${NEWEST_PYTHON:-python3.13}

environment() { # name, interpreter, file of constraints: makes it if there is none as pyproject.toml says
    local path=$ROOT/$1
    if [ "$path/.stamp" -nt pyproject.toml ]; then return; fi
    echo "test-versions: making $path" >&2
    "$2" -m venv --clear "$path"
    "$path/bin/python" -m pip install --quiet --disable-pip-version-check -c "$3" -e '.[dev,examples]'
    touch "$path/.stamp"
}

run() { # name, arguments of pytest
    local python=$ROOT/$1/bin/python
    "$python" -c 'import sys, torch, lightning as l; print("Python", sys.version.split()[0], "torch", torch.__version__, "lightning", l.__version__)'
    OMP_NUM_THREADS=1 "$python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "${@:2}"
}

mkdir -p $ROOT
# name>=1.2 becomes name==1.2
sed -n '/^dependencies = \[/,/^\]/s/.*"\([a-z-]*\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml >$ROOT/oldest.txt
: >$ROOT/newest.txt

case ${1:-} in oldest | newest) which=$1 && shift ;; *) which="oldest newest" ;; esac
for name in $which; do
    python=${name^^}_PYTHON
    environment "$name" "${!python}" "$ROOT/$name.txt"
    run "$name" "$@"
done
