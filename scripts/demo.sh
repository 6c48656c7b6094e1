#!/usr/bin/env bash
# Show one answer being written, then compare plain decoding, EAGLE-3 (Top-K) and RheoSampling on 24
# questions at temperature 1. Arguments go to evaluation.demo.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
set -x
.venv/bin/python -m evaluation.demo "$@"
