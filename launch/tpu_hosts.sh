# For launch/tpu_pod.sh (sourced, not run): the hosts of the slice POD, what is asked of them and copied to them.
# shellcheck shell=bash

all=(--node all --worker all)

worker() { printf 'bash jaxgpt/launch/pod_worker.sh' && printf ' %q' "$@"; }
on_all() { tpus ssh "$POD" "${all[@]}" --command "$(worker "$@")"; }
on_first() { tpus ssh "$POD" --node 0 --worker 0 --command "$(worker "$@")"; }

# copy: the tracked files, as they are here now, to all hosts. Those of an earlier copy go first; what else lies there,
# runs for example, stays.
copy() {
  local archive code=0
  local unpack='mkdir -p jaxgpt && cd jaxgpt && touch .copied && (grep -v "/$" .copied | xargs -r -d "\n" rm -f)'
  archive=$(mktemp) && pack "$archive" || return
  again tpus scp "$archive" "$POD:jaxgpt.tgz" "${all[@]}" >&2 &&
    again tpus ssh "$POD" "${all[@]}" --command "$unpack && tar -xzvf ../jaxgpt.tgz >.copied" >&2 || code=$?
  rm -f "$archive"
  return "$code"
}

# pack FILE: write them as an archive, by way of a commit in no branch that holds what has changed since the last one.
pack() {
  local changed
  changed=$(git -c user.name=jaxgpt -c user.email=jaxgpt@localhost stash create) || return
  git archive --format=tar.gz -o "$1" "${changed:-HEAD}"
}

# states: what the hosts say of the job, each answer once; fails where one does not answer.
states() { on_all state 2>/dev/null | sed -n '/^state=/p' | sort -u; }
