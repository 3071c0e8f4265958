# SPDX-License-Identifier: Apache-2.0
"""Hosts made of network namespaces, for tests as root: each has a name of its own (UTS), an address 10.77.N.I and a veth
to a bridge in a namespace of its own, so that a cable can be pulled (link down) or cut for some (nftables). Names carry
this process's pid; what a killed test left behind is removed by the next one that starts."""
import atexit
import os
import shutil
import signal
import subprocess
import sys

sys.path.insert(0, os.path.join(os.environ["TEST_SOURCE"], "tests", "tool", "support"))
from cases import wait_for  # noqa: E402

PREFIX = "tuttitest"


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


def alive(pid):
    try:
        os.kill(pid, 0)
        return True
    except ProcessLookupError:
        return False
    except PermissionError:
        return True


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

    def __init__(self, count):
        self.count = count
        self.names = [f"{PREFIX}-{os.getpid()}-{'abcdefgh'[i]}" for i in range(count)]
        self.switch = f"{PREFIX}-{os.getpid()}-switch"
        self.processes = []

    def address(self, host):
        return f"10.77.0.{host + 1}"

    def __enter__(self):
        remove_stale()
        atexit.register(self.close)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: sys.exit(1))
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for host, name in enumerate(self.names):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", self.switch, "link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "-n", self.switch, "link", "set", f"port{host}", "master", "bridge", "up")
            run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
        return self

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
        atexit.unregister(self.close)

    def command(self, host, command):
        """The command line that runs a command there."""
        return ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "sh", "-c",
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
