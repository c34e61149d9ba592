#!/usr/bin/env bash
# Validates exported drafters with the schema of the speculators package itself, which asks for an older transformers than
# the newest and therefore gets an environment of its own on top of the present one (python with visacc[test] installed).
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python -m venv "$work/env"
packages=$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
echo "$packages" > "$("$work/env/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/present.pth"
"$work/env/bin/pip" install -q 'speculators==0.9.0'
"$work/env/bin/python" -c "import speculators, transformers; print('speculators 0.9.0, transformers', transformers.__version__)"
"$work/env/bin/python" -m pytest -q -rs tests/test_vlm_serving.py
