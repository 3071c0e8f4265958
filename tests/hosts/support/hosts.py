# SPDX-License-Identifier: Apache-2.0
"""Hosts made of network namespaces, for tests as root: each has a name of its own (UTS), an address 10.77.N.I and a veth
to a bridge in a namespace of its own, so that a cable can be pulled (link down) or cut for some (nftables); two hosts may
also be joined by one veth pair and nothing else (direct). Cables may delay, reorder, lose and repeat: by netem where the
kernel has it, else by the program forward.c between two TAP devices. Names carry this process's pid; what a killed test
leaves behind is removed at once, or by the next one that starts."""
import atexit
import functools
import os
import shutil
import signal
import subprocess
import sys

sys.path.insert(0, os.path.join(os.environ["TEST_SOURCE"], "tests", "tool", "support"))
from cases import wait_for  # noqa: E402

PREFIX = "tuttitest"
FORWARD = os.path.join(os.environ["TEST_BUILD"], "tests", "support", "forward")


def why_not():
    """Why there are no such hosts here; None when there are."""
    if os.geteuid() != 0:
        return "hosts are made of network namespaces, which needs root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "hosts are made of network namespaces, which needs ip (iproute2) and unshare"
    name = f"{PREFIX}-{os.getpid()}-probe"
    made = run("ip", "netns", "add", name, check=False)
    run("ip", "netns", "del", name, check=False)
    if made.returncode != 0:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    return None


