#!/usr/bin/env bash
# Runs the tests that depend on other packages in a fresh environment, with the lowest or the newest versions of them:
#
#   scripts/check_versions.sh lowest
#   scripts/check_versions.sh newest
#
# ENV names a folder for the environment, which is then kept and used again; else it is removed at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
which=${1:-}
case $which in
  lowest) versions=(torch==2.9.0 torchvision==0.24.0 transformers==5.0.0 numpy==1.26.0 Pillow==10.0.0 typer==0.15.4) ;;
  newest) versions=(torch torchvision transformers numpy Pillow typer) ;;
  *) echo "usage: scripts/check_versions.sh lowest|newest" >&2; exit 2 ;;
esac
environment=${ENV:-$(mktemp -d)}
[ -n "${ENV:-}" ] || trap 'rm -rf "$environment"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1

python3 -m venv "$environment"
"$environment/bin/pip" install -q --upgrade -e '.[test]' "${versions[@]}"
"$environment/bin/pip" list | grep -iE '^(torch|torchvision|transformers|numpy|pillow|typer) '
"$environment/bin/pytest" -q tests/test_engine.py tests/test_exact_jacobi.py tests/test_golden_llamagen.py \
  tests/test_golden_jacobi.py tests/test_golden_hfar.py tests/test_kernels_triton.py tests/test_kernels_triton_trees.py \
  tests/test_hf_models.py tests/test_hf_matrix.py tests/test_vlm_targets.py tests/test_vlm_generate.py \
  tests/test_pipeline.py tests/test_cli.py tests/test_fuzz_weights.py
