"""What becomes of a shown command: it runs, it runs with small sizes, a server answers it, or it is looked up.

`way_of` knows each; a command that it does not know fails `test_commands.py`.
"""

from __future__ import annotations

from enum import Enum

from tests.docs.shown import Shown


class Way(Enum):
    RUN = "run as it is written"
    SERVED = "sent to a server of tests/tiny_server.py"
    SMALL = "run with the sizes of tests/ms_swift/smaller.py, in the long tests"
    RESOLVED = "its flags, files and targets are looked up, and it is not run"


RUNS = frozenset({"check", "doctor", "why", "report", "init", "merge-lora"})
"""Commands of `swift` that load no model, or a tiny one, and end by themselves."""
DRY = frozenset({"launch"})
"""Those that a dry run, which goes as far as starting something, stands for."""

NOT_RUN = {
    # the beginning of a command: why it is not run
    "swift rollout": "a server, which ends when it is interrupted: tests/serving runs it with an engine of its own",
    "swift view": "a page, which ends when it is interrupted: tests/lab/view",
    "swift demo": "minutes: tests/demo; make demo",
    "swift forecast": "a server or an engine for minutes: tests/e2e/test_forecast.py",
    "swift sft": "a model and rows of the reader's: tests/e2e/test_sft.py",
    "swift replay": "needs the checkpoint of a run: tests/e2e/test_replay.py",
    "swift eval": "benchmarks of a hub: tests/lab/evaluation",
    "swift check --env": "packages that make install leaves out: make test-agents",
    "swift check --external_plugins calculator.py": "its page's rows: tests/plugins/tools",
    "make": "it would install, train or test",
    "pip": "it would install",
    "uv": "what make install has installed: tests/packaging/test_requirements.py",
    "python": "minutes to hours, or it writes into the repository",
    "sudo python": "root, and network namespaces",
    "pytest": "tests of their own",
    "examples/": "hours: tests/examples checks their flags, and runs their miniatures",
    ".ci/run": "all of the tests",
    "wandb": "a service and its key",
    "sqlite3": "a file that a judge leaves: tests/rewards",
    "scripts/": "it would install, build or tag",
    "podman": "containers",
    "docker": "containers",
    "skopeo": "containers of a registry",
    "debootstrap": "root, and packages of a registry",
    "swift check --tools shell": "a sandbox, which not every machine allows: tests/plugins/tools",
}

SHELL = frozenset(
    {"cat", "cd", "cp", "grep", "head", "ls", "mkdir", "mv", "od", "sleep", "source", "tar", "tr"}
)
"""Tools of the shell, on files of the reader's."""

RESOLVED_TRAININGS = {
    # words of a `swift rlhf` that keep it from running here: why
    "dpo": "pairs of the reader's: tests/e2e/test_preferences.py",
    "NNODES": "several machines: tests/multi_node",
    "--vllm_server_base_url": "servers of names that are not here: tests/rollout/test_server_pool.py",
    "--vllm_server_file": "servers of names that are not here: tests/e2e/test_server_file.py",
    "--resume_from_checkpoint": "goes on with the run before it: tests/resume",
    "--push_to_hub": "a hub and its token: tests/data/test_hubs.py",
    "--eval_datasets": "benchmarks of a hub: tests/lab/evaluation",
    "--reward_model": "two models that judge: tests/rewards",
    "--env": "packages that make install leaves out: make test-agents",
    "--offload_model": "GPUs: make gpu",
    "--tools": "a template that shows tools: tests/plugins/tools",
    "mixture.yaml": "a template that shows tools: tests/e2e/test_tools.py",
    "hf::openai/gsm8k:main#2000": "a hub: tests/data/test_hubs.py",
    "hf::trl-lib/DeepMath-103K": "a hub: tests/data/test_hubs.py",
    "train.parquet": "files that verl has made: tests/data",
    "config.yaml": "a file of the reader's: tests/flags/test_parser.py",
    "8001": "two GPUs that generate: tests/rollout/test_server_pool.py",
}


def way_of(command: Shown) -> Way | None:
    """None: nobody has said."""
    words = command.words
    if words[0] == "curl":
        return Way.SERVED
    if words[0] == "swift":
        name = words[1]
        if name == "rlhf":
            kept = {*words, *command.environ} & RESOLVED_TRAININGS.keys()
            return Way.RESOLVED if kept else Way.SMALL
        if name in DRY or (name == "view" and "--trace" in words):
            return Way.RUN
        if name in RUNS and reason(command) is None:
            return Way.RUN
    return Way.RESOLVED if reason(command) else None


def reason(command: Shown) -> str | None:
    """Why a command is not run."""
    text = " ".join(command.words)
    if command.words[0] in SHELL:
        return "a tool of the shell"
    return next((why for start, why in NOT_RUN.items() if text.startswith(start)), None)
