#!/usr/bin/env bash
# Table 5 of the paper: tau, drafting time and coverage by size of the support; arguments go to both programs, for example: --pair demo --limit 20
# (not --part, which evaluation.experiment alone knows: give it that and evaluation.paper.coverage by themselves)
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
set -x
.venv/bin/python -m evaluation.experiment table5 "$@"
.venv/bin/python -m evaluation.paper.coverage "$@"
