# For launch/tpu_pod.sh (sourced, not run): a slice as a queued resource of Cloud TPU, named by POD, ZONE, TYPE.
# shellcheck shell=bash

tpus() { gcloud compute tpus queued-resources "$1" "${@:2}" --zone "$ZONE" --quiet; }

slice_state() { tpus describe "$POD" --format 'value(state.state)' 2>/dev/null || echo ABSENT; }

# again COMMAND ...: try it 5 times; a new host takes a while to answer, and connections drop.
again() {
  local try
  for try in 1 2 3 4 5; do
    "$@" && return
    [ "$try" = 5 ] || sleep "${JAXGPT_POLL:-15}"
  done
  return 76
}

create_slice() {
  local image=tpu-ubuntu2204-base
  local -a size=(--node-id "$POD")
  [ -n "${TYPE:-}" ] || { say "set TYPE, as in TYPE=v5p-128" && return 64; }
  case $TYPE in
    v6e*) image=v2-alpha-tpuv6e ;;
    v5p*) image=v2-alpha-tpuv5 ;;
    v5lite*) image=v2-alpha-tpuv5-lite ;;
  esac
  if [ "${SLICES:-1}" != 1 ]; then size=(--node-count "$SLICES" --node-prefix "$POD"); fi
  tpus create "$POD" "${size[@]}" --accelerator-type "$TYPE" --runtime-version "${VERSION:-$image}" ${SPOT:+--spot} >&2
}

# provide_slice: return when the slice is there. One that was preempted, or had failed before, is deleted and asked for
# anew; one that fails after it was asked for here is an error.
provide_slice() {
  local now said="" asked=""
  while now=$(slice_state) && [ "$now" != ACTIVE ]; do
    [ "$now" = "$said" ] || say "slice $POD in $ZONE: $now"
    said=$now
    case $now in
      ABSENT) create_slice || return && asked=yes ;;
      FAILED)
        if [ -n "$asked" ]; then tpus describe "$POD" >&2 && return 74; fi
        tpus delete "$POD" --force >&2 || return
        ;;
      SUSPENDED) tpus delete "$POD" --force >&2 || return ;;
      *) sleep "${JAXGPT_POLL:-15}" ;; # in the queue, being made, or going
    esac
  done
}
