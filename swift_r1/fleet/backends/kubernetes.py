"""`--on kubernetes --dry_run`: a run as a JobSet, to be applied with kubectl.

A JobSet needs its controller on the cluster. Jobs and Services of the core would need nothing, but would leave the
servers with their GPUs running when training has ended, until somebody deletes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from swift_r1.errors import EXIT_OK, EXIT_USAGE, UsageError
from swift_r1.fleet.backend import ClusterBackend
from swift_r1.fleet.commands import rank_variables, server_words, train_words
from swift_r1.fleet.run_file import TRAIN, Role, RunFile, hosts_faults, read_options

PORT = 8000
MASTER_PORT = 29500
SECRET = "swift-r1"
SAVE_S = 300  # for a pod that trains to save after SIGTERM
_RESTARTS = 8  # of training, and of each server
_OPTIONS: dict[str, type] = {
    "image": str,
    "namespace": str,
    "claim": str,
    "mount": str,
    "folder": str,
    "secret": str,
    "memory": str,
    "node_selector": dict,
    "python": str,
}


def hand_over(run: RunFile, words: Sequence[str], dry_run: bool) -> int | None:
    """Prints the manifest; raises UsageError without `dry_run`."""
    manifest = render(run)
    if not dry_run:
        raise UsageError(
            f"--on kubernetes only writes a manifest: swift launch {run.path} --on kubernetes --dry_run "
            "| kubectl apply --server-side -f -"
        )
    print(
        f"# kubectl create secret generic {_secret(run)} --from-literal=SWIFT_API_KEY=$(openssl rand -hex 16)"
    )
    print(
        "# (HF_TOKEN, WANDB_API_KEY, ... in the same secret). The cluster needs the JobSet controller."
    )
    print(yaml.safe_dump(manifest, sort_keys=False, width=120), end="")
    return EXIT_OK


def open_backend(run: RunFile, silence_s: float) -> ClusterBackend:
    raise AssertionError("hand_over always has an answer")


def render(run: RunFile) -> dict[str, Any]:
    """Returns the JobSet. Raises UsageError: options that cannot be."""
    options = read_options(run, "kubernetes", _OPTIONS)
    faults = [f"{name} is missing" for name in ("image", "claim") if name not in options]
    faults = [f"{run.path}: kubernetes: {fault}" for fault in faults]
    faults += hosts_faults(
        run, "Kubernetes chooses the nodes: say which in kubernetes: node_selector"
    )
    if run.warm_start is not None:
        faults.append(
            f"{run.path}: sft: Kubernetes starts all at once: run `swift sft` in a job before, and give rlhf its checkpoint"
        )
    if faults:
        raise UsageError(*faults)
    name = re.sub("[^a-z0-9]+", "-", run.path.stem.lower())[:40].strip("-") or "swift-r1"
    name = name if name[0].isalpha() else f"run-{name}"  # as a Service's must begin
    urls = {
        role.name: [
            f"http://{name}-{role.name}-{number}-0.{name}:{PORT}" for number in range(role.count)
        ]
        for role in run.roles.values()
        if role.name != TRAIN
    }
    jobs = [_servers(run, role, options) for role in run.roles.values() if role.name != TRAIN]
    metadata = {"name": name} | (
        {"namespace": options["namespace"]} if "namespace" in options else {}
    )
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            # The servers end when training has.
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [TRAIN]},
            "replicatedJobs": [_training(run, urls, name, options), *jobs],
        },
    }


def _training(
    run: RunFile,
    urls: Mapping[str, Sequence[str]],
    name: str,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    role = run.roles[TRAIN]
    folder = str(run.flags.get("output_dir") or f"output/{name}")
    words = train_words(run, urls, folder, resume=True)
    ranks = rank_variables(run, role.count, 0, f"{name}-{TRAIN}-0-0.{name}", MASTER_PORT)
    index = {
        "fieldRef": {
            "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        }
    }
    environ = [
        {"name": key, "valueFrom": index} if key == "NODE_RANK" else {"name": key, "value": value}
        for key, value in ranks.items()
    ]
    pod = _pod(run, role, words, environ, options) | {"terminationGracePeriodSeconds": SAVE_S}
    rules = [
        # A node that is drained or preempted is nobody's fault; flags that cannot be do not get better.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "FailJob",
            "onExitCodes": {
                "containerName": TRAIN,
                "operator": "In",
                "values": [EXIT_USAGE],
            },
        },
    ]
    # All pods end when one does, and each counts.
    job = _job(pod, role.count, _RESTARTS * role.count) | {"podFailurePolicy": {"rules": rules}}
    return {"name": TRAIN, "replicas": 1, "template": {"spec": job}}


def _servers(run: RunFile, role: Role, options: Mapping[str, Any]) -> dict[str, Any]:
    pod = _pod(run, role, server_words(run, role.name, "0.0.0.0", PORT), [], options)
    return {
        "name": role.name,
        "replicas": role.count,
        "template": {"spec": _job(pod, 1, _RESTARTS)},
    }


def _job(pod: Mapping[str, Any], pods: int, failures: int) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": failures,
        "template": {"spec": dict(pod)},
    }


def _pod(
    run: RunFile,
    role: Role,
    words: Sequence[str],
    environ: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    mount = options.get("mount", "/data")
    asked = {"nvidia.com/gpu": str(role.gpus)} if role.gpus else {}
    asked |= {"cpu": str(role.cpus)} if role.cpus else {}
    asked |= {"memory": options["memory"]} if "memory" in options else {}
    container = {
        "name": role.name,
        "image": options["image"],
        "workingDir": options.get("folder", mount),
        "command": [options.get("python", "python"), *words],
        # Those without a value are in the secret.
        "env": [
            *(
                {"name": key, "value": value}
                for key, value in run.environ.items()
                if value is not None
            ),
            *environ,
        ],
        "envFrom": [{"secretRef": {"name": options.get("secret", SECRET)}}],
        "resources": {"limits": asked, "requests": asked},
        "volumeMounts": [
            {"name": "data", "mountPath": mount},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": options["claim"]}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    return pod | ({"nodeSelector": options["node_selector"]} if "node_selector" in options else {})


def _secret(run: RunFile) -> str:
    return str(run.options.get("kubernetes", {}).get("secret", SECRET))
