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
    ),
    "backends": ("tests/training/test_backends.py", "tests/training/test_families.py"),
}
"""Files that share what a session has one of: a vLLM server, the workers of `tests/training/conftest.py`."""
SHORT_S = 2.0
SECONDS: dict[str, float] = {
    "tests/algorithms/test_policy_loss.py": 21,
    "tests/cli/test_bad_input.py": 42,
    "tests/cli/test_check.py": 66,
    "tests/data/test_cache.py": 13,
    "tests/data/test_countdown.py": 5,
    "tests/data/test_hubs.py": 23,
    "tests/data/test_vision.py": 6,
    "tests/demo/test_countdown_demo.py": 4,
    "tests/docs/test_commands.py": 80,
    "tests/e2e/test_agents.py": 35,
    "tests/e2e/test_async.py": 12,
    "tests/e2e/test_calculator_agent.py": 13,
    "tests/e2e/test_data.py": 4,
    "tests/e2e/test_diagnosis.py": 12,
    "tests/e2e/test_distillation.py": 12,
    "tests/e2e/test_embedded.py": 21,
    "tests/e2e/test_images.py": 13,
    "tests/e2e/test_multi_turn.py": 51,
    "tests/e2e/test_push_to_hub.py": 5,
    "tests/e2e/test_replay.py": 37,
    "tests/e2e/test_reward_models.py": 7,
    "tests/e2e/test_rewards.py": 16,
    "tests/e2e/test_server.py": 39,
    "tests/e2e/test_server_killed.py": 12,
    "tests/e2e/test_sft.py": 4,
    "tests/e2e/test_shell_agent.py": 5,
    "tests/e2e/test_starters.py": 9,
    "tests/e2e/test_token_record.py": 8,
    "tests/e2e/test_tools.py": 12,
    "tests/e2e/test_turns_of_the_server.py": 7,
    "tests/examples/test_recipes.py": 10,
    "tests/fleet/test_driver.py": 25,
    "tests/fleet/test_killed_rank.py": 10,
    "tests/fleet/test_manifests.py": 8,
    "tests/fleet/test_nodes.py": 10,
    "tests/fuzz/test_fuzz.py": 10,
    "tests/lab/evaluation/test_in_training.py": 5,
    "tests/lab/evaluation/test_servers.py": 15,
    "tests/lab/evaluation/test_swift_eval.py": 6,
    "tests/lab/report/test_pages.py": 14,
    "tests/lab/report/test_report.py": 30,
    "tests/lab/runs/test_completions.py": 11,
    "tests/lab/runs/test_damaged.py": 12,
    "tests/lab/view/test_completion_html.py": 6,
    "tests/lab/view/test_completion_pages.py": 43,
    "tests/lab/view/test_hostile_run.py": 10,
    "tests/lab/view/test_overview.py": 54,
    "tests/lab/view/test_pictures.py": 17,
    "tests/lab/view/test_start.py": 10,
    "tests/lab/view/test_terminal.py": 10,
    "tests/lab/view/test_time_page.py": 15,
    "tests/launch/test_elastic.py": 35,
    "tests/launch/test_supervisor.py": 4,
    "tests/models/test_vision.py": 6,
    "tests/multi_node/test_engines.py": 9,
    "tests/packaging/test_coming_from.py": 20,
    "tests/packaging/test_conftest.py": 9,
    "tests/packaging/test_docs_pages.py": 5,
    "tests/packaging/test_gpu_kit.py": 10,
    "tests/packaging/test_init.py": 13,
    "tests/packaging/test_install.py": 8,
    "tests/packaging/test_reference.py": 9,
    "tests/packaging/test_wheel.py": 7,
    "tests/packaging/test_without_torch.py": 22,
    "tests/plugins/environments/test_check.py": 14,
    "tests/plugins/environments/test_harbor.py": 9,
    "tests/plugins/environments/test_runs.py": 11,
    "tests/plugins/environments/test_trl.py": 5,
    "tests/plugins/test_compat.py": 9,
    "tests/plugins/test_plugin_files.py": 4,
    "tests/plugins/tools/test_check.py": 7,
    "tests/plugins/tools/test_mcp_servers.py": 9,
    "tests/plugins/tools/test_pool.py": 9,
    "tests/plugins/tools/test_scheduler.py": 9,
    "tests/record/test_tracking.py": 6,
    "tests/resume/test_async.py": 6,
    "tests/resume/test_exact_resume.py": 41,
    "tests/resume/test_images.py": 4,
    "tests/resume/test_other_ranks.py": 8,
    "tests/resume/test_resume_flag.py": 18,
    "tests/resume/test_saving.py": 16,
    "tests/resume/test_skipped_steps.py": 6,
    "tests/resume/test_stop.py": 25,
    "tests/resume/test_strategies.py": 7,
    "tests/resume/test_watchdog.py": 9,
    "tests/rewards/test_code_reward.py": 20,
    "tests/rewards/test_graders.py": 13,
    "tests/rewards/test_grading_accuracy.py": 9,
    "tests/rewards/test_judge.py": 21,
    "tests/rewards/test_reward_api.py": 23,
    "tests/rewards/test_reward_pool.py": 48,
    "tests/rollout/agents/test_check.py": 5,
    "tests/rollout/agents/test_episodes.py": 31,
    "tests/rollout/agents/test_processes.py": 5,
    "tests/rollout/agents/test_results.py": 5,
    "tests/rollout/test_membership.py": 24,
    "tests/rollout/test_pauses.py": 10,
    "tests/rollout/test_round.py": 7,
    "tests/rollout/test_served_turns.py": 8,
    "tests/rollout/test_server_pool.py": 28,
    "tests/runtime/test_distributed.py": 6,
    "tests/sandboxes/test_escapes.py": 8,
    "tests/sandboxes/test_images.py": 4,
    "tests/sandboxes/test_local.py": 6,
    "tests/security/test_planted_secrets.py": 16,
    "tests/serving/test_engine.py": 5,
    "tests/serving/test_malformed.py": 23,
    "tests/serving/test_other_sites.py": 4,
    "tests/serving/test_protocols.py": 10,
    "tests/serving/test_served_images.py": 7,
    "tests/serving/test_server_generation.py": 7,
    "tests/serving/test_server_process.py": 17,
    "tests/serving/test_server_waits.py": 12,
    "tests/serving/test_session_routes.py": 20,
    "tests/serving/test_shared_server.py": 8,
    "tests/serving/test_sleep.py": 16,
    "tests/serving/test_tools.py": 10,
    "tests/sync/test_adapters.py": 8,
    "tests/sync/test_fanout.py": 20,
    "tests/sync/test_lease.py": 25,
    "tests/sync/test_nccl.py": 7,
    "tests/sync/test_server_updates.py": 7,
    "tests/sync/test_weight_check.py": 7,
    "tests/training/test_adapters.py": 10,
    "tests/training/test_backends.py": 83,
    "tests/training/test_families.py": 32,
    "tests/training/test_invariance.py": 21,
    "tests/training/test_no_waiting.py": 4,
    "tests/training/test_sequence_parallel.py": 20,
    "tests/training/test_teachers.py": 5,
    "tests/training/test_upload.py": 10,
    "tests/workers/test_escapes.py": 20,
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
