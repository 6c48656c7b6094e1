#!/usr/bin/env bash
# Install into .venv if needed, then check format, style and types.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
set -x
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
