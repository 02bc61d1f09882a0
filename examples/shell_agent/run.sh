#!/usr/bin/env bash
# A model made from scratch learns twenty tasks of a shell, on a CPU.   SEED=0 run.sh [more flags of swift rlhf]
set -euo pipefail
cd "$(dirname "$0")/../.."
SEED=${SEED:-0} HERE=examples/shell_agent TASKS=${TASKS:-data/shell_tasks}
MODEL=${MODEL:-models/shell/seed-$SEED}
[ -e "$TASKS" ] || python $HERE/shell_tasks.py --output_dir "$TASKS"
if [ ! -e "$MODEL" ]; then
  DS_ACCELERATOR=cpu python $HERE/shell_model.py --output_dir "$MODEL-random" --seed "$SEED"
  swift sft examples/countdown_demo/warm_start.yaml --model "$MODEL-random" --seed "$SEED" \
    --external_plugins $HERE/plugin.py --dataset drawn_commands --output_dir "$MODEL-warm" --add_version false
  mv "$MODEL-warm"/checkpoint-* "$MODEL"
fi

swift rlhf --rlhf_type grpo --model "$MODEL" --torch_dtype float32 --seed "$SEED" \
  --env "harbor:$TASKS/train" --env_args "{\"eval\": \"$TASKS/eval\", \"reply\": \"command\"}" \
  --max_turns 3 --max_completion_length 32 --agent_concurrency 128 --agent_timeout 60 \
  --num_generations 16 --per_device_train_batch_size 64 --gradient_accumulation_steps 2 --max_steps "${STEPS:-100}" \
  --learning_rate 5e-4 --adam_beta2 0.999 --weight_decay 0 --lr_scheduler_type constant_with_warmup --warmup_steps 3 \
  --gradient_checkpointing false --beta 0 \
  --eval_on_start true --eval_steps 30 --eval_limit 200 --num_generations_eval 2 --per_device_eval_batch_size 256 \
  --save_steps 1000 --logging_steps 1 --report_to none \
  --output_dir "${OUTPUT:-output/shell_agent/seed-$SEED}" --add_version false "$@"
