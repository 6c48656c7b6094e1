#!/usr/bin/env bash
# Table 5 of the paper: tau, drafting time and coverage by size of the support. Arguments go to both
# programs, for example: --pair demo --limit 20
# (Not --part, which only evaluation.experiment knows: run the two programs by themselves then.)
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
set -x
.venv/bin/python -m evaluation.experiment table5 "$@"
.venv/bin/python -m evaluation.paper.coverage "$@"
