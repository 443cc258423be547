#!/usr/bin/env bash
# Run a verb in several processes of this machine, over loopback: to try a mesh before renting one.
#
#   bash launch/multi_process.sh N VERB ...              for example: 2 train configs/quickstart.toml mesh.fsdp=2
#   DEVICES=4 bash launch/multi_process.sh N VERB ...    simulated CPU devices of each process, without it 1
#   GPUS=1 bash launch/multi_process.sh N VERB ...       instead: one GPU for each process
#
# Process 0 prints as if alone; of the others errors are shown, each line behind [I]. Signals reach all of them. After
# the first failure the others have JAXGPT_GRACE (120) seconds to end; the exit code is the most telling one of all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
source launch/processes.sh
[[ $# -ge 2 && "$1" =~ ^[1-9][0-9]{0,3}$ ]] ||
  { say "usage: bash launch/multi_process.sh N VERB ..., but got: $*" && exit 64; }
count=$1 verb=$2 && shift 2
if [ -n "${GPUS:-}" ]; then
  IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd,)}"
  [ "${#gpus[@]}" -ge "$count" ] ||
    { say "GPUS=1: $count processes need $count GPUs, here are ${#gpus[@]}" && exit 64; }
else
  [[ "${DEVICES:-1}" =~ ^[1-9][0-9]{0,3}$ ]] || { say "DEVICES=$DEVICES: must be a number from 1 to 9999" && exit 64; }
  export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES="${DEVICES:-1}"
fi
python=$(jaxgpt_python)
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"

set -m # each process in a group of its own, so that a terminal's Ctrl-C reaches it once, from here
# Whatever becomes of this script, SIGKILL too, nothing is left behind: the guard sees its pipe close.
exec {guard}> >(
  exec >/dev/null 2>&1
  trap '' INT TERM HUP
  groups=()
  while read -r group; do groups+=("-$group"); done
  kill -KILL -- "${groups[@]}"
)
declare -A running=() && declare -a markers=() groups=()
# shellcheck disable=SC2329 # called by the traps
pass() { [ ${#running[@]} = 0 ] || kill "-$1" "${running[@]}" 2>/dev/null || :; }
# shellcheck disable=SC2064 # the name of now
for name in INT TERM HUP USR1; do trap "pass $name" "$name"; done
for ((i = 0; i < count; i++)); do
  command=("$python" -m jaxgpt.cli "$verb" --coordinator "127.0.0.1:$port" --process "$i" --processes "$count" "$@")
  if [ -n "${GPUS:-}" ]; then export CUDA_VISIBLE_DEVICES=${gpus[i]}; fi
  if [ "$i" = 0 ]; then
    "${command[@]}" {guard}>&- &
  else
    exec {marked}> >(exec {guard}>&- && prefixed "$i")
    markers[i]=$!
    "${command[@]}" {guard}>&- >/dev/null 2>&"$marked" {marked}>&- &
    exec {marked}>&-
  fi
  running[$i]=$! groups[i]=-$!
  echo "$!" >&"$guard"
done

{ # read whole by Bash, so that a change of this file meanwhile is not
  codes=() deadline=""
  while [ ${#running[@]} -gt 0 ]; do
    wait -n "${running[@]}" 2>/dev/null || : # a signal ends the waiting, too, so look who is gone
    for i in "${!running[@]}"; do
      if kill -0 "${running[$i]}" 2>/dev/null; then continue; fi
      code=0
      wait "${running[$i]}" 2>/dev/null || code=$?
      unset "running[$i]"
      codes+=("$code")
      [ "$code" != 0 ] || continue
      say "process $i ended with exit code $code"
      if [ -n "$deadline" ] || [ ${#running[@]} = 0 ]; then continue; fi
      (sleep "${JAXGPT_GRACE:-120}" && kill -KILL "${running[@]}") {guard}>&- >/dev/null 2>&1 &
      deadline=$!
      echo "$deadline" >&"$guard"
    done
  done
  kill -KILL -- "${groups[@]}" 2>/dev/null || : # whoever still holds standard error: then its readers end
  wait "${markers[@]}" 2>/dev/null || :
  exit "$(most_telling "${codes[@]}")"
}
