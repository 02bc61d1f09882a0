#!/usr/bin/env bash
# The models of the miniatures: random weights, then swift sft.   SEED=0 make_model.sh countdown|words FOLDER [its flags]
set -euo pipefail
cd "$(dirname "$0")/../.."
TASK=$1 FOLDER=$2 SEED=${SEED:-0}
shift 2
case $TASK in
  countdown) RANDOM_MODEL=examples/countdown_demo/tiny_model.py PLUGIN=examples/countdown_demo/plugin.py DATA=countdown_traces ;;
  words) RANDOM_MODEL=examples/mini/word_model.py PLUGIN=examples/mini/word_plugin.py DATA=word_traces ;;
  *) echo "$TASK is none of countdown, words" >&2; exit 2 ;;
esac

# transformers imports DeepSpeed, which would say that it looks for a GPU
DS_ACCELERATOR=cpu python $RANDOM_MODEL --output_dir "$FOLDER-random" --seed "$SEED"
swift sft examples/countdown_demo/warm_start.yaml --model "$FOLDER-random" --seed "$SEED" \
  --external_plugins $PLUGIN --dataset $DATA --output_dir "$FOLDER-warm" --add_version false "$@"
mv "$FOLDER-warm"/checkpoint-* "$FOLDER"
