#!/usr/bin/env bash
# The tests with every dependency but torch at the lowest release that pyproject.toml allows, in an environment of its own.
#
#     dev/test_lowest.sh [ARGUMENTS OF PYTEST]
#
# Needs uv, which alone can choose the lowest releases. A bound that fails here is raised in pyproject.toml.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf .venv-lowest
uv venv --quiet --python 3.11 .venv-lowest
uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct torch==2.13.0 --editable '.[test]'
exec .venv-lowest/bin/python -m pytest -n 2 --dist worksteal "$@"
