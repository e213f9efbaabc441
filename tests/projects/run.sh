#!/usr/bin/env bash
# Trains models of public packages plainly and on one and two stages (README.md), in environments that it makes under
# .projects: one for most packages, and one for each that has a requirements file of its name.
set -euo pipefail
cd "$(dirname "$0")/../.."

HERE=tests/projects
ROOT=.projects

install() { # environment, arguments of pip
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"
}

environment() { # name, requirements: makes it if there is none as these say, torch first, of which a build may be at hand
    local path=$ROOT/$1 alone=${2%.txt}-alone.txt
    if [ "$path/.stamp" -nt "$2" ] && [ "$path/.stamp" -nt pyproject.toml ]; then return; fi
    echo "test-projects: making $path" >&2
    "${PYTHON:-python3}" -m venv "$path"
    install "$path" -c constraints.txt torch numpy
    install "$path" torch=="$(sed -n 's/^torch==//p' constraints.txt)" -r "$2"
    if [ -e "$alone" ]; then install "$path" --no-deps -r "$alone"; fi
    install "$path" --no-deps -e .
    touch "$path/.stamp"
}

environment shared $HERE/requirements.txt
for file in "$HERE"/requirements-*.txt; do
    name=$(basename "$file" .txt) && name=${name#requirements-}
    case $name in *-alone) ;; *) if [ $# = 0 ] || [[ " $* " == *" $name"* ]]; then environment "$name" "$file"; fi ;; esac
done

# The packages' own environments are found by name.
export OMP_NUM_THREADS=1
exec "$ROOT/shared/bin/python" -m tests.projects "$@"
