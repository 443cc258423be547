# Shared by the launch scripts (sourced, not run): processes that are passed signals, and what their exit codes tell.
# shellcheck shell=bash

# Who reads what is printed may leave, and a terminal may close: that must not end what is looked after here.
trap '' PIPE
say() { echo "jaxgpt: $*" >&2 || :; }

# prefixed WORD: standard input to standard error, each line behind [WORD].
prefixed() (
  trap '' INT TERM HUP
  while IFS= read -r line || [ -n "$line" ]; do echo "[$1] $line" >&2 || :; done
)

# most_telling CODE ...: of the exit codes of a job's processes the one that says what happened: a cause rather than
# what it did to the others, who find that a peer is lost (76) or are ended by the runtime (134).
most_telling() {
  local code rank best=99 found=0
  for code in "$@"; do
    case $code in
      78) rank=1 ;; 64 | 65 | 66) rank=2 ;; 79) rank=3 ;; 130 | 143) rank=4 ;; 70) rank=5 ;; 74) rank=6 ;;
      137) rank=8 ;; 134) rank=9 ;; 76) rank=10 ;; 75) rank=11 ;; 0) rank=12 ;; *) rank=7 ;;
    esac
    if ((rank < best)); then best=$rank found=$code; fi
  done
  echo "$found"
}

# attend COMMAND ...: run COMMAND, pass signals on to it, return its exit code and leave nothing of it behind.
# `stopped` names the signal that asked for an end, "" without.
stopped=""
attend() {
  local child="" code=0
  pass() { [ -z "$child" ] || kill "-$1" -- "$2$child" 2>/dev/null || :; }
  trap 'stopped=INT; pass INT -' INT # as a terminal does: to the whole group
  trap 'stopped=HUP; pass HUP -' HUP
  trap 'stopped=TERM; pass TERM ""' TERM
  trap 'pass USR1 ""' USR1
  set -m # its own process group; without this it would also ignore Ctrl-C, as background jobs of scripts do
  "$@" &
  child=$!
  set +m
  [ -z "$stopped" ] || pass TERM "" # a signal came before there was whom to pass it on to
  while kill -0 "$child" 2>/dev/null; do
    wait "$child" 2>/dev/null || : # which a signal ends, too; the code of what is gone can be asked for again
  done
  wait "$child" 2>/dev/null || code=$?
  pass KILL -
  trap - INT HUP TERM USR1
  return "$code"
}
