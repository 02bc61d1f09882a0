#!/usr/bin/env bash
# The same on a CPU in one process, with a model of 0.6 M parameters that is made first.   SEED=0 mini.sh [more flags]
set -euo pipefail
cd "$(dirname "$0")/../.."
MODEL=${MODEL:-models/mini/countdown}
[ -e "$MODEL" ] || examples/mini/make_model.sh countdown "$MODEL"

swift rlhf --rlhf_type grpo \
  --model "$MODEL" --train_type full --torch_dtype float32 --seed "${SEED:-0}" \
  --external_plugins examples/countdown_demo/plugin.py --reward_funcs countdown_expression \
  --dataset countdown_mini --response_prefix '<think>' --stop_words '<|end|>' '</answer>' \
  --max_completion_length 160 --num_generations 8 --temperature 1.0 --top_p 0.9 \
  --max_steps 48 --num_train_epochs 100 --generation_batch_size 1024 --per_device_train_batch_size 32 --gradient_accumulation_steps 4 \
  --learning_rate 3e-4 --adam_beta2 0.999 --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr_rate": 0.1}' \
  --warmup_ratio 0 --weight_decay 0 --beta 1e-3 \
  --gradient_checkpointing false \
  --eval_on_start true --eval_unit rollout --eval_steps 3 --eval_temperature 1 --eval_limit 128 --num_generations_eval 4 \
  --per_device_eval_batch_size 512 --save_steps 1000 --logging_steps 1 --report_to none \
  --output_dir "${OUTPUT:-output/mini/countdown_grpo_zero}" "$@"
