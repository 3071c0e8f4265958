# SPDX-License-Identifier: Apache-2.0
"""What collectives send to other hosts, counted in jobs over network namespaces, is what the simulation of bench/scale says, message by message."""
import os
import re
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
import hosts as namespaces  # noqa: E402
from cases import LIMIT, equal, main, test  # noqa: E402
from jobs import Job  # noqa: E402

BUILD = os.environ["TEST_BUILD"]
TRAFFIC = os.path.join(BUILD, "tests", "support", "traffic")
WHY_NOT = namespaces.why_not()
if not os.path.exists(os.path.join(BUILD, "plugins", "libtutti-ucx.so")):
    WHY_NOT = "the plug-in tutti-ucx was not built: no libucx-dev"
# Short and long reductions, one, several and more than a window of fragments, wide accumulators, trees and rows of hosts.
CALLS = ["barrier:u8:0", "all_reduce:f32:2", "all_reduce:f32:1000", "all_reduce:bf16:300000", "all_reduce:f64:1500000", "reduce:f32:200000",
         "reduce_scatter:f32:50000", "all_gather:u8:1000", "all_gather:u8:700000", "broadcast:u8:100", "broadcast:u8:9000000", "gather:f32:1000",
         "scatter:f32:100000", "all_gather_v:f32:20000", "reduce_scatter_v:f32:30000", "all_to_all_v:u8:70000", "permute:u8:300000", "all_to_all:u8:5000", "all_to_all:u8:400000", "all_reduce+any:f32:2", "all_reduce+any:f32:3000", "all_reduce+any:bf16:600000"]


def compare(each, calls, options=()):
    if WHY_NOT:
        return WHY_NOT
    listed = ",".join(map(str, each))
    simulated = subprocess.run([TRAFFIC, "simulated", listed, *options, *calls], capture_output=True, text=True, timeout=LIMIT, check=True).stdout
    with namespaces.Hosts(len(each)) as hosts:
        job = Job(hosts, each, [TRAFFIC, "real", listed, *options, *calls], options=["--bind", "none"])
        equal(job.end(), [0] * len(each))
        real = [line.split("] ", 1)[1] for node in range(len(each)) for line in job.text(node).splitlines() if " after " in line]
        hosts.nothing_left()
    equal(len(real), sum(each) * len(calls))
    wrong = sorted(set(real) ^ set(simulated.splitlines()))
    assert not wrong, "counted and simulated:\n" + "\n".join(f"{'counted' if line in real else 'simulated'}: {line}" for line in wrong)
    return None


@test
def two_hosts_send_what_is_simulated():
    return compare([1, 1], CALLS)


@test
def three_hosts_of_unequal_size_send_what_is_simulated():
    return compare([2, 1, 2], CALLS)


@test
def four_hosts_send_what_is_simulated():
    return compare([1, 2, 1, 1], CALLS)


@test
def six_hosts_send_what_is_simulated():
    return compare([1] * 6, [call for call in CALLS if not call.startswith("all_to_all:u8:4")])


@test
def ranks_that_do_not_follow_each_other_send_what_is_simulated():
    return compare([2, 2], ["barrier:u8:0", "all_reduce:f32:1000", "all_reduce:f32:200000", "all_gather:u8:50000", "broadcast:u8:5000"], ["--round-robin"])


# What both ranks send: docs/scaling.md has the formulas. A put is followed by the question of a barrier whether it has come, and its answer.
PAIRS = {"signal:0": 2, "send:80": 1, "send:1000": 2, "send:131072": 2, "send:1000000": 2 + 8 + 1, "put:1000": 1 + 2, "put:131072": 1 + 2,
         "put:1000000": 8 + 1 + 2, "put:4194304": 32 + 4 + 2, "get:1000": 2, "get:1000000": 16}


@test
def messages_puts_gets_and_signals_send_what_the_formulas_say():
    if WHY_NOT:
        return WHY_NOT
    with namespaces.Hosts(2) as hosts:  # nothing: those that are done first say goodbye
        job = Job(hosts, [2, 1], [TRAFFIC, "pairs", "2,1", *PAIRS, "nothing:0"], options=["--bind", "none"])
        equal(job.end(), [0, 0])
        found = re.findall(r"rank [02] after (\S+): (\d+) sent", job.text(0) + job.text(1))
        hosts.nothing_left()
    equal({call: sum(int(sent) for other, sent in found if other == call) for call in PAIRS}, PAIRS)
    return None


main()
