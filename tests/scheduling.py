"""Which tests go to the same process where several run them (pytest-xdist), and which come first.

A file's tests stay together: they share what its fixtures made. Files that share a server of the whole session stay
together too. What takes longest comes first, so that the processes end at about the same time.
"""

from __future__ import annotations

import pytest

GROUPS = {
    "vllm": (
        "tests/sync/test_server_updates.py",
        "tests/serving/test_server_generation.py",
        "tests/serving/test_openai.py",
        "tests/e2e/test_server.py",
        "tests/e2e/test_multi_turn.py",
        "tests/lab/view/test_questions_of_the_page.py",
    ),
    "backends": ("tests/training/test_backends.py", "tests/training/test_families.py"),
}
"""Files that share what a session has one of: a vLLM server, the workers of `tests/training/conftest.py`."""
SHORT_S = 2.0
SECONDS: dict[str, float] = {
    "tests/algorithms/test_policy_loss.py": 5,
    "tests/cli/test_bad_input.py": 28,
    "tests/cli/test_check.py": 50,
    "tests/data/test_cache.py": 7,
    "tests/data/test_hubs.py": 11,
    "tests/demo/test_countdown_demo.py": 4,
    "tests/demo/test_minimal_grpo.py": 6,
    "tests/docs/test_commands.py": 50,
    "tests/e2e/test_agents.py": 32,
    "tests/e2e/test_algorithms.py": 12,
    "tests/e2e/test_async.py": 8,
    "tests/e2e/test_batch.py": 5,
    "tests/e2e/test_calculator_agent.py": 21,
    "tests/e2e/test_counting.py": 14,
    "tests/e2e/test_data.py": 7,
    "tests/e2e/test_diagnosis.py": 8,
    "tests/e2e/test_distillation.py": 30,
    "tests/e2e/test_embedded.py": 30,
    "tests/e2e/test_forecast.py": 36,
    "tests/e2e/test_interruption.py": 20,
    "tests/e2e/test_multi_turn.py": 40,
    "tests/e2e/test_replay.py": 32,
    "tests/e2e/test_reward_models.py": 5,
    "tests/e2e/test_rewards.py": 17,
    "tests/e2e/test_sampling.py": 5,
    "tests/e2e/test_sequence_parallel.py": 11,
    "tests/e2e/test_server.py": 40,
    "tests/e2e/test_server_file.py": 24,
    "tests/e2e/test_server_killed.py": 9,
    "tests/e2e/test_sleep.py": 24,
    "tests/e2e/test_starters.py": 8,
    "tests/e2e/test_starting_weights.py": 11,
    "tests/e2e/test_token_record.py": 14,
    "tests/e2e/test_tools.py": 13,
    "tests/e2e/test_turns_of_the_server.py": 8,
    "tests/examples/test_recipes.py": 10,
    "tests/fleet/test_driver.py": 124,
    "tests/fleet/test_killed_rank.py": 7,
    "tests/fleet/test_manifests.py": 4,
    "tests/fleet/test_nodes.py": 20,
    "tests/fleet/test_run.py": 34,
    "tests/fuzz/test_fuzz.py": 22,
    "tests/lab/evaluation/test_servers.py": 10,
    "tests/lab/report/test_pages.py": 6,
    "tests/lab/report/test_report.py": 19,
    "tests/lab/runs/test_completions.py": 5,
    "tests/lab/runs/test_damaged.py": 14,
    "tests/lab/sweep/test_sweep.py": 31,
    "tests/lab/view/test_answer_sources.py": 26,
    "tests/lab/view/test_completion_pages.py": 48,
    "tests/lab/view/test_damaged_runs.py": 5,
    "tests/lab/view/test_hostile_run.py": 10,
    "tests/lab/view/test_overview.py": 48,
    "tests/lab/view/test_start.py": 24,
    "tests/lab/view/test_time_page.py": 11,
    "tests/launch/test_elastic.py": 33,
    "tests/models/test_logprobs.py": 9,
    "tests/multi_node/test_engines.py": 21,
    "tests/multi_node/test_launchers.py": 6,
    "tests/packaging/test_coming_from.py": 11,
    "tests/packaging/test_conftest.py": 6,
    "tests/packaging/test_gpu_kit.py": 30,
    "tests/packaging/test_init.py": 21,
    "tests/packaging/test_install.py": 4,
    "tests/packaging/test_smollm2.py": 6,
    "tests/packaging/test_without_torch.py": 11,
    "tests/plugins/environments/test_check.py": 20,
    "tests/plugins/environments/test_runs.py": 6,
    "tests/plugins/tools/test_pool.py": 6,
    "tests/plugins/tools/test_scheduler.py": 7,
    "tests/resume/test_async.py": 9,
    "tests/resume/test_exact_resume.py": 59,
    "tests/resume/test_other_ranks.py": 27,
    "tests/resume/test_resume_flag.py": 24,
    "tests/resume/test_saving.py": 10,
    "tests/resume/test_skipped_steps.py": 5,
    "tests/resume/test_stop.py": 18,
    "tests/resume/test_strategies.py": 6,
    "tests/resume/test_watchdog.py": 9,
    "tests/rewards/test_code_reward.py": 15,
    "tests/rewards/test_graders.py": 12,
    "tests/rewards/test_grading_accuracy.py": 4,
    "tests/rewards/test_judge.py": 20,
    "tests/rewards/test_reward_api.py": 19,
    "tests/rewards/test_reward_pool.py": 60,
    "tests/rollout/agents/test_check.py": 5,
    "tests/rollout/agents/test_episodes.py": 24,
    "tests/rollout/test_membership.py": 45,
    "tests/rollout/test_multi_turn.py": 17,
    "tests/rollout/test_pauses.py": 17,
    "tests/rollout/test_reconnect.py": 12,
    "tests/rollout/test_round.py": 13,
    "tests/rollout/test_server_pool.py": 29,
    "tests/runtime/test_distributed.py": 13,
    "tests/security/test_planted_secrets.py": 19,
    "tests/serving/test_engine.py": 8,
    "tests/serving/test_malformed.py": 14,
    "tests/serving/test_server_generation.py": 12,
    "tests/serving/test_server_process.py": 26,
    "tests/serving/test_server_waits.py": 13,
    "tests/serving/test_session_routes.py": 16,
    "tests/serving/test_shared_server.py": 9,
    "tests/serving/test_sleep.py": 8,
    "tests/serving/test_tools.py": 9,
    "tests/sync/test_adapters.py": 5,
    "tests/sync/test_fanout.py": 29,
    "tests/sync/test_lease.py": 25,
    "tests/sync/test_nccl.py": 5,
    "tests/sync/test_server_updates.py": 23,
    "tests/training/test_adapters.py": 14,
    "tests/training/test_backends.py": 106,
    "tests/training/test_bucket_memory.py": 11,
    "tests/training/test_families.py": 46,
    "tests/training/test_invariance.py": 14,
    "tests/training/test_no_waiting.py": 5,
    "tests/training/test_ppo.py": 9,
    "tests/training/test_sequence_parallel.py": 18,
    "tests/training/test_teachers.py": 17,
    "tests/training/test_upload.py": 12,
    "tests/workers/test_escapes.py": 17,
}
"""What a file takes where that is 4 seconds or more; from the times of `pytest --junitxml` on two quiet cores."""

_GROUP_OF = {file: name for name, files in GROUPS.items() for file in files}


def scope_of(nodeid: str) -> str:
    """The group of a test's file, or the file."""
    file = nodeid.partition("::")[0]
    return _GROUP_OF.get(file, file)


def put_in_order(items: list[pytest.Item]) -> None:
    """The longest groups and files first."""
    seconds: dict[str, float] = {}
    for file, own in SECONDS.items():
        seconds[scope_of(file)] = seconds.get(scope_of(file), 0) + own
    items.sort(key=lambda item: -seconds.get(scope_of(item.nodeid), SHORT_S))
