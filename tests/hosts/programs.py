# SPDX-License-Identifier: Apache-2.0
"""Other people's launchers over two hosts, each a network namespace: Open MPI's mpirun, MPICH's Hydra and torchrun start a program whose
ranks meet at MASTER_ADDR and reduce between the hosts."""
import os
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
import hosts as namespaces  # noqa: E402
from cases import LIMIT, TUTTI, contains, equal, main, test  # noqa: E402

PORT = "29761"
PROGRAM = [TUTTI, "bench", "all_reduce", "--private", "--check", "-b", "8", "-e", "256K", "-f", "256", "-n", "3", "-w", "1"]
WHY_NOT = namespaces.why_not()
if WHY_NOT is None and not os.path.exists(os.path.join(os.environ["TEST_BUILD"], "plugins", "libtutti-ucx.so")):
    WHY_NOT = "the plug-in tutti-ucx was not built"


def torchrun():
    """A command that is torchrun; None: there is no PyTorch here."""
    for python in filter(None, (os.environ.get("TEST_PYTHON"), os.path.join(os.environ.get("VIRTUAL_ENV", ""), "bin", "python3"), "python3")):
        try:
            found = subprocess.run([python, "-c", "import torch.distributed.run"], capture_output=True, timeout=300).returncode == 0
        except OSError:
            continue
        if found:
            return [python, "-m", "torch.distributed.run"]
    return None


def over_hosts(case):
    """A case that gets two hosts, a script that runs a command on one of them as ssh does, and an environment."""
    def run():
        if WHY_NOT:
            return WHY_NOT
        with namespaces.Hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
            script, secret = os.path.join(folder, "rsh"), os.path.join(folder, "secret")
            with open(os.open(secret, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                file.write("a secret for the tests\n")
            with open(script, "w") as file:
                file.write('#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1\nshift\ncase $host in\n')  # options of ssh's
                for host in range(2):
                    file.write(f'{hosts.address(host)}) exec ip netns exec {hosts.names[host]} unshare --uts sh -c "hostname {"ab"[host]}; $*" ;;\n')
                file.write('*) echo "no such host: $host" >&2; exit 255 ;;\nesac\n')
            os.chmod(script, 0o755)
            why_not = case(hosts, script, {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": PORT, "TUTTI_SECRET_FILE": secret,
                                           "TUTTI_TIMEOUT": str(int(LIMIT))})
            hosts.nothing_left()
        return why_not
    run.__name__ = case.__name__
    return test(run)


def check(processes, launcher):
    outputs = [process.communicate(timeout=3 * LIMIT)[0] for process in processes]
    statuses = [process.returncode for process in processes]
    equal((statuses, outputs if any(statuses) else None), ([0] * len(statuses), None))
    text = "".join(outputs)
    contains(text, "# ranks: 2")
    contains(text, launcher)


@over_hosts
def open_mpi_starts_ranks_on_two_hosts(hosts, script, meeting):
    if shutil.which("mpirun.openmpi") is None:
        return "there is no Open MPI here"
    names = ",".join(f"{hosts.address(host)}:1" for host in range(2))
    command = ["mpirun.openmpi", "--allow-run-as-root", "--host", names, "-n", "2", "--mca", "plm_rsh_agent", script, "--mca", "plm_rsh_no_tree_spawn", "1",
               "--mca", "oob_tcp_if_include", "eth0", *(word for name in meeting for word in ("-x", name)), *PROGRAM]
    check([hosts.start(0, command, env={**os.environ, **meeting})], "Open MPI")
    return None


@over_hosts
def hydra_starts_ranks_on_two_hosts(hosts, script, meeting):
    if shutil.which("mpiexec.hydra") is None:
        return "there is no Hydra (MPICH) here"
    names = ",".join(hosts.address(host) for host in range(2))
    command = ["mpiexec.hydra", "-launcher", "ssh", "-launcher-exec", script, "-hosts", names, "-iface", "eth0", "-n", "2", "-ppn", "1", "-genvall", *PROGRAM]
    check([hosts.start(0, command, env={**os.environ, **meeting})], "Hydra")
    return None


@over_hosts
def torchrun_starts_ranks_on_two_hosts(hosts, script, meeting):
    command = torchrun()
    if command is None:
        return "no python3 here can import torch; TEST_PYTHON names one"
    environment = {name: value for name, value in meeting.items() if not name.startswith("MASTER_") and name != "TUTTI_SECRET_FILE"}
    started = [hosts.start(node, [*command, "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node), "--master-addr", hosts.address(0),
                                  "--master-port", PORT, "--no-python", *PROGRAM],
                           env={**os.environ, **environment, "TUTTI_TRUST_NETWORK": "1"}) for node in range(2)]
    check(started, "torchrun")
    return None


main()
