# SPDX-License-Identifier: Apache-2.0
"""tutti run --hosts: one command starts the launchers of all hosts, here by a script in the place of ssh."""
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
import hosts as namespaces  # noqa: E402
from cases import LIMIT, TUTTI, contains, equal, main, test  # noqa: E402

PLACES = os.path.join(os.environ["TEST_BUILD"], "tests", "support", "places")
WHY_NOT = namespaces.why_not()


def over_hosts(case):
    """A case that gets two hosts, a script that runs a command on one of them, and a folder."""
    def run():
        if WHY_NOT:
            return WHY_NOT
        with namespaces.Hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
            script = os.path.join(folder, "rsh")
            with open(script, "w") as file:
                file.write("#!/bin/sh\ncase $1 in\n")
                for host in range(2):
                    file.write(f'{hosts.address(host)}) exec ip netns exec {hosts.names[host]} unshare --uts '
                               f'sh -c "hostname {"ab"[host]}; $2" ;;\n')
                file.write('*) echo "no such host: $1" >&2; exit 255 ;;\nesac\n')
            os.chmod(script, 0o755)
            case(hosts, script, folder)
            hosts.nothing_left()
        return None
    run.__name__ = case.__name__
    return test(run)


def start(hosts, script, program, options=(), ranks=(2, 2), environment=None, **more):
    """The command, on host 0, as people type it."""
    listed = ",".join(f"{hosts.address(host)}:{count}" for host, count in enumerate(ranks))
    return hosts.start(0, [TUTTI, "run", "--hosts", listed, "--rsh", script, *options, *program], stderr=subprocess.PIPE,
                       env={**os.environ, "TUTTI_HOST_TIMEOUT": "100", **(environment or {})}, **more)


@over_hosts
def one_command_starts_the_ranks_of_all_hosts(hosts, script, folder):
    job = start(hosts, script, [PLACES, "hello"], ranks=(2, 3))
    output, errors = job.communicate(timeout=LIMIT)
    equal((job.returncode, errors), (0, ""))
    for rank in range(5):
        node, local, size = (0, rank, 2) if rank < 2 else (1, rank - 2, 3)
        contains(output, f"[{rank}] rank {rank} of 5, local {local} of {size}, node {node} of 2,")
    equal(output.count("master 10.77.0.1\n"), 5)


@over_hosts
def a_death_is_told_once_and_its_status_kept(hosts, script, folder):
    job = start(hosts, script, [PLACES, "kill", "3"])
    output, errors = job.communicate(timeout=LIMIT)
    equal(job.returncode, 137)
    equal(len(re.findall(r"tutti run: rank 3 on b \(pid \d+\) was killed by signal 9 \(Killed\)\n", errors)), 1)
    contains(errors, "tutti run: then ranks 0-2 exited with status 5\n")


@over_hosts
def words_of_the_program_survive_two_shells(hosts, script, folder):
    odd = "it's $HOME \"and\" `more`; *"
    job = start(hosts, script, ["/bin/echo", odd], ranks=(1, 1))
    output, errors = job.communicate(timeout=LIMIT)
    equal(sorted(output.splitlines()), [f"[0] {odd}", f"[1] {odd}"])
    equal(job.returncode, 0)


def words_and_secrets(hosts):
    """All command lines and environments on all hosts, and the secrets that processes hold."""
    words, secrets = b"", set()
    for pid in [pid for host in range(2) for pid in hosts.pids(host)]:
        try:
            for name in ("cmdline", "environ"):
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    words += file.read()
            if "tutti-secret" in os.readlink(f"/proc/{pid}/fd/3"):
                with open(f"/proc/{pid}/fd/3", "rb") as file:
                    secrets.add(file.read())
        except OSError:
            pass  # it has ended
    return words, secrets


@over_hosts
def settings_go_along_and_the_secret_is_on_no_command_line(hosts, script, folder):
    job = start(hosts, script, ["/bin/sh", "-c", "echo trace=$TUTTI_TRACE_ENTRIES; sleep 1000"], ranks=(1, 1),
                environment={"TUTTI_TRACE_ENTRIES": "128"})
    equal(sorted(job.stdout.readline() for _ in range(2)), ["[0] trace=128\n", "[1] trace=128\n"])
    words, secrets = words_and_secrets(hosts)
    equal(len(secrets), 1)  # all ranks have the same
    assert secrets.pop() not in words
    job.send_signal(signal.SIGTERM)
    output, error = job.communicate(timeout=LIMIT)
    equal(job.returncode, 143)
    contains(output + (error or ""), "tutti run: stopped by SIGTERM from outside")


@over_hosts
def the_standard_input_reaches_rank_0(hosts, script, folder):
    job = start(hosts, script, [PLACES, "input"], ranks=(1, 1), stdin=subprocess.PIPE)
    output, _ = job.communicate("first\nsecond\n", timeout=LIMIT)
    contains(output, "[0] first\n[0] second\n")
    equal(job.returncode, 0)


