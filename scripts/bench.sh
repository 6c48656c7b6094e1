#!/usr/bin/env bash
# Time the phases of a cycle, and how their cost grows. Arguments go to evaluation.bench, and those
# that name the pair to evaluation.speed.growth, too, for example:
#   bench.sh --base-model-path smollm2-demo --dtype bf16 --total-token 8 --depth 1 --top-k 4
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
[ $# -gt 0 ] || set -- --base-model-path smollm2-demo
pair=() last=
for word in "$@"; do
    case $last in --base-model-path | --ea-model-path | --dtype) pair+=("$last" "$word") ;; esac
    last=$word
done
set -x
.venv/bin/python -m evaluation.bench --output results/bench/pair "$@"
.venv/bin/python -m evaluation.speed.growth --output results/growth/pair "${pair[@]}"
