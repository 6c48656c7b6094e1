#!/usr/bin/env bash
# Install into .venv where needed and run the tests; arguments go to pytest (--full runs the long ones too).
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
set -x
.venv/bin/python -m pytest "$@"