@over_hosts
def an_interrupt_reaches_all_ranks_once(hosts, script, folder):
    job = start(hosts, script, [PLACES, "wait"])
    lines = []
    while sum("all are here" in line for line in lines) < 4:
        lines.append(job.stdout.readline())
        assert lines[-1] != "", "".join(lines)
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=LIMIT)
    equal(job.returncode, 130)


@over_hosts
def a_host_that_cannot_be_reached_is_named(hosts, script, folder):
    job = hosts.start(0, [TUTTI, "run", "--hosts", f"{hosts.address(0)}:1,10.77.0.99:1", "--rsh", script, PLACES], stderr=subprocess.PIPE)
    _, errors = job.communicate(timeout=LIMIT)
    assert job.returncode != 0
    contains(errors, "no such host: 10.77.0.99")
    contains(errors, "the launcher of host 10.77.0.99 did not come")


@over_hosts
def the_death_of_the_command_ends_everything(hosts, script, folder):
    job = start(hosts, script, [PLACES, "wait"])
    lines = []
    while sum("all are here" in line for line in lines) < 4:
        lines.append(job.stdout.readline())
        assert lines[-1] != "", "".join(lines)
    job.kill()
    job.communicate(timeout=LIMIT)


def doctor(hosts, script, listed):
    done = hosts.start(0, [TUTTI, "doctor", "-v", "--hosts", listed, "--rsh", script])
    return done.communicate(timeout=LIMIT)[0]


@over_hosts
def doctor_looks_at_other_hosts(hosts, script, folder):
    other = hosts.address(1)
    output = doctor(hosts, script, f"{other}:4,10.77.0.99,nowhere.invalid")
    contains(output, f"host {other}: it would reach this host at 10.77.0.1, on eth0 (MTU 1500), chosen by the route to it")
    contains(output, f"host {other}: {script} gets there, and ")
    contains(output, f"host {other}: it reaches a port of this host at 10.77.0.1, also with long packets")
    contains(output, f"host {other}: its end has MTU 1500 (eth0) as this one has, and so does the way")
    contains(output, "no such host: 10.77.0.99")
    contains(output, "failure  host nowhere.invalid: ")


@over_hosts
def doctor_finds_firewalls_and_other_versions(hosts, script, folder):
    why = hosts.cut(0, 1)
    if why:
        return
    contains(doctor(hosts, script, hosts.address(1)), "it cannot reach a port of this host at 10.77.0.1: ")
    stranger = os.path.join(folder, "stranger")
    with open(stranger, "w") as file:
        file.write("#!/bin/sh\necho tutti 0.0.1\n")
    os.chmod(stranger, 0o755)
    contains(doctor(hosts, stranger, hosts.address(1)), 'there says "tutti 0.0.1"')


@over_hosts
def doctor_compares_the_ends_of_a_cable(hosts, script, folder):
    other = hosts.address(1)
    subprocess.run(["ip", "-n", hosts.names[1], "link", "set", "eth0", "mtu", "1400"], check=True)
    contains(doctor(hosts, script, other), f"warning  host {other}: its end has MTU 1400 (eth0), this one 1500 (eth0)")
    subprocess.run(["ip", "-n", hosts.names[1], "link", "set", "eth0", "mtu", "1500"], check=True)
    subprocess.run(["ip", "-n", hosts.names[1], "route", "add", f"{hosts.address(0)}/32", "dev", "eth0", "mtu", "1300"], check=True)
    contains(doctor(hosts, script, other), f"warning  host {other}: both ends have MTU 1500, but the way between them takes 1300 alone")
    if shutil.which("nft"):
        rules = "table ip short {\nchain in {\ntype filter hook input priority 0;\nmeta length > 1000 drop\n}\n}\n"
        subprocess.run(["ip", "netns", "exec", hosts.names[0], "nft", "-f", "-"], input=rules, text=True, check=True)
        contains(doctor(hosts, script, other), "but long packets get lost on the way")


@test
def lists_of_hosts_that_make_no_sense_are_refused():
    for wrong in ("", "a:0", "a:4,,b:4", "a:x", "a:4,a:4", "-oProxyCommand=x:1"):
        done = subprocess.run([TUTTI, "run", "--hosts", wrong, "true"], capture_output=True, text=True, timeout=LIMIT)
        equal(done.returncode, 2)
        contains(done.stderr, "--hosts")
    for wrong in (["--nodes", "2"], ["--nodes", "2", "--node", "2", "--meet", "a:1"], ["--hosts", "a", "--node", "0"], ["--rsh", "x"],
                  ["--hosts", "a", "--refill", "1"], ["--nodes", "2", "--node", "0", "--meet", "nowhere"]):
        done = subprocess.run([TUTTI, "run", "-n", "1", *wrong, "true"], capture_output=True, text=True, timeout=LIMIT)
        equal(done.returncode, 2)


main()
