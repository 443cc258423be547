#!/usr/bin/env bash
# Run jaxgpt on this machine: CPU, GPU or the TPUs of one host.
#
#   bash launch/local.sh              the quickstart: tokenizer, data, training, evaluation, samples
#   bash launch/local.sh VERB ...     any verb of the jaxgpt command, for example: train configs/quickstart.toml
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

python=$(find_python)
make_environment .venv "$python" "$(accelerator_extra)"
# Huge pages make fresh large buffers 4-6 times cheaper on a CPU; glibc reads this at process start only.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
jaxgpt() { .venv/bin/python -m jaxgpt.cli "$@"; }

if [ $# -gt 0 ]; then
  jaxgpt "$@"
  exit
fi

config=configs/quickstart.toml
run=runs/quickstart
jaxgpt tokenizer train "$config"
jaxgpt prepare "$config"
jaxgpt train "$config"
jaxgpt generate "$run" --max-new-tokens 80 --temperature 0.8 --top-p 0.95 --seed 1 \
  --prompt 'def read_' --prompt 'class ' --prompt 'import '
cat <<END

Everything lies in $run: metrics.jsonl (one object per logged step), tensorboard/, ckpt/, tokenizer.model,
config.toml (every value and where it came from), data/ (the token store). Three commands to try next:

  bash launch/local.sh train $config train.num_steps=2000 optim.lr=1e-3 run.dir=runs/longer
  bash launch/local.sh eval $run --data README.md
  bash launch/local.sh generate $run --prompt 'def main(' --temperature 0.7 --top-k 40
END
