#!/usr/bin/env bash
# PPO with a critic on GSM8K, rho-1b-sft: GPUs 4-7 generate, GPUs 0-3 train.   run.sh [more flags of swift rlhf]
# TEMPERATURE=0.6 run.sh is one run of the exploration study (exploration.py makes all of them).
set -euo pipefail
cd "$(dirname "$0")/../.."
MODEL=${MODEL:-lkevinzc/rho-1b-sft-GSM8K}
PORT=${PORT:-8000}

CUDA_VISIBLE_DEVICES=4,5,6,7 swift rollout --model "$MODEL" --port "$PORT" --vllm_tensor_parallel_size 4 &
trap 'kill %1 2>/dev/null || true; wait' EXIT

CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=4 swift rlhf --rlhf_type ppo \
  --model "$MODEL" --train_type full --torch_dtype bfloat16 \
  --external_plugins plugins/gsm8k.py --reward_funcs gsm8k_last_number --dataset gsm8k \
  --stop_words $'\n\nQuestion' $'\n\nProblem' \
  --use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port "$PORT" --vllm_server_timeout 1800 \
  --max_length 1000 --max_completion_length 1024 --num_generations 8 --temperature "${TEMPERATURE:-1.2}" --top_p 0.9 \
  --num_train_epochs 6 --generation_batch_size 512 --per_device_train_batch_size 8 --gradient_accumulation_steps 2 \
  --num_ppo_epochs 2 --gamma 1 --lam 1 --kl_coef 0.0001 \
  --learning_rate 1e-6 --critic_learning_rate 1e-6 --lr_scheduler_type polynomial --warmup_ratio 0.03 --weight_decay 0 \
  --deepspeed zero2 \
  --eval_on_start true --eval_unit rollout --eval_steps 50 --eval_temperature 0.35 --eval_top_p 0.9 --num_generations_eval 16 \
  --eval_datasets '{"dataset": "gsm8k", "name": "gsm8k_test", "reward": "gsm8k_last_number", "instruction": ""}' \
  --save_steps 800 --save_total_limit 3 --logging_steps 1 --report_to wandb \
  --output_dir "${OUTPUT:-output/gsm8k_ppo}" "$@"
