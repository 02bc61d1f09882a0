#!/usr/bin/env bash
# Qwen2.5-3B, a base model, in 4 bit with LoRA learns GSM8K on one GPU of 24 GB.   run.sh [more flags of swift rlhf]
# STEPS=600 BATCH=32 run.sh is the run on a larger card.
set -euo pipefail
cd "$(dirname "$0")/../.."
MODEL=${MODEL:-Qwen/Qwen2.5-3B}

CUDA_VISIBLE_DEVICES=0 swift rlhf --rlhf_type grpo \
  --model "$MODEL" --torch_dtype bfloat16 \
  --train_type qlora --quant_bits 4 --lora_rank 64 --lora_alpha 64 --target_modules all-linear \
  --external_plugins plugins/gsm8k.py --reward_funcs gsm8k_answer_tag --dataset gsm8k \
  --system 'Think the question through before you answer it, and write in this form: <reasoning> your thoughts </reasoning> <answer> one whole number and nothing else </answer>' \
  --prompt_template examples/gsm8k_single_gpu/prompt.jinja --response_prefix '<reasoning>' \
  --max_length 256 --max_completion_length 750 --num_generations 8 \
  --max_steps "${STEPS:-200}" --num_train_epochs 10 --per_device_train_batch_size "${BATCH:-16}" --gradient_accumulation_steps 1 \
  --learning_rate 1e-5 --lr_scheduler_type cosine --warmup_ratio 0.1 --weight_decay 0.1 --max_grad_norm 0.1 \
  --optim adamw_8bit --adam_beta2 0.99 --beta 0.04 \
  --eval_on_start true --eval_steps 100 --eval_limit 200 --num_generations_eval 1 --per_device_eval_batch_size 32 \
  --save_steps 100 --logging_steps 1 --report_to wandb \
  --output_dir "${OUTPUT:-output/gsm8k_single_gpu}" "$@"
