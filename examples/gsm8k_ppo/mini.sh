#!/usr/bin/env bash
# The same on a CPU in one process, with a model of 0.6 M parameters and two-step word problems.   SEED=0 mini.sh [flags]
set -euo pipefail
cd "$(dirname "$0")/../.."
MODEL=${MODEL:-models/mini/words}
[ -e "$MODEL" ] || examples/mini/make_model.sh words "$MODEL"

swift rlhf --rlhf_type ppo \
  --model "$MODEL" --train_type full --torch_dtype float32 --seed "${SEED:-0}" \
  --external_plugins plugins/gsm8k.py examples/mini/word_plugin.py --reward_funcs gsm8k_last_number --dataset word_problems \
  --stop_words $'\n\nQuestion' $'\n\nProblem' \
  --max_length 256 --max_completion_length 64 --num_generations 8 --temperature "${TEMPERATURE:-1.2}" --top_p 0.9 \
  --max_steps 96 --num_train_epochs 100 --generation_batch_size 256 --per_device_train_batch_size 64 --gradient_accumulation_steps 1 \
  --num_ppo_epochs 2 --gamma 1 --lam 1 --kl_coef 0.0001 \
  --learning_rate 2e-4 --critic_learning_rate 5e-4 --adam_beta2 0.999 --lr_scheduler_type polynomial --warmup_ratio 0.03 --weight_decay 0 \
  --gradient_checkpointing false \
  --eval_on_start true --eval_unit rollout --eval_steps 6 --eval_temperature 1 --eval_top_p 0.9 --num_generations_eval 2 \
  --per_device_eval_batch_size 400 \
  --eval_datasets '{"dataset": "word_problems", "name": "held_out", "reward": "gsm8k_last_number", "limit": 200}' \
  --save_steps 1000 --logging_steps 1 --report_to none \
  --output_dir "${OUTPUT:-output/mini/gsm8k_ppo}" "$@"
