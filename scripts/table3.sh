#!/usr/bin/env bash
# Table 3 of the paper. Arguments go to evaluation.experiment, for example:
#   --pair demo --limit 20 --max-new-token 128
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
set -x
.venv/bin/python -m evaluation.experiment table3 "$@"
