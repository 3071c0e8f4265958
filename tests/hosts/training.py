# SPDX-License-Identifier: Apache-2.0
"""examples/gpt over two hosts, each a network namespace: it ends with the bits of as many ranks on one host, also where hosts cut layers among
their ranks; and after a death it goes on from its last checkpoint."""
import os
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
import hosts as namespaces  # noqa: E402
from cases import LIMIT, TUTTI, equal, main, test  # noqa: E402
from jobs import Job  # noqa: E402

GPT = os.path.join(os.environ["TEST_BUILD"], "examples", "gpt")
WHY_NOT = namespaces.why_not()
if WHY_NOT is None and not os.path.exists(GPT):
    WHY_NOT = f"{GPT} was not built"
if WHY_NOT is None and not os.path.exists(os.path.join(os.environ["TEST_BUILD"], "plugins", "libtutti-ucx.so")):
    WHY_NOT = "the plug-in tutti-ucx was not built"


def losses(text):
    """What the first rank says at the end."""
    return re.findall(r"loss \S+ after 2 steps, at the end on \d+ ranks", text)


def saved(path):
    with open(path, "rb") as file:
        return file.read()


def same_as_on_one(ranks, *options, saves=True):
    """So many ranks on each of two hosts, and as many on one."""
    with namespaces.Hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
        far, near = ([GPT, "--steps", "2", *options, *(["--save", os.path.join(folder, name)] if saves else [])] for name in ("far", "near"))
        job = Job(hosts, [ranks, ranks], far)
        statuses = job.end()
        equal((statuses, None if statuses == [0, 0] else job.text(0) + job.text(1)), ([0, 0], None))
        one = subprocess.run([TUTTI, "run", "-n", str(2 * ranks), *near], check=True, capture_output=True, text=True, timeout=LIMIT)
        equal(len(losses(one.stdout)), 1)
        equal(losses(job.text(0)), losses(one.stdout))
        if saves:
            equal(saved(far[-1]) == saved(near[-1]), True)
        hosts.nothing_left()


@test
def fully_sharded_training_over_two_hosts_has_the_bits_of_one():
    if WHY_NOT:
        return WHY_NOT
    same_as_on_one(1, "--mode", "sharded")
    same_as_on_one(2, "--mode", "sharded", "--tensor", "2", saves=False)
    return None


@test
def data_and_tensor_parallel_training_over_two_hosts_has_the_bits_of_one():
    if WHY_NOT:
        return WHY_NOT
    same_as_on_one(1, "--mode", "data")
    same_as_on_one(1, "--mode", "data", "--tensor", "2", saves=False)
    return None


@test
def after_a_death_on_one_of_two_hosts_the_others_go_on_from_the_last_checkpoint():
    if WHY_NOT:
        return WHY_NOT
    with namespaces.Hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
        def train(name, steps, checkpoint):
            return [GPT, "--steps", str(steps), "--every", "2", "--checkpoint", os.path.join(folder, checkpoint), "--save", os.path.join(folder, name)]

        def on_one_host(ranks, command):
            subprocess.run([TUTTI, "run", "-n", str(ranks), *command], check=True, capture_output=True, text=True, timeout=LIMIT)

        job = Job(hosts, [2, 2], [*train("far", 4, "lost"), "--kill", "3", "--at", "3"], options=["--survive"])
        statuses = job.end()
        told = "3 ranks go on from the last checkpoint at step 2," in job.text(0)
        equal((statuses, told, None if statuses == [0, 0] and told else job.text(0) + job.text(1)), ([0, 0], True, None))
        on_one_host(4, train("before", 2, "kept"))
        on_one_host(3, train("near", 4, "kept"))
        equal(saved(os.path.join(folder, "far")) == saved(os.path.join(folder, "near")), True)
        hosts.nothing_left()
    return None


main()
