#!/usr/bin/env bash
# Compare with a checkout of EAGLE, cycle by cycle:
#   diff_upstream.sh PATH_TO_EAGLE [arguments of evaluation.diff_upstream]
set -euo pipefail
if [ $# -lt 1 ]; then
    echo "usage: $0 PATH_TO_EAGLE [--temperature 1 --seeds 4 ...]" >&2
    exit 2
fi
eagle=$(cd "$1" && pwd); shift
cd "$(dirname "$0")/.."
bash scripts/install.sh
if [ ! -f .venv-eagle/ready ]; then
    echo "Making EAGLE's own environment in .venv-eagle (its code needs an older transformers)"
    "${PYTHON:-python3}" -m venv .venv-eagle
    pip=(.venv-eagle/bin/pip install --quiet --disable-pip-version-check)
    "${pip[@]}" torch==2.13.0
    "${pip[@]}" transformers==4.53.1 accelerate sentencepiece protobuf
    touch .venv-eagle/ready
fi
set -x
.venv/bin/python -m evaluation.diff_upstream "$eagle" --python .venv-eagle/bin/python "$@"
