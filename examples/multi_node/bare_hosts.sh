#!/usr/bin/env bash
# One run on several hosts. The same command on each of them, with its own number:
#   host A:  NODE_RANK=0 examples/multi_node/bare_hosts.sh
#   host B:  NODE_RANK=1 examples/multi_node/bare_hosts.sh
# and on a host that generates, first of all:
#   SWIFT_API_KEY=... swift rollout --model "$MODEL" --host 0.0.0.0
set -euo pipefail

: "${NODE_RANK:?the number of this host, from 0}"
: "${MASTER_ADDR:?the address of host 0, as the others reach it}"
: "${ROLLOUT_HOST:?the address of the host that generates}"
: "${SWIFT_API_KEY:?the key that the rollout server was given}"
export NNODES=${NNODES:-2} NPROC_PER_NODE=${NPROC_PER_NODE:-8} MASTER_PORT=${MASTER_PORT:-29500}
export NODE_RANK MASTER_ADDR SWIFT_API_KEY

# MODEL and OUTPUT are on a file system that all hosts share, under the same path.
exec swift rlhf --rlhf_type grpo \
  --model "${MODEL:?}" --output_dir "${OUTPUT:?}" --add_version false --resume_from_checkpoint last \
  --external_plugins plugins/countdown.py --dataset 'countdown#50000' --reward_funcs external_countdown format \
  --max_length 2048 --max_completion_length 1024 --num_generations 8 --per_device_train_batch_size 8 --learning_rate 1e-6 \
  --deepspeed zero3 --torch_dtype bfloat16 \
  --use_vllm true --vllm_server_host "$ROLLOUT_HOST" --ddp_timeout 600 "$@"
