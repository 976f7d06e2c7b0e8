#!/usr/bin/env bash
# `pip install .` as a user would, used away from the checkout: the cost of the import, the page, then an answer.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -qq --disable-pip-version-check .
cd "$dir"
venv/bin/python "$root/tools/import_cost.py"
venv/bin/python -c 'from pegainfer.frontend.http.page import page_paths; assert len(page_paths()) > 30, page_paths()'
venv/bin/pegainfer generate --max-tokens 16 "What is the capital of France?"
