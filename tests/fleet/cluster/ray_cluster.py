"""`python -m tests.fleet.cluster.ray_cluster`: `ray.cluster_utils.Cluster` with a head that runs nothing, in the
network that this process is in. It says its address, then a line for each order on standard input: `fill COUNT` adds
nodes of two CPUs until there are as many, `kill ID` ends one with all that runs on it, `raylet ID` its daemon alone,
and all answer with the nodes' ids."""

from __future__ import annotations

import json
import sys

import psutil
from ray.cluster_utils import Cluster

STORE = 80 << 20  # bytes of each node's object store: what goes through it are lines


def main() -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE},
    )
    nodes = {}
    print(json.dumps(cluster.address), flush=True)
    try:
        for line in sys.stdin:
            order, value = line.split()
            if order in ("kill", "raylet"):
                node = nodes.pop(value)
                daemon = psutil.Process(node.all_processes["raylet"][0].process.pid)
                for one in [daemon, *(daemon.children(recursive=True) if order == "kill" else ())]:
                    one.kill()
                cluster.remove_node(node, allow_graceful=False)
            else:
                while len(nodes) < int(value):
                    node = cluster.add_node(num_cpus=2, object_store_memory=STORE)
                    nodes[node.node_id] = node
            print(json.dumps(list(nodes)), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
