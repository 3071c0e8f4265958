# SPDX-License-Identifier: Apache-2.0
"""tutti run over several hosts, each a network namespace: starting, output, deaths, lost hosts, and that nothing is left."""
import os
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
import hosts as namespaces  # noqa: E402
from cases import LIMIT, TUTTI, contains, equal, main, test, wait_for  # noqa: E402
from jobs import Job, PATIENT, SILENCE  # noqa: E402

PLACES = os.path.join(os.environ["TEST_BUILD"], "tests", "support", "places")
WHY_NOT = namespaces.why_not()
PORT = 29711


def over_hosts(case):
    """A case that needs hosts."""
    def run():
        return WHY_NOT if WHY_NOT else case()
    run.__name__ = case.__name__
    return test(run)


def told(job, node, text):
    contains(job.text(node), text)


@over_hosts
def ranks_of_two_hosts_meet_and_are_numbered_host_by_host():
    with namespaces.Hosts(2) as hosts:
        job = Job(hosts, [2, 3], [PLACES, "hello"])
        equal(job.end(), [0, 0])
        for rank in range(5):
            node, local, size = (0, rank, 2) if rank < 2 else (1, rank - 2, 3)
            told(job, node, f"[{rank}] rank {rank} of 5, local {local} of {size}, node {node} of 2,")
            told(job, node, "master 10.77.0.1")
        hosts.nothing_left()


@over_hosts
def three_hosts_meet_in_any_order():
    with namespaces.Hosts(3) as hosts:
        job = Job(hosts, [1, 1, 1], [PLACES, "hello"], delay=[2, 1, 0])
        equal(job.end(), [0, 0, 0])
        hosts.nothing_left()


@over_hosts
def without_a_secret_no_other_host_is_served_unless_the_network_is_trusted():
    with namespaces.Hosts(2) as hosts:
        refused = hosts.start(0, [TUTTI, "run", "--nodes", "2", "--node", "0", "--meet", f"{hosts.address(0)}:{PORT}", "-n", "1", PLACES])
        output, _ = refused.communicate(timeout=LIMIT)
        equal(refused.returncode, 1)
        contains(output, "TUTTI_TRUST_NETWORK=1")
        contains(output, "--secret-file")
        job = Job(hosts, [1, 1], [PLACES, "hello"], secret=False, environment={"TUTTI_TRUST_NETWORK": "1"})
        equal(job.end(), [0, 0])


