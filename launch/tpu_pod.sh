#!/usr/bin/env bash
# Run a verb on a Cloud TPU slice: create or find it, copy the code, install, start on all hosts, watch, start again.
#
#   export POD=llama ZONE=us-east5-a TYPE=v5p-128   also: SPOT=1, SLICES=2 (joined over the network), VERSION=IMAGE
#   bash launch/tpu_pod.sh train configs/llama3_8b.toml run.dir=/mnt/shared/run   a folder that all hosts see
#   bash launch/tpu_pod.sh --stop                   end the job with a save, and delete the slice
#
# The job lives on the hosts: after Ctrl-C or a lost connection the same command goes on watching it. When it ends, or
# the slice is preempted, launch/restart.sh decides whether it is started again. The slice is there, and paid for, until
# --stop.
# shellcheck disable=SC2329 # attempt and what it calls are called by name
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/restart.sh
source launch/tpu_slice.sh
source launch/tpu_hosts.sh
[ -n "${POD:-}" ] && [ -n "${ZONE:-}" ] && [ $# -gt 0 ] ||
  { say "set POD and ZONE, and name a verb, or --stop" && exit 64; }
words=("$@")

# ready: the slice is there, and the job runs on all hosts, or on none and they have the code.
ready() {
  local found
  provide_slice || return
  # A job that runs is not ended for a connection that dropped; hosts of a new slice have nothing to answer yet.
  if ! found=$(states) && [[ "$found" = *running* ]]; then found=$(again states | sort -u) || found+=" incomplete"; fi
  [ "$found" != state=running ] || return 0
  if [[ "$found" = *running* ]]; then again on_all stop >&2 || return; fi
  copy
}

# In place of the function of launch/restart.sh: the folder of the run is seen by the hosts only.
newest_step() {
  trap 'exit 130' INT # however gcloud takes it
  ready && again on_first step "${words[@]}" | sed -n 's/^step=//p' | tail -n 1
}

# follow: pass on what the first host prints. Waited for in the background: in the foreground an interrupt would count
# only when gcloud ends, and one that comes while its Python starts is lost there.
follow() { on_first follow & wait $!; }

attempt() {
  local codes
  set +m # so that what it calls is in its own group, to which Ctrl-C is passed on
  trap 'exit 130' INT # however gcloud takes it
  again on_all start "${words[@]}" >&2 && again follow || return
  while codes=$(again on_all state | sed -n 's/^state=//p') || return; [[ "$codes" = *running* ]]; do
    sleep "${JAXGPT_POLL:-15}" # the other hosts end when they find the first gone
  done
  # shellcheck disable=SC2086 # a word for each host; one that knows of no job was started anew
  return "$(most_telling ${codes//none/137})"
}

{ # read whole by Bash, so that a change of this file meanwhile is not
  code=0
  if [ "$1" = --stop ]; then
    now=$(again slice_state) ||
      { say "slice $POD in $ZONE: no answer; it is as it was, and paid for: try again" && exit 76; }
    if [ "$now" = ABSENT ]; then say "slice $POD in $ZONE: $now" && exit 0; fi
    if [ "$now" = ACTIVE ] && ! again on_all stop; then say "not all hosts answer; the slice goes all the same"; fi
    tpus delete "$POD" --force || code=$?
  else
    check_words "$@" && until_done "" attempt || code=$?
    [ -z "$stopped" ] || say "the job goes on; the same command goes on watching it"
  fi
  exit "$code"
}
