"""What a step of a Slurm job is given; the cluster's own tests start real ones."""

from __future__ import annotations

import pytest

from swift_r1.fleet.backends.slurm import step_environment

# of srun's manual, and of `strings` of 22.05: what it takes for options
OPTIONS = """
ACCOUNT ACCTG_FREQ BCAST BURST_BUFFER CLUSTERS COMPRESS CONSTRAINT CONTAINER CORE_SPEC CPUS_PER_GPU CPUS_PER_TASK CPU_BIND
CPU_FREQ_REQ DELAY_BOOT DEPENDENCY DISTRIBUTION EPILOG EXACT EXCLUSIVE EXPORT_ENV GPUS GPUS_PER_NODE GPUS_PER_SOCKET
GPUS_PER_TASK GPU_BIND GPU_FREQ GRES GRES_FLAGS HINT HOSTFILE JOB_NAME JOB_NUM_NODES KILL_BAD_EXIT LABELIO MEM_BIND
MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE MPI_TYPE NETWORK NNODES NO_KILL NPROCS NTASKS NTASKS_PER_CORE NTASKS_PER_GPU
NTASKS_PER_NODE NTASKS_PER_SOCKET NTASKS_PER_TRES OPEN_MODE OVERCOMMIT PARTITION PROFILE PROLOG QOS REMOTE_CWD RESERVATION
SIGNAL SPREAD_JOB STEP_GRES TASK_PROLOG THREADS THREADS_PER_CORE THREAD_SPEC TIMELIMIT TRES_PER_TASK UMASK WAIT WORKING_DIR
"""


@pytest.mark.parametrize("prefix", ["SLURM_", "SRUN_"])
def test_nothing_of_another_component_is_an_option(prefix: str) -> None:
    environ = {f"{prefix}{name}": "1" for name in OPTIONS.split()}
    kept = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin", "MY_SLURM_": "x"}
    assert step_environment(environ | kept) == kept