@over_hosts
def a_launcher_with_another_secret_is_refused_in_words():
    with namespaces.Hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
        job = Job(hosts, [1, 1], [PLACES, "hello"], delay=[0])
        wrong = os.path.join(folder, "wrong")
        with open(os.open(wrong, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write("another secret, which is longer")
        common = [TUTTI, "run", "--nodes", "2", "--node", "1", "--meet", f"{hosts.address(0)}:{PORT}", "-n", "1"]
        stranger = hosts.start(1, [*common, "--secret-file", wrong, PLACES, "hello"])
        output, _ = stranger.communicate(timeout=LIMIT)
        equal(stranger.returncode, 1)
        contains(output, "cannot prove the job's secret")
        job.wait_for_text("the secrets differ")
        os.chmod(wrong, 0o644)
        open_file = hosts.start(1, [*common, "--secret-file", wrong, PLACES, "hello"])
        output, _ = open_file.communicate(timeout=LIMIT)
        equal(open_file.returncode, 1)
        contains(output, "chmod 600")
        right = hosts.start(1, [*common, "--secret-file", os.path.join(job.folder.name, "secret"), PLACES, "hello"],
                            env={**os.environ, **PATIENT})
        right.communicate(timeout=LIMIT)
        equal(right.returncode, 0)  # the stranger has harmed nobody
        equal(job.end(), [0])


@over_hosts
def launchers_that_do_not_fit_each_other_are_told_why():
    with namespaces.Hosts(2) as hosts:
        job = Job(hosts, [1, 1], [PLACES, "hello"], delay=[0])
        secret = ["--secret-file", os.path.join(job.folder.name, "secret")]
        meet = ["--meet", f"{hosts.address(0)}:{PORT}", "-n", "1", *secret]
        for options, words in ((["--nodes", "3", "--node", "1"], "--nodes 3"), (["--nodes", "2", "--node", "1", "--survive"], "--survive")):
            odd = hosts.start(1, [TUTTI, "run", *options, *meet, PLACES])
            output, _ = odd.communicate(timeout=LIMIT)
            equal(odd.returncode, 1)
            contains(output, words)
        job.launchers[0].send_signal(signal.SIGINT)  # a meeting can be given up
        equal(job.end(), [130])
        hosts.nothing_left()


@over_hosts
def a_program_that_one_host_lacks_is_told_everywhere():
    with namespaces.Hosts(2) as hosts:
        job = Job(hosts, [1, 1], [PLACES, "hello"], delay=[0])
        secret = ["--secret-file", os.path.join(job.folder.name, "secret")]
        other = hosts.start(1, [TUTTI, "run", "--nodes", "2", "--node", "1", "--meet", f"{hosts.address(0)}:{PORT}", "-n", "1", *secret,
                                "/no/such/program"])
        other.communicate(timeout=LIMIT)
        equal((other.returncode, job.end()), (127, [127]))
        told(job, 0, "node 1 (b) cannot start the program: there is no such program")


@over_hosts
def the_standard_input_goes_to_rank_0():
    with namespaces.Hosts(2) as hosts:
        job = Job(hosts, [1, 1], [PLACES, "hello"], delay=[])
        secret = os.path.join(job.folder.name, "secret")
        launchers = [hosts.start(node, [TUTTI, "run", "--nodes", "2", "--node", str(node), "--meet", f"{hosts.address(0)}:{PORT}",
                                        "--secret-file", secret, "-n", "1", PLACES, "input"], stdin=subprocess.PIPE,
                                 env={**os.environ, **PATIENT}) for node in range(2)]
        outputs = [launcher.communicate(f"for node {node}\n", timeout=LIMIT)[0] for node, launcher in enumerate(launchers)]
        contains(outputs[0], "[0] for node 0")
        assert "for node" not in outputs[1]


@over_hosts
def a_killed_rank_is_named_with_its_signal_by_every_launcher_and_every_rank():
    with namespaces.Hosts(2) as hosts:
        job = Job(hosts, [2, 2], [PLACES, "kill", "3"], options=["--grace", "60"])
        equal(job.end(), [137, 137])
        pid = job.rank_pids()[3]
        for node in range(2):
            told(job, node, f"tutti run: rank 3 on b (pid {pid}) was killed by signal 9 (Killed)\n")
            told(job, node, "tutti run: then ranks 0-2 exited with status 5\n")
        for rank in range(2):  # of the other host: they know it from the launchers
            told(job, 0, f"[{rank}] error: rank 3 on b (pid {pid}) was killed by signal 9 (Killed), seen in a wait on the world's store")
        hosts.nothing_left()


@over_hosts
def a_killed_rank_is_named_in_a_collective_over_hosts():
    if not os.path.exists(os.path.join(os.environ["TEST_BUILD"], "plugins", "libtutti-ucx.so")):
        return  # no UCX here
    job_program = os.path.join(os.environ["TEST_BUILD"], "tests", "support", "job")
    with namespaces.Hosts(2) as hosts:
        equal(Job(hosts, [2, 2], [job_program, "well"]).end(), [0, 0])
        job = Job(hosts, [2, 2], [job_program, "kill"])
        assert all(job.end())
        for node in range(2):
            contains(job.text(node), "was killed by signal 9 (Killed), seen ")  # by the ranks
        hosts.nothing_left()


@over_hosts
def the_exit_status_is_that_of_the_first_failure_on_every_host():
    with namespaces.Hosts(2) as hosts:
        for victim in (0, 3):
            job = Job(hosts, [2, 2], [PLACES, "fail", str(victim)])
            equal(job.end(), [7, 7])
            for node in range(2):
                contains(job.text(node), f"tutti run: rank {victim} on {'aabb'[victim]} (pid {job.rank_pids()[victim]}) exited with status 7\n")
        hosts.nothing_left()


@over_hosts
def a_rank_that_ends_before_it_opens_its_world_is_no_riddle_for_the_others():
    with namespaces.Hosts(2) as hosts:
        job = Job(hosts, [1, 1], [PLACES, "early", "1"])
        equal(job.end(), [7, 7])
        told(job, 0, "rank 1 on b (pid ")
        told(job, 0, "exited with status 7, seen by rank 0 while opening world")


@over_hosts
def with_survive_the_others_go_on():
    with namespaces.Hosts(2) as hosts:
        job = Job(hosts, [2, 2], [PLACES, "last"], options=["--survive"])
        job.wait_for_text("all are here", 4)
        os.kill(job.rank_pids()[3], signal.SIGKILL)
        equal(job.end(), [0, 0])
        for node in range(2):
            told(job, node, "was killed by signal 9 (Killed); the others go on")
        hosts.nothing_left()


@over_hosts
def a_signal_reaches_the_ranks_of_all_hosts():
    with namespaces.Hosts(2) as hosts:
        for node in range(2):
            job = Job(hosts, [1, 2], [PLACES, "wait"])
            job.wait_for_text("all are here", 3)
            number, name = ((signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM"))[node]
            job.launchers[node].send_signal(number)
            equal(job.end(), [128 + number, 128 + number])
            for other in range(2):  # no death of ranks; one of them may hear of another's before the signal has come to itself, and say so
                told(job, other, f"tutti run: stopped by {name} from outside\n")
                said = [line for line in job.text(other).splitlines() if line.startswith("tutti run: ")]
                assert not any("was killed" in line or "were killed" in line for line in said), job.text(other)
            hosts.nothing_left()


def lose(victim, how, words, survive=False, hosts_count=2, timeout=None, grace="60"):
    """A job loses one launcher in some way; what the others print, and their exit statuses."""
    with namespaces.Hosts(hosts_count) as hosts:
        job = Job(hosts, [1] * hosts_count, [PLACES, "last" if survive else "wait"], options=["--grace", grace, *(["--survive"] if survive else [])],
                  environment={"TUTTI_HOST_TIMEOUT": timeout} if timeout else None)
        job.wait_for_text("all are here", hosts_count)
        how(hosts, job, victim)
        others = [node for node in range(hosts_count) if node != victim]
        statuses = [job.launchers[node].wait(timeout=LIMIT) for node in others]
        for node in others:
            told(job, node, words)
        for node in others if grace == "60" else []:
            contains(job.text(node), "] error: ")  # its ranks were told, and needed not be stopped
            assert "signal 15" not in job.text(node), job.text(node)
        if how is stop:
            job.launchers[victim].send_signal(signal.SIGCONT)
        job.launchers[victim].wait(timeout=LIMIT)
        hosts.nothing_left()
        return statuses


def kill(hosts, job, node):
    job.launchers[node].send_signal(signal.SIGKILL)


def stop(hosts, job, node):
    job.launchers[node].send_signal(signal.SIGSTOP)


def pull(hosts, job, node):
    hosts.pull(node)


@over_hosts
def a_killed_launcher_is_a_lost_host():
    equal(lose(1, kill, "host b (node 1) is lost: its launcher closed the connection"), [1])


@over_hosts
def the_death_of_node_0s_launcher_ends_the_job():
    equal(lose(0, kill, "lost the launcher that holds the job together"), [1])


@over_hosts
def with_survive_a_lost_host_ends_only_itself():
    equal(lose(2, kill, "host c (node 2) is lost", survive=True, hosts_count=3), [0, 0])


@over_hosts
def a_stopped_launcher_is_lost_after_its_silence_and_its_ranks_end():
    equal(lose(1, stop, "host b (node 1) is lost: it has been silent for", timeout=SILENCE), [1])


@over_hosts
def a_stopped_launcher_of_node_0_ends_the_job():
    # A rank may have asked its store just before: it waits for that answer until it is stopped.
    equal(lose(0, stop, "it has been silent for", timeout=SILENCE, grace="1"), [1])


@over_hosts
def a_pulled_cable_ends_both_parts_without_survive():
    equal(lose(1, pull, "host b (node 1) is lost: it has been silent for", timeout=SILENCE), [1])


@over_hosts
def of_a_parted_job_the_part_with_half_of_the_ranks_and_the_store_goes_on():
    with namespaces.Hosts(2) as hosts:
        job = Job(hosts, [1, 1], [PLACES, "last"], options=["--survive"], environment={"TUTTI_HOST_TIMEOUT": SILENCE})
        job.wait_for_text("all are here", 2)
        hosts.pull(1)
        equal(job.end(), [0, 1])
        told(job, 0, "host b (node 1) is lost: it has been silent for")
        told(job, 0, "; the others go on")
        told(job, 1, "they cannot know who goes on")
        hosts.nothing_left()


@over_hosts
def a_part_with_less_than_half_of_the_ranks_ends_though_it_has_the_store_and_the_other_goes_on():
    with namespaces.Hosts(2) as hosts:
        job = Job(hosts, [1, 2], [PLACES, "last"], options=["--survive"], environment={"TUTTI_HOST_TIMEOUT": SILENCE})
        job.wait_for_text("all are here", 3)
        hosts.pull(1)
        equal(job.end(), [1, 0])
        told(job, 0, "fewer than half of the ranks (1 of 3) are left")
        told(job, 1, "2 of 3 ranks have, and go on with this one")
        hosts.nothing_left()


@over_hosts
def a_stranger_on_the_port_of_the_meeting_harms_nobody():
    with namespaces.Hosts(2) as hosts:
        job = Job(hosts, [1, 1], [PLACES, "hello"], delay=[0])
        noise = hosts.start(1, [sys.executable, "-c", f"""
import socket, time
for data in (b"GET / HTTP/1.0\\r\\n\\r\\n", b"", b"TUTTIAG1", b"TUTTIAG1\\0" + bytes(32), b"TUTTIAG1\\1" + bytes(96)):
    for attempt in range(1000):
        try:
            peer = socket.create_connection(("{hosts.address(0)}", {PORT}))
            break
        except OSError:
            time.sleep(0.05)
    peer.sendall(data)
    time.sleep(0.05)
    peer.close()
"""])
        equal(noise.wait(timeout=LIMIT), 0)
        secret = os.path.join(job.folder.name, "secret")
        other = hosts.start(1, [TUTTI, "run", "--nodes", "2", "--node", "1", "--meet", f"{hosts.address(0)}:{PORT}", "-n", "1",
                                "--secret-file", secret, PLACES, "hello"], env={**os.environ, **PATIENT})
        other.communicate(timeout=LIMIT)
        equal(other.returncode, 0)
        equal(job.end(), [0])


main(beside=3)
