# Shared by the launch scripts (sourced, not run): find a Python, make an environment, install jaxgpt.
# shellcheck shell=bash

# The newest supported interpreter: $PYTHON if set, else the newest of PATH and pyenv's versions.
find_python() {
  local minor candidate
  local -a candidates=()
  if [ -n "${PYTHON:-}" ]; then
    candidates=("$PYTHON")
  else
    for minor in 13 12 11; do
      candidates+=("python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python3)
    done
    candidates+=(python3 python)
  fi
  for candidate in "${candidates[@]}"; do
    # A pyenv shim can exist for a version that is not active, so ask each candidate to run.
    if "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "jaxgpt: no Python 3.11, 3.12 or 3.13 (with venv) found; install one or set PYTHON=/path/to/python3" >&2
  return 64
}

# The extra that matches the accelerator of this machine: cuda, tpu, or nothing.
accelerator_extra() {
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    echo cuda
  elif compgen -G '/dev/accel*' >/dev/null || { compgen -G '/dev/vfio/[0-9]*' >/dev/null && [ -n "${TPU_NAME:-}${TPU_WORKER_ID:-}" ]; }; then
    echo tpu
  fi
}

# make_environment DIR PYTHON EXTRAS [REQUIREMENT]: a virtual environment with jaxgpt and the named extras
# (comma separated) in it. Made anew only when the interpreter or the dependencies changed; extras are added.
make_environment() {
  local dir=$1 python=$2 extras=$3 requirement=${4:-} state extra log missing=""
  state=$("$python" -c 'import sys; print(sys.executable, sys.version)' && cat pyproject.toml launch/constraints.txt)
  if [ "$state" != "$(cat "$dir/installed.state" 2>/dev/null)" ]; then
    "$python" -m venv --clear "$dir"
    missing="$extras,"
  fi
  for extra in ${extras//,/ }; do
    grep -qx "$extra" "$dir/installed.extras" 2>/dev/null || missing="$extra,$missing"
  done
  [ -n "$missing" ] || [ ! -f "$dir/installed.state" ] || return 0
  log=$(mktemp)
  echo "jaxgpt: installing into $dir, $("$python" --version), a minute or two ..." >&2
  local -a install=("$dir/bin/python" -m pip install --disable-pip-version-check -c launch/constraints.txt)
  if ! { [ -z "$requirement" ] || "${install[@]}" "$requirement"; } >"$log" 2>&1 ||
    ! "${install[@]}" -e ".${extras:+[$extras]}" >>"$log" 2>&1; then
    echo "jaxgpt: the installation failed; the end of its log ($log):" >&2
    tail -n 15 "$log" >&2
    return 70
  fi
  rm -f "$log"
  for extra in ${extras//,/ }; do echo "$extra" >>"$dir/installed.extras"; done
  printf '%s\n' "$state" >"$dir/installed.state"
}

# jaxgpt_python [EXTRA]: an interpreter that has jaxgpt: $JAXGPT_PYTHON (of a container, a module, conda), else that of
# .venv, which is made if needed, for this machine's accelerator or the one named.
jaxgpt_python() {
  local python=${JAXGPT_PYTHON:-}
  if [ -z "$python" ]; then
    python=$(find_python) || return
    make_environment .venv "$python" "${1:-$(accelerator_extra)}" >&2 || return
    python=$PWD/.venv/bin/python
  fi
  echo "$python"
}
