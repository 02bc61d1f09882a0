#!/usr/bin/env bash
# Tries images as the user who calls it, without root: scripts/try_image.sh SERVER-IMAGE MODEL-FOLDER [TRAINER-IMAGE].
# The server must become healthy and ready, answer a chat request with the key, refuse one without, and end on SIGTERM. A
# trainer must be refused with another key, and else train two steps with this server.
# PODMAN_ARGS are more arguments of `podman run`, such as --cgroups=disabled.
set -euo pipefail
image=$1 model=$(realpath "$2") trainer=${3:-} port=${PORT:-8123} name=swift-try-$$ work=$(mktemp -d)
key=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
as_user=(--env SWIFT_API_KEY --volume "$model:/model:ro" --shm-size 1g --userns keep-id:uid=1000,gid=1000)
trap 'podman rm -f "$name" >/dev/null 2>&1 || true; rm -rf "$work"' EXIT
die() {
    echo "try_image: $*" >&2
    podman logs "$name" 2>&1 | tail -n 20 >&2
    exit 1
}
# The key goes by the environment, not by a command line.
# shellcheck disable=SC2086
SWIFT_API_KEY=$key podman run -d --name "$name" "${as_user[@]}" --publish "127.0.0.1:$port:8000" ${PODMAN_ARGS:-} \
    "$image" --model /model --vllm_max_model_len 512 >/dev/null
[ "$(podman exec "$name" id -u)" != 0 ] || die "it runs as root"
# wait_for WHAT COMMAND ...: until the command succeeds. Healthy is a process that lives, ready a model that is loaded.
wait_for() {
    local start=$SECONDS
    until "${@:2}" >/dev/null 2>&1; do
        [ "$(podman inspect -f '{{.State.Running}}' "$name")" = true ] || die "it has ended"
        [ $((SECONDS - start)) -lt 600 ] || die "not $1 after 600 s"
        sleep 2
    done
    echo "$1 after $((SECONDS - start)) s"
}
wait_for healthy podman healthcheck run "$name"
ready() { curl -sf --max-time 10 "http://127.0.0.1:$port/ready" -H @/dev/stdin <<<"Authorization: Bearer $key"; }
wait_for ready ready
echo "runs as user $(podman exec "$name" id -un)"
ask() {
    curl -s --max-time 120 -o /dev/stdout -w '\n%{http_code}\n' "http://127.0.0.1:$port/v1/chat/completions" \
        -H 'Content-Type: application/json' "$@" -d '{"model": "/model", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}'
}
[ "$(ask | tail -n 1)" = 401 ] || die "it answers without the key"
answer=$(ask -H "@/dev/stdin" <<<"Authorization: Bearer $key")
[ "$(tail -n 1 <<<"$answer")" = 200 ] || die "it does not answer: $answer"
head -c 300 <<<"$answer"
echo
if [ -n "$trainer" ]; then
    # shellcheck disable=SC2086
    swift() { podman run --rm --network host "${as_user[@]}" --volume "$work:/work" ${PODMAN_ARGS:-} "$trainer" "$@"; }
    train() {
        swift rlhf run.yaml --use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port "$port" \
            --num_generations 4 --per_device_train_batch_size 8 --max_completion_length 16 --max_length 256 --max_steps 2
    }
    swift init maths . --model /model >/dev/null || die "the trainer's image wrote no task"
    code=0
    SWIFT_API_KEY=another train >/dev/null || code=$?
    [ "$code" = 2 ] || die "with another key the trainer ended with $code, not with 2"
    SWIFT_API_KEY=$key train || die "the trainer ended with $?"
    [ -d "$(echo "$work"/output/*/checkpoint-2)" ] || die "the trainer left no checkpoint"
fi
podman stop -t 60 "$name" >/dev/null
code=$(podman inspect -f '{{.State.ExitCode}}' "$name")
[ "$code" = 143 ] || die "it ended with $code after SIGTERM, not with 143"
echo "ended on SIGTERM with $code"
