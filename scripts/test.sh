#!/usr/bin/env bash
# Install into .venv if needed and run the tests. Arguments go to pytest; --full runs the long ones,
# too. The tests run in one process per core: TEST_PROCESSES=1 runs them in one.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
processes=${TEST_PROCESSES:-$(nproc)}
export OMP_NUM_THREADS=1  # the networks of the tests are too small for threads to pay
set -x
.venv/bin/python -m pytest -n "$processes" --dist worksteal "$@"
