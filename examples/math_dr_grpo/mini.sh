#!/usr/bin/env bash
# The same on a CPU in one process, with a model of 0.6 M parameters and two-step word problems.   SEED=0 mini.sh [flags]
set -euo pipefail
cd "$(dirname "$0")/../.."
MODEL=${MODEL:-models/mini/words}
[ -e "$MODEL" ] || examples/mini/make_model.sh words "$MODEL"

swift rlhf --rlhf_type grpo \
  --model "$MODEL" --train_type full --torch_dtype float32 --seed "${SEED:-0}" \
  --external_plugins examples/mini/word_plugin.py --dataset word_problems \
  --prompt_template qwen_math --reward_funcs math --verifier fast --truncated_reward 0 \
  --max_length 256 --max_completion_length 48 --num_generations 8 --temperature 1.0 --top_p 1.0 \
  --max_steps 48 --num_train_epochs 20 --generation_batch_size 512 --per_device_train_batch_size 64 --gradient_accumulation_steps 1 \
  --loss_type dr_grpo --scale_rewards none --num_iterations 1 --beta 0 \
  --learning_rate 2e-4 --adam_beta2 0.999 --lr_scheduler_type constant --weight_decay 0 --gradient_checkpointing false \
  --eval_on_start true --eval_unit rollout --eval_steps 3 --eval_temperature 1 --num_generations_eval 1 --per_device_eval_batch_size 200 \
  --eval_datasets '{"dataset": "word_problems", "name": "held_out", "reward": "math", "limit": 200}' \
  --save_steps 1000 --logging_steps 1 --report_to none \
  --output_dir "${OUTPUT:-output/mini/math_dr_grpo}" "$@"
