#!/usr/bin/env bash
# Check gradients and measure training on the NVIDIA GPU of this machine, beside PyTorch, in about 10 minutes.
#
#   bash launch/gpu_check.sh [--out FOLDER] [--minutes N]   gpu_check.json and gpu_check.md, in . by default
#   bash launch/gpu_check.sh --platform cpu                 the same with tiny models, to try it without a GPU
#
# Nothing is installed: it takes the first python here that has JAX with a CUDA device ($JAXGPT_PYTHON wins). Needed
# are jax, flax, optax, numpy and rich; TensorFlow and a network are not.
set -euo pipefail
cd_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# has PYTHON CODE: whether the code runs there; a driver that does not answer must not stop us.
has() {
  command -v "$1" >/dev/null && XLA_PYTHON_CLIENT_PREALLOCATE=false TF_CPP_MIN_LOG_LEVEL=3 env -u JAX_PLATFORMS \
    timeout -k 5 90 "$1" -c "$2" >/dev/null 2>&1
}

candidates=(.venv/bin/python python3 python)
[ -z "${JAXGPT_PYTHON:-}" ] || candidates=("$JAXGPT_PYTHON")
python=""
for wanted in "import jax; jax.devices('cuda')" "import jax, flax, optax"; do
  for candidate in "${candidates[@]}"; do
    # To try it, or to say that there is no GPU, any JAX will do.
    [ -n "$python" ] || ! has "$candidate" "$wanted" || python=$candidate
  done
done
if [ -z "$python" ]; then
  echo "jaxgpt: no python with jax, flax and optax here (tried ${candidates[*]}); set JAXGPT_PYTHON=/path/to/python" >&2
  exit 64
fi
echo "jaxgpt: $("$python" --version) ($python)" >&2
python=$(command -v "$python")
[[ $python = /* ]] || python=$PWD/$python
# From where it was called, so that --out means what it says there.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
cd "$cd_from"
exec "$python" -m jaxgpt.cli bench gpu "$@"
