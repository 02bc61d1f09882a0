#!/usr/bin/env bash
# Dr. GRPO on MATH: GPUs 4-7 generate, GPUs 0-3 train.   run.sh [1.5b|7b|llama] [r1|qwen_math|no] [more flags of swift rlhf]
set -euo pipefail
cd "$(dirname "$0")/../.."
SIZE=${1:-1.5b} TEMPLATE=${2:-qwen_math}
shift $(($# < 2 ? $# : 2))
PORT=${PORT:-8000}
case $SIZE in
  1.5b) MODEL=${MODEL:-Qwen/Qwen2.5-Math-1.5B} DATA=math VERIFIER=fast ZERO=zero2 ;;
  7b) MODEL=${MODEL:-Qwen/Qwen2.5-Math-7B} DATA=math_lvl3to5 VERIFIER=math_verify ZERO=zero2 ;;
  llama) MODEL=${MODEL:-lkevinzc/Llama-3.2-3B-NuminaQA} DATA=math VERIFIER=fast ZERO=zero3 ;;
  *) echo "run.sh: $SIZE is none of 1.5b, 7b, llama" >&2; exit 2 ;;
esac
case $TEMPLATE in
  # The thought is opened for the model, and it ends with its answer, whose closing tag stays in the text.
  r1) FORM=(--prompt_template r1 --response_prefix ' <think>' --stop_words '</answer>' --reward_funcs math_tag_strict) ;;
  qwen_math | no) FORM=(--prompt_template "$TEMPLATE" --reward_funcs math) ;;
  *) echo "run.sh: $TEMPLATE is none of r1, qwen_math, no" >&2; exit 2 ;;
esac

CUDA_VISIBLE_DEVICES=4,5,6,7 swift rollout --model "$MODEL" --port "$PORT" --vllm_tensor_parallel_size 4 &
trap 'kill %1 2>/dev/null || true; wait' EXIT

CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo \
  --model "$MODEL" --train_type full --torch_dtype bfloat16 \
  --external_plugins plugins/math.py --dataset "$DATA" "${FORM[@]}" --verifier "$VERIFIER" --truncated_reward 0 \
  --use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port "$PORT" --vllm_server_timeout 1800 \
  --max_length 1024 --max_completion_length 3000 --num_generations 8 --temperature 1.0 --top_p 1.0 \
  --num_train_epochs 20 --generation_batch_size 1024 --per_device_train_batch_size 1 --gradient_accumulation_steps 32 \
  --loss_type dr_grpo --scale_rewards none --num_iterations 1 --beta 0 \
  --learning_rate 1e-6 --lr_scheduler_type constant --weight_decay 0 --deepspeed "$ZERO" \
  --eval_on_start true --eval_unit rollout --eval_steps 16 --eval_temperature 0 --num_generations_eval 1 --eval_max_completion_length 3000 \
  --eval_datasets aime24 amc23 math500 minerva olympiad_bench \
  --save_steps 128 --save_total_limit 5 --logging_steps 1 --report_to wandb \
  --output_dir "${OUTPUT:-output/math_dr_grpo/$SIZE-$TEMPLATE}" "$@"
