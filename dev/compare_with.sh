#!/usr/bin/env bash
# Compare this tree with another commit on this machine: speed, losses, recall, times of make, sizes.
#
#     dev/compare_with.sh COMMIT [--only steps losses recall make sizes] [--data FLICKR8K] [--out FILE.json]
#
# Checks the commit out beside this tree, installs both, and measures both in turns (benchmarks/compare_trees.py).
# Takes about 45 minutes on two idle cores. DATA is the folder that benchmarks/flickr8k.py makes (or LAPCLIP_TEST_DATA
# has it as flickr8k/); without it, recall is left out.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
commit=$(git rev-parse --verify "$1^{commit}")
shift
other=$PWD-$(git rev-parse --short "$commit")
[ -d "$other" ] || git worktree add --quiet --detach "$other" "$commit"
for tree in "$other" "$PWD"; do
  make --silent -C "$tree" .venv/ready-to-test
  "$tree/.venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$tree[small-towers]"
done
exec .venv/bin/python benchmarks/compare_trees.py "$other" "$@"
