#!/usr/bin/env bash
# A model made from scratch learns to use a calculator, on a CPU.   SEED=0 run.sh [more flags of swift rlhf]
# WAY=tools: the run calls the tool.
set -euo pipefail
cd "$(dirname "$0")/../.."
SEED=${SEED:-0} WAY=${WAY:-tools}
MODEL=${MODEL:-models/calculator/seed-$SEED}
[ -e "$MODEL" ] || python examples/calculator_agent/calculator_model.py --output_dir "$MODEL" --seed "$SEED"

case $WAY in
  tools) WAY_FLAGS=(--tools calculate --max_turns 4) ;;
  *) echo "WAY=$WAY is not tools" >&2; exit 2 ;;
esac

swift rlhf --rlhf_type grpo --model "$MODEL" --torch_dtype float32 --seed "$SEED" \
  --external_plugins examples/calculator_agent/plugin.py --dataset two_calls --reward_funcs right_total \
  "${WAY_FLAGS[@]}" --max_completion_length 40 \
  --num_generations 16 --per_device_train_batch_size 64 --gradient_accumulation_steps 4 --max_steps "${STEPS:-60}" \
  --learning_rate 3e-4 --adam_beta2 0.999 --weight_decay 0 --lr_scheduler_type constant_with_warmup --warmup_ratio 0.05 \
  --gradient_checkpointing false --beta 0 \
  --eval_on_start true --eval_steps 20 --eval_limit 128 --num_generations_eval 4 --per_device_eval_batch_size 512 \
  --save_steps 1000 --logging_steps 1 --report_to none \
  --output_dir "${OUTPUT:-output/calculator_agent/$WAY-$SEED}" --add_version false "$@"
