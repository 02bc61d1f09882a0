#!/usr/bin/env bash
# Qwen2.5-3B, a base model, learns Countdown: GPUs 4-7 generate, GPUs 0-3 train.   run.sh [more flags of swift rlhf]
set -euo pipefail
cd "$(dirname "$0")/../.."
MODEL=${MODEL:-Qwen/Qwen2.5-3B}
PORT=${PORT:-8000}

CUDA_VISIBLE_DEVICES=4,5,6,7 swift rollout --model "$MODEL" --port "$PORT" --vllm_tensor_parallel_size 4 &
trap 'kill %1 2>/dev/null || true; wait' EXIT

CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo \
  --model "$MODEL" --train_type full --torch_dtype bfloat16 \
  --external_plugins plugins/countdown.py --reward_funcs countdown_expression \
  --dataset 'countdown_expression#50000' \
  --prompt_template r1 --response_prefix $' Let me solve this step by step.\n<think>' \
  --stop_words '</s>' '<|im_end|>' '<|endoftext|>' $'\nUser:' \
  --use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port "$PORT" --vllm_server_timeout 1800 \
  --max_length 256 --max_completion_length 1024 --num_generations 8 --temperature 1.0 --top_p 0.9 \
  --num_train_epochs 1 --generation_batch_size 1024 --per_device_train_batch_size 2 --gradient_accumulation_steps 16 \
  --learning_rate 1e-6 --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr_rate": 0.1}' --warmup_ratio 0 \
  --weight_decay 0 --beta 1e-3 --deepspeed zero2 \
  --eval_on_start true --eval_unit rollout --eval_steps 8 --eval_temperature 0 --val_dataset 'countdown_expression#200' --eval_limit 200 \
  --num_generations_eval 1 \
  --save_steps 200 --save_total_limit 5 --logging_steps 1 --report_to wandb \
  --output_dir "${OUTPUT:-output/countdown_grpo_zero}" "$@"
