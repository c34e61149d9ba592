#!/usr/bin/env bash
# mypy over the whole package from a checkout: the sub-packages lie beside visacc/, so they are linked into one tree first.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
cp -r "$root/visacc" "$tree/visacc"
for part in models kernels metrics; do cp -r "$root/$part" "$tree/visacc/$part"; done
find "$tree" -name assets -type d -prune -exec rm -rf {} +
cd "$tree"
python -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" -p visacc "$@"
