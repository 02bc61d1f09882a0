#!/usr/bin/env bash
# Qwen2.5-3B-Instruct learns Countdown: GPU 2 generates, GPUs 0 and 1 train.   run.sh [more flags of swift rlhf]
set -euo pipefail
cd "$(dirname "$0")/../.."
MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
PORT=${PORT:-8000}

CUDA_VISIBLE_DEVICES=2 swift rollout --model "$MODEL" --port "$PORT" &
trap 'kill %1 2>/dev/null || true; wait' EXIT

CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 swift rlhf --rlhf_type grpo \
  --model "$MODEL" --train_type full --torch_dtype bfloat16 \
  --external_plugins plugins/countdown.py --reward_funcs external_countdown format \
  --dataset 'countdown#50000' --load_from_cache_file true \
  --system 'You are a helpful assistant. You first thinks about the reasoning process in the mind and then provides the user with the answer.' \
  --use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port "$PORT" --vllm_server_timeout 1800 \
  --max_length 2048 --max_completion_length 1024 --num_generations 8 --temperature 1.0 \
  --num_train_epochs 1 --per_device_train_batch_size 8 --gradient_accumulation_steps 8 --num_iterations 1 \
  --learning_rate 5e-7 --warmup_ratio 0.01 --beta 0.001 --deepspeed zero3 \
  --eval_steps 500 --per_device_eval_batch_size 8 --split_dataset_ratio 0.01 \
  --save_steps 100 --save_total_limit 20 --logging_steps 1 --log_completions true --report_to wandb \
  --output_dir "${OUTPUT:-output/countdown_grpo_server}" "$@"