def run(*command, check=True):
    return subprocess.run(command, check=check, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@functools.lru_cache(maxsize=None)
def has_netem():
    """Whether the kernel delays, reorders and loses by itself."""
    name = f"{PREFIX}-{os.getpid()}-netem"
    run("ip", "netns", "add", name, check=False)
    made = shutil.which("tc") is not None and run("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms", check=False).returncode == 0
    run("ip", "netns", "del", name, check=False)
    return made


def no_faults():
    """Why cables can have no faults here; None when they can."""
    if has_netem() or (os.path.exists("/dev/net/tun") and os.path.exists(FORWARD)):
        return None
    return "cables with faults need netem or /dev/net/tun"


def alive(pid):
    try:
        os.kill(pid, 0)
        return True
    except ProcessLookupError:
        return False
    except PermissionError:
        return True


def is_up(name):
    """Whether the host's link carries something: the kernel says so a moment after both ends are up, and UCX asks it."""
    link = run("ip", "-n", name, "-o", "link", "show", "eth0", check=False).stdout
    return "LOWER_UP" in link and "state DOWN" not in link and "LOWERLAYERDOWN" not in link


def remove(name):
    """A namespace and all that runs in it."""
    for pid in run("ip", "netns", "pids", name, check=False).stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass
    run("ip", "netns", "del", name, check=False)


def remove_stale():
    for line in run("ip", "netns", "list", check=False).stdout.splitlines():
        parts = line.split()[0].split("-")
        if parts[0] == PREFIX and len(parts) == 3 and parts[1].isdigit() and not alive(int(parts[1])):
            remove(line.split()[0])


class Hosts:
    """with Hosts(2) as hosts: hosts.start(0, [...])"""

    def __init__(self, count, direct=False, forward=None):
        self.count = count
        self.direct = direct  # one cable between two hosts
        self.faults = forward  # of every cable to the switch: delay and jitter in ms; reorder, loss and repeat in percent
        self.names = [f"{PREFIX}-{os.getpid()}-{'abcdefgh'[i]}" for i in range(count)]
        self.switch = f"{PREFIX}-{os.getpid()}-switch"
        self.processes = []

    def address(self, host):
        return f"10.77.0.{host + 1}"

    def __enter__(self):
        remove_stale()
        # Outlives this process: when that ends, however it does, its end of the pipe closes, and what is left goes.
        self.remover = subprocess.Popen(["sh", "-c", 'cat; for name; do ip netns pids "$name" | xargs -r kill -9; ip netns del "$name"; done', "sh",
                                         *self.names, self.switch],
                                        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        atexit.register(self.close)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: sys.exit(1))
        for name in self.names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        if self.direct:
            run("ip", "-n", self.names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", self.names[1])
        else:
            self.join_by_a_switch()
        for host, name in enumerate(self.names):
            run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
        wait_for(lambda: all(map(is_up, self.names)), "the links of all hosts")
        return self

    def join_by_a_switch(self):
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for host, name in enumerate(self.names):
            if self.faults is None or not self.forward(host):
                run("ip", "-n", self.switch, "link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "-n", self.switch, "link", "set", f"port{host}", "master", "bridge", "up")
            if self.faults is not None and has_netem():
                self.disturb(host)

    def forward(self, host):
        """A cable with faults, where the kernel has no netem."""
        if has_netem():
            return False
        options = [word for name, value in self.faults.items() for word in (f"--{name}", str(value))]
        process = subprocess.Popen([FORWARD, self.names[host], "eth0", self.switch, f"port{host}", *options, "--seed", str(host + 1)],
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        assert process.stdout.readline() == "ready\n", "the forwarder has not made its devices"
        return True

    def disturb(self, host):
        of = {"delay": 0, "jitter": 0, "reorder": 0, "loss": 0, "repeat": 0, **self.faults}
        for name, device in ((self.names[host], "eth0"), (self.switch, f"port{host}")):
            run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "netem", "delay", f"{max(of['delay'], 0.1)}ms", f"{of['jitter']}ms",
                "loss", f"{of['loss']}%", "duplicate", f"{of['repeat']}%", "reorder", f"{of['reorder']}%")

    def limit(self, host, rate):
        """What the host sends goes at that rate at most, like 100mbit. Why it does not; None when it does."""
        if shutil.which("tc") is None:
            return "limiting a rate needs tc (iproute2)"
        limited = run("tc", "-n", self.names[host], "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "32kb", "latency", "100ms",
                      check=False)
        return f"this kernel limits no rate: {limited.stderr.strip()}" if limited.returncode != 0 else None

    def lose(self, host, percent):
        """Of the packets that come to the host so many are dropped. Why not; None when they are."""
        if shutil.which("nft") is None:
            return "dropping packets needs nft"
        rules = ("table ip lose {\nchain in {\ntype filter hook input priority 0;\n"
                 f"numgen random mod 100 < {percent} drop\n}}\n}}\n")
        made = subprocess.run(["ip", "netns", "exec", self.names[host], "nft", "-f", "-"], input=rules, text=True, capture_output=True)
        return f"nft cannot drop packets here: {made.stderr.strip()}" if made.returncode != 0 else None

    def __exit__(self, *_):
        self.close()

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for name in self.names + [self.switch]:
            remove(name)
        for process in self.processes:
            process.wait()
        self.processes = []
        self.remover.stdin.close()
        self.remover.wait()
        atexit.unregister(self.close)

    def command(self, host, command):
        """The command line that runs a command there. Other libraries tell hosts by their System V shared memory (--ipc)."""
        return ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "--ipc", "sh", "-c",
                f'hostname {"abcdefgh"[host]} && exec "$@"', "sh", *command]

    def start(self, host, command, **options):
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
        process = subprocess.Popen(self.command(host, command), **options)
        self.processes.append(process)
        return process

    def pids(self, host):
        return [int(pid) for pid in run("ip", "netns", "pids", self.names[host], check=False).stdout.split()]

    def pull(self, host):
        """Takes the cable out."""
        run("ip", "-n", self.switch, "link", "set", f"port{host}", "down")

    def cut(self, one, other):
        """No packet passes between two hosts; both still reach the rest."""
        if shutil.which("nft") is None:
            return "cutting one of several cables needs nft"
        for host, far in ((one, other), (other, one)):
            rules = ("table ip cut {\nchain in {\ntype filter hook input priority 0;\n"
                     f"ip saddr {self.address(far)} drop\n}}\n}}\n")
            subprocess.run(["ip", "netns", "exec", self.names[host], "nft", "-f", "-"], input=rules, text=True, check=True)
        return None

    def nothing_left(self):
        """Waits until nothing runs on any host."""
        wait_for(lambda: not any(self.pids(host) for host in range(self.count)), "nothing to run on any host")
