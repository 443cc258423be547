# What the launch scripts know of a run's folder (sourced, not run): where it is, and how far it came.
# shellcheck shell=bash

# run_dir_of PYTHON WORD ...: run.dir of the configuration these words of `train` make; of a wrong one nothing, as the
# command itself says what is wrong.
run_dir_of() {
  "$1" -c 'import sys
from jaxgpt import cli, config
words = [word.removeprefix("--") for word in sys.argv[1:] if cli.is_configuration(word)]
files = [word for word in words if "=" not in word]
try:
    print(config.load(*files[:1], overrides=[word for word in words if "=" in word]).run.dir)
except Exception:
    pass' "${@:2}"
}

# newest_step RUN_DIR: the newest saved step, or -1; a step is saved when its commit record is there.
newest_step() {
  local record step newest=-1
  for record in "$1"/ckpt/*.ok.json; do
    step=$(basename "$record" .ok.json)
    if [[ "$step" =~ ^(0|[1-9][0-9]{0,17})$ ]] && ((step > newest)); then newest=$step; fi
  done
  echo "$newest"
}
