#!/usr/bin/env bash
# A model made from scratch learns to use a calculator, on a CPU.   WAY=agent SEED=0 run.sh [more flags of swift rlhf]
# WAY: tools (the run calls the tool), agent (a program that knows OpenAI's client does), command (as its own process).
set -euo pipefail
cd "$(dirname "$0")/../.."
SEED=${SEED:-0} WAY=${WAY:-tools}
HERE=examples/calculator_agent MODEL=${MODEL:-models/calculator/seed-$SEED}
if [ ! -e "$MODEL" ]; then
  DS_ACCELERATOR=cpu python $HERE/calculator_model.py --output_dir "$MODEL-random" --seed "$SEED"
  swift sft examples/countdown_demo/warm_start.yaml --model "$MODEL-random" --seed "$SEED" \
    --external_plugins $HERE/plugin.py --dataset drawn_calls --output_dir "$MODEL-warm" --add_version false
  mv "$MODEL-warm"/checkpoint-* "$MODEL"
fi

case $WAY in
  tools) OWN=(--external_plugins $HERE/plugin.py --tools calculate --max_turns 4 --reward_funcs right_total) ;;
  agent) OWN=(--external_plugins $HERE/plugin.py $HERE/agent_plugin.py --agent calculator) ;;
  command) OWN=(--external_plugins $HERE/plugin.py --agent_command "python $HERE/agent.py") ;;
  *) echo "WAY=$WAY is none of tools, agent, command" >&2; exit 2 ;;
esac

swift rlhf --rlhf_type grpo --model "$MODEL" --torch_dtype float32 --seed "$SEED" \
  "${OWN[@]}" --dataset two_calls --max_completion_length 40 \
  --num_generations 16 --per_device_train_batch_size 64 --gradient_accumulation_steps 2 --max_steps "${STEPS:-90}" \
  --learning_rate 3e-4 --adam_beta2 0.999 --weight_decay 0 --lr_scheduler_type constant_with_warmup --warmup_steps 3 \
  --gradient_checkpointing false --beta 0 \
  --eval_on_start true --eval_steps 15 --eval_limit 128 --num_generations_eval 2 --per_device_eval_batch_size 256 \
  --save_steps 1000 --logging_steps 1 --report_to none \
  --output_dir "${OUTPUT:-output/calculator_agent/$WAY-$SEED}" --add_version false "$@"
