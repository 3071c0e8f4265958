# SPDX-License-Identifier: Apache-2.0
"""Ranks on two hosts with the environments of torchrun, mpirun and srun: they meet at MASTER_ADDR, with a secret or on a trusted network."""
import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
import hosts as namespaces  # noqa: E402
from cases import LIMIT, contains, equal, main, test  # noqa: E402

PLACES = os.path.join(os.environ["TEST_BUILD"], "tests", "support", "places")
WHY_NOT = namespaces.why_not()


def environment_of(launcher, rank):
    """Two ranks, one per host."""
    return {
        "torchrun": {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank,
                     "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": 0},
        "Open MPI": {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_RANK": 0,
                     "OMPI_COMM_WORLD_LOCAL_SIZE": 1, "PMIX_NAMESPACE": "test"},
        "Hydra": {"PMI_RANK": rank, "PMI_SIZE": 2, "MPI_LOCALRANKID": 0, "MPI_LOCALNRANKS": 1},
        "Slurm": {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NUM_NODES": 2, "SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0,
                  "SLURM_NODEID": rank, "SLURM_LOCALID": 0},
    }[launcher]


def run(hosts, launcher, more):
    ranks = [hosts.start(rank, [PLACES, "hello"], env={**os.environ, "TUTTI_TIMEOUT": str(LIMIT), **more,
                                                       **{name: str(value) for name, value in environment_of(launcher, rank).items()}})
             for rank in range(2)]
    outputs = [rank.communicate(timeout=2 * LIMIT)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], outputs


def over_hosts(case):
    def with_hosts():
        if WHY_NOT:
            return WHY_NOT
        with namespaces.Hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
            secret = os.path.join(folder, "secret")
            with open(os.open(secret, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                file.write("a secret for the tests\n")
            case(hosts, {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29712"}, secret)
            hosts.nothing_left()
        return None
    with_hosts.__name__ = case.__name__
    return test(with_hosts)


@over_hosts
def ranks_of_other_launchers_meet_over_hosts_with_a_secret(hosts, meeting, secret):
    for launcher in ("torchrun", "Open MPI", "Hydra", "Slurm"):
        statuses, outputs = run(hosts, launcher, {**meeting, "TUTTI_SECRET_FILE": secret})
        assert statuses == [0, 0], f"{launcher}: {outputs}"
        for rank in range(2):
            contains(outputs[rank], f"rank {rank} of 2, local 0 of 1, node none of none")


@over_hosts
def without_a_secret_the_network_must_be_trusted(hosts, meeting, secret):
    statuses, outputs = run(hosts, "Slurm", {**meeting, "TUTTI_TRUST_NETWORK": "1"})
    assert statuses == [0, 0], outputs
    alone = hosts.start(0, [PLACES, "hello"], env={**os.environ, **meeting, **{name: str(value) for name, value in environment_of("Slurm", 0).items()}})
    output, _ = alone.communicate(timeout=LIMIT)
    equal(alone.returncode, 5)
    contains(output, "TUTTI_TRUST_NETWORK=1")


@over_hosts
def a_secret_that_others_can_read_is_refused(hosts, meeting, secret):
    os.chmod(secret, 0o644)
    alone = hosts.start(0, [PLACES, "hello"], env={**os.environ, **meeting, "TUTTI_SECRET_FILE": secret,
                                                   **{name: str(value) for name, value in environment_of("Slurm", 0).items()}})
    output, _ = alone.communicate(timeout=LIMIT)
    equal(alone.returncode, 5)
    contains(output, "chmod 600")


@over_hosts
def a_missing_meeting_place_is_named(hosts, meeting, secret):
    for launcher in ("Open MPI", "Hydra", "Slurm"):
        alone = hosts.start(0, [PLACES, "hello"], env={**os.environ, **{name: str(value) for name, value in environment_of(launcher, 0).items()}})
        output, _ = alone.communicate(timeout=LIMIT)
        equal(alone.returncode, 5)
        contains(output, "MASTER_ADDR is not set")


main()
