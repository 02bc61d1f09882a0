#!/usr/bin/env bash
# A model made from scratch learns to count what it sees, on a CPU.   SEED=0 run.sh [more flags of swift rlhf]
# DATA=counting_swapped: the same with the pictures of other rows.
set -euo pipefail
cd "$(dirname "$0")/../.."
SEED=${SEED:-0} DATA=${DATA:-counting} HERE=examples/counting
MODEL=${MODEL:-models/counting/seed-$SEED} OUTPUT=${OUTPUT:-output/counting/$DATA-$SEED}
COMMON=(
  --external_plugins $HERE/plugin.py --torch_dtype float32 --seed "$SEED"
  --freeze_vit false --freeze_aligner false --gradient_checkpointing false
  --adam_beta2 0.999 --weight_decay 0 --lr_scheduler_type linear --warmup_steps 5
  --logging_steps 1 --save_steps 1000 --report_to none --add_version false
)

if [ ! -e "$MODEL" ]; then
  DS_ACCELERATOR=cpu python $HERE/sighted_model.py --output_dir "$MODEL-random" --seed "$SEED"
  swift sft --model "$MODEL-random" "${COMMON[@]}" --dataset counting_form --max_steps 40 \
    --per_device_train_batch_size 64 --learning_rate 2e-3 --output_dir "$MODEL-warm"
  mv "$MODEL-warm/checkpoint-40" "$MODEL"
fi

swift rlhf --rlhf_type grpo --use_vllm false --model "$MODEL" "${COMMON[@]}" --dataset "$DATA" \
  --reward_funcs right_count --beta 0 --max_completion_length 4 \
  --num_generations 16 --per_device_train_batch_size 1024 --max_steps "${STEPS:-140}" --learning_rate 1e-3 \
  --eval_on_start true --eval_steps 20 --eval_limit 256 --num_generations_eval 2 --per_device_eval_batch_size 512 \
  --output_dir "$OUTPUT" "$@"
