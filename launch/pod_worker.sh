#!/usr/bin/env bash
# What launch/tpu_pod.sh runs on each host of a slice. The job outlives the connection that started it.
#
#   bash launch/pod_worker.sh start VERB ...   install and start the job, unless one is running
#   bash launch/pod_worker.sh follow           print what it prints, until it ends
#   bash launch/pod_worker.sh state            print state=running, or its exit code: state=75; state=none without a job
#   bash launch/pod_worker.sh step WORD ...    print step=N, the newest saved step of the run that these words name
#   bash launch/pod_worker.sh stop             end it, with a save; by force after JAXGPT_GRACE (600) seconds
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
source launch/restart.sh

job=${JAXGPT_JOB:-$HOME/.jaxgpt-job}
mkdir -p "$job"
# The job holds a lock as long as any process of it lives, which neither a reboot nor a reused process id can feign.
running() { ! flock -n "$job/lock" true; }

python_of_this_host() {
  if [ -z "${JAXGPT_PYTHON:-}" ] && ! find_python >/dev/null 2>&1; then # images of TPU hosts have Python 3.10
    python3 -m pip install --quiet --user uv >&2
    python3 -m uv python install 3.13 >&2
    PYTHON=$(python3 -m uv python find 3.13)
    export PYTHON
  fi
  jaxgpt_python tpu
}

case ${1:-} in
  start)
    exec 9>"$job/lock"
    flock -w 2 9 || exit 0
    rm -f "$job/code" "$job/pid"
    python=$(python_of_this_host 9>&-)
    export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
    # shellcheck disable=SC2016 # expanded by the job
    nohup setsid bash -c 'source launch/processes.sh; code=0; attend "$@" || code=$?; echo "$code" >"$0/code"' \
      "$job" "$python" -m jaxgpt.cli "${@:2}" >"$job/log" 2>&1 </dev/null &
    echo "$!" >"$job/pid"
    ;;
  follow)
    if running; then tail -n 200 -f -s 0.2 --pid "$(cat "$job/pid")" "$job/log"; else tail -n 200 "$job/log"; fi
    flock "$job/lock" true
    ;;
  state) if running; then echo state=running; else echo "state=$(cat "$job/code" 2>/dev/null || echo none)"; fi ;;
  step)
    python=$(python_of_this_host)
    echo "step=$(newest_step "$(run_dir_of "$python" "${@:2}")")"
    ;;
  stop)
    if running; then
      kill -TERM "$(cat "$job/pid")"
      flock -w "${JAXGPT_GRACE:-600}" "$job/lock" true || pkill -KILL -P "$(cat "$job/pid")"
      flock -w 30 "$job/lock" true
    fi
    ;;
  *) say "usage: bash launch/pod_worker.sh start|follow|state|step|stop ..." && exit 64 ;;
esac
