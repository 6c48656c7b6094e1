#!/usr/bin/env bash
# Table 4 of the paper: acceptance of one level, counted and in closed form. Arguments go to
# evaluation.paper.one_level, for example: --pair demo
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
set -x
.venv/bin/python -m evaluation.paper.one_level "$@"
