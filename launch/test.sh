#!/usr/bin/env bash
# Run the tests on this machine, making the environment if needed.
#
#   bash launch/test.sh [PYTEST ARGUMENTS]   the test suite, on the newest supported Python
#   bash launch/test.sh --reference          the same on Python 3.11 with the oldest supported JAX, and live
#                                            comparisons with PyTorch and transformers
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

if [ "${1:-}" = --reference ]; then
  shift
  python=""
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11.*/bin/python3 python3; do
    if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
  [ -n "$python" ] || { echo "jaxgpt: the reference tests need Python 3.11; set PYTHON=/path/to/python3.11" >&2; exit 64; }
  environment=.venv-reference
  # The exact version first: only this one is a small CPU build.
  make_environment "$environment" "$python" dev,beam,reference "torch==2.13.0"
  targets=(tests)
else
  environment=.venv
  python=$(find_python)
  accelerator=$(accelerator_extra)
  extras=dev,beam${accelerator:+,$accelerator}
  # With the TPU's compiler, half a gigabyte, tests compile for TPUs that are not here; for GPUs with
  # JAXGPT_TEST_CUDA=1, four gigabytes.
  [ "$(uname -sm)" != "Linux x86_64" ] || extras+=,tpu
  [ "${JAXGPT_TEST_CUDA:-0}" = 0 ] || extras+=,cuda
  make_environment "$environment" "$python" "$extras"
  "$environment/bin/python" -m ruff check jaxgpt tests
  targets=(tests --ignore tests/reference)
fi

export JAX_PLATFORMS=cpu GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
exec "$environment/bin/python" -m pytest "${targets[@]}" -n "${JAXGPT_TEST_WORKERS:-2}" --dist loadfile --durations 10 "$@"
