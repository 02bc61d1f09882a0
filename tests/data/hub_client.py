"""`python hub_client.py HUB_FOLDER CACHE_FOLDER`: loads datasets through the hubs' own clients from a stand-in, then
without it from their caches; prints what came as JSON. A process of its own: the clients read the environment once."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from hub_stand_in import Hub


def main(repos: str, cache: str) -> None:
    hub = Hub(Path(repos))
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    os.environ.update(
        HF_ENDPOINT=hub.url,
        HF_HOME=f"{cache}/hf",
        HF_HUB_DISABLE_TELEMETRY="1",
        MODELSCOPE_REPO_TREE_PAGE_MAX_ATTEMPTS="1",  # no waiting for what is not there
        MODELSCOPE_ENDPOINT=hub.url,
        MODELSCOPE_CACHE=f"{cache}/ms",
        SWIFT_R1_CACHE=f"{cache}/own",
    )
    from swift_r1.data import DatasetMeta, SubsetDataset, register_dataset
    from swift_r1.data.builtin import WorkedPreprocessor
    from swift_r1.data.hubs import load_split
    from swift_r1.data.loading import load_rows
    from swift_r1.errors import UsageError
    from swift_r1.flags.eval_tasks import read_tasks
    from swift_r1.training.evaluation.questions import load_questions
    from tests.data.test_builtin import arguments

    register_dataset(
        DatasetMeta(
            dataset_name="sums",
            ms_dataset_id="org/sums",
            hf_dataset_id="org/sums",
            subsets=[SubsetDataset("easy", "main"), "hard"],
            eval_split=["test"],
            preprocess_func=WorkedPreprocessor(),
        )
    )

    def load(dataset: str, **flags: Any) -> Any:
        hub.requests.clear()
        try:
            data = load_rows(arguments(dataset=[dataset], **flags))
        except UsageError as error:
            return {"fault": str(error)}
        return {
            "rows": list(data.train),
            "eval": list(data.eval),
            "asked": sorted(
                {request.split("?")[0].split("/")[1] for request in hub.requests} - {""}
            ),  # "": is it there?
        }

    found = {
        "hf": load("hf::org/sums:main"),
        "use_hf": load("sums:easy#2", use_hf=True),
        "ms": load("sums:easy"),
        "ms prefix": load("ms::org/sums:hard"),
        "all": load("sums:all", evaluates=True),
        "unnamed": load("sums"),
        "unregistered": load("hf::org/plain"),
        "no such subset": load("hf::org/sums:nothing"),
        "no such set": load("hf::org/gone"),
        "copy": load("hf::other/sums:main"),
        "gsm8k's id": load("modelscope/gsm8k", columns={"answer": "solution"}, evaluates=True),
        "countdown's id": load("zouxuhong/Countdown-Tasks-3to4#2"),
        "hf streamed": load("hf::org/sums:hard", streaming=True),
        "ms streamed": load("ms::org/sums:hard", streaming=True),
    }
    (task,) = read_tasks("--benchmarks", ["hf::org/sums:main"], {"reward": "gsm8k"})
    found["evaluated"] = list(load_questions(task).rows)
    hub.shutdown()
    hub.server_close()
    load_split.cache_clear()
    import datasets
    import huggingface_hub

    datasets.config.HF_HUB_OFFLINE = True
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    os.environ["MODELSCOPE_ENDPOINT"] = "http://127.0.0.1:9"
    found |= {
        "hf offline": load("hf::org/sums:main", load_from_cache_file=False),
        "ms offline": load("ms::org/sums:hard", load_from_cache_file=False),
        "hf offline, never had": load("hf::org/never"),
        "ms offline, never had": load("ms::org/never"),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
