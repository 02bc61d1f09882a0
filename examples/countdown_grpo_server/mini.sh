#!/usr/bin/env bash
# The same two processes on a CPU, with a model of 0.6 M parameters that is made first.   SEED=0 mini.sh [more flags]
set -euo pipefail
cd "$(dirname "$0")/../.."
MODEL=${MODEL:-models/mini/countdown}
PORT=${PORT:-8000}
[ -e "$MODEL" ] || examples/mini/make_model.sh countdown "$MODEL"

swift rollout --model "$MODEL" --port "$PORT" --torch_dtype float32 &
trap 'kill %1 2>/dev/null || true; wait' EXIT

NPROC_PER_NODE=2 swift rlhf --rlhf_type grpo \
  --model "$MODEL" --train_type full --torch_dtype float32 --seed "${SEED:-0}" \
  --external_plugins examples/countdown_demo/plugin.py --reward_funcs countdown format \
  --dataset countdown_mini --load_from_cache_file true \
  --use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port "$PORT" \
  --max_completion_length 160 --num_generations 8 --temperature 1.0 \
  --max_steps 32 --num_train_epochs 100 --per_device_train_batch_size 8 --gradient_accumulation_steps 8 --num_iterations 1 \
  --learning_rate 3e-4 --adam_beta2 0.999 --warmup_ratio 0.05 --beta 0.001 --deepspeed zero3 \
  --gradient_checkpointing false \
  --eval_on_start true --eval_steps 16 --eval_limit 128 --num_generations_eval 4 \
  --save_steps 1000 --logging_steps 1 --report_to none \
  --output_dir "${OUTPUT:-output/mini/countdown_grpo_server}" "$@"
