#!/usr/bin/env bash
# Time the phases of a cycle, and how their cost grows. Arguments go to both programs, for example:
#   bench.sh --base-model-path smollm2-demo --dtype bf16 --rounds 5
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
[ $# -gt 0 ] || set -- --base-model-path smollm2-demo
set -x
.venv/bin/python -m evaluation.bench --output results/bench/pair "$@"
.venv/bin/python -m evaluation.growth --output results/growth/pair "$@"
