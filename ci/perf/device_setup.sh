#!/bin/sh
# Makes this checkout's packages importable on a machine without a network: what is missing from wheels in .whl, then our
# own as editable installs. Prints what it installed and how long it took.
#
#   sh ci/perf/device_setup.sh          PYTHON=python3   WHEELS=.whl   the names of further members as arguments
#
# What .whl must hold where the machine has torch, numpy, the tokenizers and the usual test tools (Python 3.12):
#   msgspec pyzmq uvicorn hatchling trove-classifiers tomlkit editables, and pytest 9 and pathspec where older ones are
set -eu
cd "$(dirname "$0")/../.."
PYTHON="${PYTHON:-python3}"
WHEELS="${WHEELS:-.whl}"
begin=$(date +%s)

pip() { "$PYTHON" -m pip --disable-pip-version-check --quiet "$@"; }

# Only what is not there yet is taken from the folder; nothing that is there is replaced unless it is too old.
pip install --no-index --no-compile --find-links "$WHEELS" \
    msgspec pyzmq uvicorn 'hatchling>=1.27' editables 'pluggy>=1.5' 'pytest>=9,<10' pytest-timeout

members="plugins/api core"
for member in plugins/triton backends/cuda backends/cpu "$@"; do
    [ -f "$member/pyproject.toml" ] && members="$members $member"
done
editable=""
for member in $members; do editable="$editable -e ./$member"; done
# The CPU backend compiles its own kernels when it is installed; without a compiler it runs on torch's.
# shellcheck disable=SC2086
pip install --no-index --no-deps --no-build-isolation --no-compile $editable

"$PYTHON" - <<'PYTHON'
from importlib.metadata import entry_points

print("backends:", ", ".join(sorted(point.name for point in entry_points(group="drivetrain.backends"))))
PYTHON
echo "set up in $(($(date +%s) - begin)) s: $members"
