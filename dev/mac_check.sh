#!/usr/bin/env bash
# Ten minutes that tell whether lapclip works on this Mac (or this Linux computer): everything that its authors could not try.
#
#     dev/mac_check.sh [--minutes 10] [--only NAME]
#
# Makes an environment of its own in .venv-check (once; the download is 0.2 GB and not part of the ten minutes), trains and
# kills small runs in a temporary folder, and prints one block to paste into an issue. Nothing is sent anywhere.
set -euo pipefail
cd "$(dirname "$0")/.."
# A folder that finished its set-up has this file; without it the set-up starts again.
ready=.venv-check/ready
python=.venv-check/bin/python
extras=test,serve,export,sensors
torch=torch==2.13.0
if [ "$(uname)" = Darwin ]; then
  extras=$extras,coreml
fi

if [ ! -e "$ready" ]; then
  echo "Setting up .venv-check (once)"
  rm -rf .venv-check
  if command -v uv >/dev/null; then
    uv venv --quiet --python 3.12 .venv-check
    uv pip install --quiet --python "$python" "$torch" --editable ".[$extras]"
  else
    found=
    for candidate in python3.13 python3.12 python3.11 python3; do
      if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        found=$candidate
        break
      fi
    done
    if [ -z "$found" ]; then
      echo "lapclip needs Python 3.11 or later, and there is none here."
      echo "Try: brew install uv, or https://docs.astral.sh/uv/getting-started/installation/; then this again"
      exit 2
    fi
    "$found" -m venv .venv-check
    "$python" -m pip install --quiet --disable-pip-version-check "$torch"
    "$python" -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
  fi
  touch "$ready"
fi
exec "$python" dev/platform_check.py "$@"
