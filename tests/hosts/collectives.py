# SPDX-License-Identifier: Apache-2.0
"""Collectives over several hosts, each a network namespace, started by tutti run: they move data and check it, and the
death of a rank is told with its signal on the other host."""
import importlib.util
import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
import hosts as namespaces  # noqa: E402
from cases import TUTTI, contains, equal, main, test  # noqa: E402

WHY_NOT = namespaces.why_not()
if WHY_NOT is None and not os.path.exists(os.path.join(os.environ["TEST_BUILD"], "plugins", "libtutti-ucx.so")):
    WHY_NOT = "the plug-in tutti-ucx was not built"
PORT = 29731


def run_job(ranks, program, environment=None):
    """Exit statuses and outputs of a launcher per host; ranks: how many on each."""
    with namespaces.Hosts(len(ranks)) as hosts, tempfile.TemporaryDirectory() as folder:
        secret = os.path.join(folder, "secret")
        with open(os.open(secret, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write("a secret for the tests\n")
        launchers = [hosts.start(node, [TUTTI, "run", "--nodes", str(len(ranks)), "--node", str(node), "--meet",
                                        f"{hosts.address(0)}:{PORT}", "--secret-file", secret, "-n", str(count), *program],
                                 env={**os.environ, "TUTTI_HOST_TIMEOUT": "100", **(environment or {})})
                     for node, count in enumerate(ranks)]
        outputs = [launcher.communicate()[0] for launcher in launchers]
        return [launcher.returncode for launcher in launchers], outputs


@test
def collectives_run_between_hosts_that_tutti_run_started():
    if WHY_NOT:
        return WHY_NOT
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"):
        sizes = [] if operation == "barrier" else ["--check", "-b", "8", "-e", "1M", "-f", "64"]
        statuses, outputs = run_job([2, 2], [TUTTI, "bench", operation, "--private", *sizes, "-n", "3", "-w", "1"])
        equal((statuses, outputs if statuses != [0, 0] else None), ([0, 0], None))
        contains(outputs[0], "# ranks: 4")
    return None


@test
def a_killed_rank_is_named_with_its_signal_on_the_other_host():
    if WHY_NOT:
        return WHY_NOT
    fault = {"TUTTI_FAULT": "rank=3,op=all_reduce,at=4,do=kill"}
    statuses, outputs = run_job([2, 2], [TUTTI, "bench", "all_reduce", "--private", "-b", "8", "-e", "8", "-n", "50"], fault)
    assert all(status != 0 for status in statuses), (statuses, outputs)
    contains(outputs[0], "rank 3")
    contains(outputs[0], "signal 9")
    return None


PYTHON = """
import numpy, tutti
with tutti.World() as world:
    memory = world.empty(4, "f32")
    peers, other = memory.rendezvous(), 1 - world.rank
    try:
        peers.array(other)
    except tutti.UnsupportedError as error:
        print("told:", error)
    peers.put(other, numpy.full(4, world.rank + 1, "f4"))
    peers.barrier()
    assert peers.array(world.rank).tolist() == [other + 1] * 4
"""


@test
def python_says_what_goes_to_memory_that_is_not_mapped():
    package = os.path.join(os.environ["TEST_BUILD"], "python")
    if WHY_NOT:
        return WHY_NOT
    if os.environ.get("TEST_SANITIZE"):
        return "a library with a sanitizer cannot be loaded late"
    if not os.path.exists(os.path.join(package, "tutti", "_interface.py")) or importlib.util.find_spec("numpy") is None:
        return "the Python package was not built, or there is no NumPy"
    statuses, outputs = run_job([1, 1], [sys.executable, "-c", PYTHON], {"PYTHONPATH": package})
    equal((statuses, outputs if statuses != [0, 0] else None), ([0, 0], None))
    for rank, output in enumerate(outputs):
        contains(output, "Cannot get buffer across nodes")
        contains(output, f"rank {1 - rank} is on another host; put, get and signals go there")
    return None


main()
