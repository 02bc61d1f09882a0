#!/usr/bin/env bash
# SmolLM2-135M learns two-number Countdown on a CPU, through `swift rollout` (vLLM) and ZeRO-2 on two processes.
#   make smollm2; SEED=0 examples/smollm2_countdown/run.sh [more flags of swift rlhf]
# A run that was cut goes on: the same command with `--resume_from_checkpoint last`.
set -euo pipefail
cd "$(dirname "$0")/../.."
MODEL=${MODEL:-models/smollm2-135m} SEED=${SEED:-0} PORT=${PORT:-8000}

swift rollout --model "$MODEL" --port "$PORT" --max_model_len 256 --vllm_engine_kwargs '{"kv_cache_memory_bytes": 500000000}' &
trap 'kill %1 2>/dev/null || true; wait' EXIT

NPROC_PER_NODE=2 swift rlhf --rlhf_type grpo --model "$MODEL" --train_type full --torch_dtype bfloat16 --deepspeed zero2 \
  --external_plugins examples/smollm2_countdown/plugin.py --dataset countdown_two \
  --reward_funcs solved answer_tag --reward_weights 1 0.1 \
  --use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port "$PORT" \
  --response_prefix '<answer>' --stop_words '</answer>' --max_length 192 --max_completion_length 16 \
  --per_device_train_batch_size 64 --num_generations 8 --temperature 1.0 --max_steps 60 \
  --learning_rate 1e-5 --lr_scheduler_type constant_with_warmup --warmup_ratio 0.05 --beta 0 \
  --eval_on_start true --eval_steps 1000 --eval_limit 64 --num_generations_eval 4 --per_device_eval_batch_size 128 \
  --save_steps 20 --save_total_limit 1 --logging_steps 1 --report_to none \
  --seed "$SEED" --output_dir "${OUTPUT:-output/smollm2_countdown/seed-$SEED}" --add_version false "$@"
