#!/usr/bin/env bash
# The same on a CPU, with a model of 0.6 M parameters and two-step word problems.   SEED=0 mini.sh [more flags]
set -euo pipefail
cd "$(dirname "$0")/../.."
MODEL=${MODEL:-models/mini/words}
[ -e "$MODEL" ] || examples/mini/make_model.sh words "$MODEL"

swift rlhf --rlhf_type grpo \
  --model "$MODEL" --torch_dtype float32 --seed "${SEED:-0}" \
  --train_type qlora --quant_bits 4 --lora_rank 64 --lora_alpha 64 --target_modules all-linear \
  --external_plugins plugins/gsm8k.py examples/mini/word_plugin.py --reward_funcs gsm8k_answer_tag --dataset word_problems \
  --system 'think first, then give one number. <reasoning> reasoning here </reasoning> <answer> number here </answer>' \
  --response_prefix '<reasoning>' \
  --max_length 256 --max_completion_length 48 --num_generations 8 \
  --max_steps 60 --num_train_epochs 10 --per_device_train_batch_size 64 --gradient_accumulation_steps 1 \
  --learning_rate 5e-4 --lr_scheduler_type cosine --warmup_ratio 0.1 --weight_decay 0.1 --max_grad_norm 0.1 \
  --optim adamw_8bit --adam_beta2 0.99 --beta 0.04 --gradient_checkpointing false \
  --eval_on_start true --eval_steps 30 --eval_limit 200 --num_generations_eval 1 --per_device_eval_batch_size 200 \
  --save_steps 1000 --logging_steps 1 --report_to none \
  --output_dir "${OUTPUT:-output/mini/gsm8k_single_gpu}" "$@"
