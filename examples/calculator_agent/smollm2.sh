#!/usr/bin/env bash
# Rewards SmolLM2-135M, which knows no tools, for calls of the right form, on a CPU, through `swift rollout` (vLLM).
#   make smollm2; SEED=0 examples/calculator_agent/smollm2.sh [more flags of swift rlhf]
set -euo pipefail
cd "$(dirname "$0")/../.."
MODEL=${MODEL:-models/smollm2-135m} SEED=${SEED:-0} PORT=${PORT:-8000}

swift rollout --model "$MODEL" --port "$PORT" --max_model_len 512 --vllm_engine_kwargs '{"kv_cache_memory_bytes": 500000000}' &
trap 'kill %1 2>/dev/null || true; wait' EXIT

swift rlhf --rlhf_type grpo --model "$MODEL" --torch_dtype bfloat16 --seed "$SEED" \
  --external_plugins examples/calculator_agent/{plugin,smollm2_plugin}.py --dataset sums \
  --reward_funcs right_call any_call --reward_weights 1 0.2 \
  --tools calculate --prompt_template examples/calculator_agent/smollm2.jinja --max_turns 2 \
  --use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port "$PORT" \
  --max_length 400 --max_completion_length 40 --gradient_checkpointing false \
  --num_generations 8 --per_device_train_batch_size 32 --max_tokens_per_micro_batch 2048 --max_steps "${STEPS:-20}" \
  --learning_rate 3e-5 --lr_scheduler_type constant_with_warmup --warmup_steps 2 --beta 0 \
  --eval_on_start true --eval_steps 10 --eval_limit 64 --num_generations_eval 2 --per_device_eval_batch_size 128 \
  --save_steps 1000 --logging_steps 1 --report_to none \
  --output_dir "${OUTPUT:-output/calculator_agent/smollm2-$SEED}" --add_version false "$@"
