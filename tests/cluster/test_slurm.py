from __future__ import annotations


def test_nodes(slurm, tmp_path):
    print(slurm.run("srun", "-N3", "sh", "-c", "hostname; cat /proc/1/comm; echo $$").stdout)
    print(slurm.run("srun", "-N1", "--gpus=1", "sh", "-c", "env | grep -E 'CUDA|GPU|SLURM'").stdout)
    slurm.kill_node(2)
    from tests.conftest import until

    until(lambda: slurm.states() == ["down*", "idle", "idle"], 60)
    slurm.start_node(2)
    until(lambda: slurm.states() == ["idle"] * 3, 60)
