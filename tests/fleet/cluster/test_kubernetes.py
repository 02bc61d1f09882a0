"""The manifest of `swift launch --on kubernetes --dry_run` against the schema of JobSets and of what is in them."""

from __future__ import annotations

import pytest
import yaml

ROLES = {"train": {"nodes": 2, "gpus": 8, "cpus": 32}, "rollout": {"replicas": 4, "gpus": 2}}
SECTION = {
    "image": "i",
    "claim": "c",
    "namespace": "n",
    "memory": "64Gi",
    "node_selector": {"kind": "h100"},
}


def test_the_manifest_is_a_jobset(launched):
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="make test-cluster installs the schema"
    )
    one = launched("kubernetes")
    one.write(ROLES, kubernetes=SECTION, environ={"NCCL_DEBUG": "WARN"})
    path = one.folder / "run.yaml"
    content = yaml.safe_load(path.read_text())
    del content["kubernetes"]["python"]
    path.write_text(yaml.safe_dump(content))
    done = one.once("--dry_run")
    assert done.returncode == 0, done.stderr
    manifest = yaml.safe_load(done.stdout)
    # What the schema does not know is not in the model that is made of it.
    assert models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict() == manifest
