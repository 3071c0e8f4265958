# SPDX-License-Identifier: Apache-2.0
"""Jobs over the hosts of hosts.py: a launcher on each."""
import os
import re
import tempfile

from cases import LIMIT, TUTTI, patience, wait_for

PATIENT = {"TUTTI_HOST_TIMEOUT": "100"}  # nobody is lost because this machine is busy
SILENCE = f"{2 * patience():.0f}"  # where a host is to be lost: seconds; a busy machine gets more


class Job:
    """One launcher per host."""

    def __init__(self, hosts, ranks, program, options=(), environment=None, secret=True, delay=None, port=29711):
        self.hosts = hosts
        self.folder = tempfile.TemporaryDirectory()
        secret_file = os.path.join(self.folder.name, "secret")
        with open(os.open(secret_file, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write("a secret for the tests\n")
        self.launchers, self.outputs = [], []
        order = range(len(ranks)) if delay is None else delay
        for node in order:
            command = [TUTTI, "run", "--nodes", str(len(ranks)), "--node", str(node), "--meet", f"{hosts.address(0)}:{port}",
                       "-n", str(ranks[node]), *options, *(["--secret-file", secret_file] if secret else []), *program]
            output = open(os.path.join(self.folder.name, f"out-{node}"), "w+")
            self.outputs.append((node, output))
            self.launchers.append((node, hosts.start(node, command, stdout=output, stderr=output,
                                                     env={**os.environ, **PATIENT, **(environment or {})})))
        self.launchers = [launcher for _, launcher in sorted(self.launchers, key=lambda pair: pair[0])]
        self.outputs = [output for _, output in sorted(self.outputs, key=lambda pair: pair[0])]

    def text(self, node):
        with open(self.outputs[node].name) as file:
            return file.read()

    def wait_for_text(self, text, count=1):
        """Until all launchers together have printed it so often."""
        wait_for(lambda: sum(self.text(node).count(text) for node in range(len(self.outputs))) >= count, f"{text!r} {count} times")

    def end(self):
        """Exit statuses, when all have ended."""
        return [launcher.wait(timeout=LIMIT) for launcher in self.launchers]

    def launcher_pid(self, node):
        """Of the launcher itself, below the commands that brought it to its host: they exec."""
        return self.launchers[node].pid

    def rank_pids(self):
        return {int(rank): int(pid) for node in range(len(self.outputs))
                for rank, pid in re.findall(r"rank (\d+) of .*, pid (\d+),", self.text(node))}
