#!/usr/bin/env bash
# Which ends of a job are tried again, and when to give up: the one place that knows. Sourced by the other scripts.
#
#   bash launch/restart.sh RUN_DIR COMMAND ...   run COMMAND again and again, until it is done or a person is needed
#
# Tried again: 75 (interrupted, saved), 76, 134, 137 (stuck, or a host was lost or killed); once each time: 70 (bug),
# 74 (storage), 1 and 139 (crash of the runtime). After JAXGPT_RESTARTS (3) starts in a row that ended without a later
# saved step it stops. Pauses begin at JAXGPT_BACKOFF (10) seconds. A stop by signal is passed on and is the end. The
# processes leave the name of the host that ended them in the file JAXGPT_BLAME; which it was, and how often, is said.

# shellcheck source=launch/processes.sh
source "$(dirname "${BASH_SOURCE[0]}")/processes.sh"
# shellcheck source=launch/run_dir.sh
source "$(dirname "${BASH_SOURCE[0]}")/run_dir.sh"
restarts=0 stalls=0 faults=0 pause=0 after=-1
declare -A blamed=() # how often a host was the one that ended the job

# judge CODE STEP RUN_DIR: succeed if a job that ended with CODE, and began when STEP was the newest, is to be started
# again, `pause` seconds from now; `after` is the newest step then. One line says why, or why not.
judge() {
  local code=$1 before=$2 limit=${JAXGPT_RESTARTS:-3} by=""
  case $code in
    0) return 1 ;;
    1 | 70 | 74 | 75 | 76 | 134 | 137 | 139) ;;
    *) say "exit code $code: not tried again, it needs a person" && return 1 ;;
  esac
  count_blame
  if ! after=$(newest_step "$3"); then say "exit code $code, and the saved steps cannot be seen" && return 1; fi
  if ((after > before)); then
    stalls=0 faults=0
  elif ((restarts > 0)); then
    stalls=$((stalls + 1))
  fi
  case $code in 1 | 70 | 74 | 139) faults=$((faults + 1)) ;; esac
  if ((faults > 1)); then say "exit code $code again, newest saved step $after: not tried a third time$by" && return 1; fi
  if ((stalls >= limit)); then say "exit code $code: still at step $after after $stalls restart(s)$by" && return 1; fi
  ((restarts += 1))
  pause=$((code == 75 ? 0 : ${JAXGPT_BACKOFF:-10} << (stalls < 5 ? stalls : 5)))
  say "exit code $code, newest saved step $after (was $before): restart $restarts in $pause s$by"
}

# count_blame: note the host that ended the job, so that `by` tells how often it has.
count_blame() {
  local host=""
  by=""
  if [ -z "${JAXGPT_BLAME:-}" ] || ! read -r host 2>/dev/null <"$JAXGPT_BLAME"; then return 0; fi
  : >"$JAXGPT_BLAME"
  [[ "$host" =~ ^[A-Za-z0-9._-]+$ ]] || return 0
  blamed[$host]=$((${blamed[$host]:-0} + 1))
  by="; host $host ended it"
  if ((blamed[$host] > 1)); then by="$by ${blamed[$host]} times: look at it, or leave it out"; fi
}

# until_done RUN_DIR COMMAND ...: what this script does, see above; returns the last exit code.
until_done() {
  local run=$1 before code
  shift
  before=$(newest_step "$run") || return
  while :; do
    attend "$@" && code=0 || code=$?
    if [ -n "$stopped" ]; then say "stopped by SIG$stopped, exit code $code" && return "$code"; fi
    judge "$code" "$before" "$run" || return "$code"
    before=$after
    sleep "$pause"
  done
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  [ $# -ge 2 ] || { say "usage: bash launch/restart.sh RUN_DIR COMMAND ..." && exit 64; }
  if [ -z "${JAXGPT_BLAME:-}" ]; then
    JAXGPT_BLAME=$(mktemp)
    trap 'rm -f "$JAXGPT_BLAME"' EXIT
  fi
  export JAXGPT_BLAME
  until_done "$@"
  exit # Bash reads a script bit by bit: what is changed in it meanwhile must not be read
fi
