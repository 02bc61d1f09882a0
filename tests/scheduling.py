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
SHORT_S = 3.0
SECONDS: dict[str, float] = {
    "tests/cli/test_bad_input.py": 20,
    "tests/cli/test_check.py": 20,
    "tests/launch/test_elastic.py": 20,
    "tests/data/test_cache.py": 10,
    "tests/data/test_hubs.py": 12,
    "tests/docs/test_commands.py": 40,
    "tests/e2e/test_algorithms.py": 8,
    "tests/e2e/test_async.py": 10,
    "tests/e2e/test_data.py": 6,
    "tests/e2e/test_embedded.py": 30,
    "tests/e2e/test_interruption.py": 20,
    "tests/e2e/test_multi_turn.py": 25,
    "tests/e2e/test_rewards.py": 12,
    "tests/e2e/test_server.py": 40,
    "tests/e2e/test_server_killed.py": 10,
    "tests/e2e/test_sleep.py": 20,
    "tests/lab/evaluation/test_in_training.py": 15,
    "tests/lab/evaluation/test_swift_eval.py": 15,
    "tests/examples/test_recipes.py": 15,
    "tests/fleet/test_driver.py": 80,
    "tests/fleet/test_dry_run.py": 4,
    "tests/fleet/test_manifests.py": 4,
    "tests/fleet/test_run.py": 25,
    "tests/packaging/test_gpu_kit.py": 25,
    "tests/packaging/test_smollm2.py": 8,
    "tests/lab/report/test_pages.py": 6,
    "tests/lab/report/test_report.py": 15,
    "tests/resume/test_async.py": 12,
    "tests/resume/test_exact_resume.py": 60,
    "tests/resume/test_resume_flag.py": 20,
    "tests/resume/test_saving.py": 15,
    "tests/resume/test_stop.py": 12,
    "tests/resume/test_watchdog.py": 9,
    "tests/rewards/test_graders.py": 8,
    "tests/rewards/test_reward_pool.py": 60,
    "tests/rollout/test_server_pool.py": 40,
    "tests/serving/test_session_routes.py": 20,
    "tests/serving/test_agent_clients.py": 8,
    "tests/sync/test_lease.py": 15,
    "tests/serving/test_openai.py": 8,
    "tests/rollout/test_pauses.py": 20,
    "tests/rollout/test_reconnect.py": 25,
    "tests/serving/test_server_generation.py": 30,
    "tests/serving/test_server_process.py": 25,
    "tests/sync/test_server_updates.py": 60,
    "tests/security/test_injection.py": 8,
    "tests/security/test_planted_secrets.py": 25,
    "tests/security/test_trust.py": 6,
    "tests/training/test_backends.py": 90,
    "tests/runtime/test_distributed.py": 15,
    "tests/training/test_families.py": 30,
    "tests/training/test_invariance.py": 15,
    "tests/models/test_logprobs.py": 40,
    "tests/lab/view/test_hostile_run.py": 12,
}
"""What the tests of a file take where it is longer than SHORT_S; roughly, on two quiet cores."""

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
