# For launch/tpu_pod.sh (sourced, not run): a slice as a queued resource of Cloud TPU, named by POD, ZONE, TYPE.
# shellcheck shell=bash

tpus() { gcloud compute tpus queued-resources "$1" "${@:2}" --zone "$ZONE" --quiet; }

# slice_state: print the slice's state, or ABSENT where the cloud says that there is none; other failures, such as a
# login that has run out or a lost connection, are shown and tell nothing about the slice.
slice_state() {
  local errors code=0
  errors=$(mktemp)
  tpus describe "$POD" --format 'value(state.state)' 2>"$errors" || code=$?
  if [ "$code" != 0 ] && grep -q NOT_FOUND "$errors"; then
    echo ABSENT && code=0
  elif [ "$code" != 0 ]; then
    cat "$errors" >&2
  fi
  rm -f "$errors"
  return "$code"
}

# again COMMAND ...: try it 5 times; a new host takes a while to answer, and connections drop.
again() {
  local try
  for try in 1 2 3 4 5; do
    "$@" && return
    [ "$try" = 5 ] || sleep "${JAXGPT_POLL:-15}"
  done
  return 76
}

# check_words WORD ...: refuse a file that is here, but that git does not track, so that the hosts would not get it.
check_words() {
  local word
  for word in "$@"; do
    if [ -f "$word" ] && ! git ls-files --error-unmatch -- "$word" >/dev/null 2>&1; then
      say "$word: git does not track it, so the hosts do not get it; git add it first" && return 64
    fi
  done
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
  while now=$(again slice_state) || return; [ "$now" != ACTIVE ]; do
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
