#!/usr/bin/env bash
# Table 1 of the paper, in exact fractions: the right proxy keeps the distribution of the sampled
# token, the proxy 1/4 does not.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
set -x
.venv/bin/python -m rheo.certify --table1
