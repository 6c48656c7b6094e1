#!/usr/bin/env bash
# Time the phases of a cycle, and how their cost grows; arguments go to evaluation.bench, for example: --dtype bf16 --total-token 16 --depth 4
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
set -x
.venv/bin/python -m evaluation.bench --base-model-path smollm2-demo --output results/bench "$@"
.venv/bin/python -m evaluation.growth --base-model-path smollm2-demo --output results/growth
