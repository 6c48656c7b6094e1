#!/usr/bin/env bash
# Answer 24 questions three ways (plain, Top-K, RheoSampling m=1) at temperature 1 and compare.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh

out=answers/demo
tree=(--total-token 6 --depth 1 --top-k 4)   # what --total-token -1 --depth -1 chooses on 2 CPU cores, see the README
common=(--base-model-path smollm2-demo --dtype fast --bench-name demo --temperature 1.0 --max-new-token 24 --seed 0)
run() { echo "+ $*"; "$@"; }

echo "== 1/4 Plain decoding"
run .venv/bin/python -m evaluation.gen_baseline_answer "${common[@]}" --answer-file "$out/plain.jsonl"
echo "== 2/4 EAGLE-3 with Top-K trees"
run .venv/bin/python -m evaluation.gen_ea_answer "${common[@]}" "${tree[@]}" --sampling topk --answer-file "$out/topk.jsonl"
echo "== 3/4 EAGLE-3 with RheoSampling"
run .venv/bin/python -m evaluation.gen_ea_answer "${common[@]}" "${tree[@]}" --sampling rheo --m 1 --answer-file "$out/rheo-m1.jsonl"
echo "== 4/4 Report"
run .venv/bin/python -m evaluation.report "$out/topk.jsonl" "$out/rheo-m1.jsonl" --baseline "$out/plain.jsonl" --output "$out/report.json"
echo "Answers: $out/plain.jsonl $out/topk.jsonl $out/rheo-m1.jsonl"
