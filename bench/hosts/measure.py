# SPDX-License-Identifier: Apache-2.0
"""Measures Tutti between two hosts beside its peers: two network namespaces of this machine, joined by a veth pair. Needs root.

    cmake --build build/release --target tutti_command tutti_ucx bench_peers_tutti bench_hosts_stream bench_hosts_ucx bench_launch
    python3 bench/hosts/measure.py --out hosts.json

All-reduce of Tutti, Open MPI over UCX and over TCP and gloo (PyTorch; TEST_PYTHON names a Python that has it), with one rank on each host and with
two; of one TCP stream (stream.c) and of UCX alone (ucx.c), which do the same exchange and nothing else: what the wire permits, and what UCX; puts and signals of Tutti, by messages and by
UCX's remote memory access (TUTTI_RMA=on), which is emulated over TCP; and how long it takes to start 2 x 4 ranks, open the world, meet
and end, beside mpirun. All are alive at once and take turns, row by row and round by round, on the same CPUs; those that wait sleep. The first round of each
row checks the results. --filter and --append make several short runs of a long one.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.dirname(os.path.dirname(HERE))
KIB, MIB = 1 << 10, 1 << 20
TARGETS = {8: 1.0, 4 * KIB: 0.8, MIB: 0.8, 64 * MIB: 0.8}
FLOORS = ("stream", "ucx")  # no peers: what an exchange costs at least
BY_KEY = "tutti_rma"  # Tutti itself, with puts by UCX's remote memory access, which is emulated over TCP
PORT = 20000 + os.getpid() % 10000


def modules(build):
    """The hosts of the tests, and the contenders of bench/peers."""
    os.environ.setdefault("TEST_SOURCE", SOURCE)
    os.environ.setdefault("TEST_BUILD", build)
    sys.path[:0] = [os.path.join(SOURCE, "bench", "peers"), os.path.join(SOURCE, "tests", "hosts", "support")]
    import hosts
    import measure as peers
    return hosts, peers


def write_rsh(hosts, folder):
    """A script in the place of ssh: HOST COMMAND…, for tutti run and for mpirun."""
    script = os.path.join(folder, "rsh")
    with open(script, "w") as file:
        file.write("#!/bin/sh\nhost=$1\nshift\ncase $host in\n")
        for host in range(2):
            words = " ".join(f"'{word}'" for word in hosts.command(host, [])[:-1] if word)
            file.write(f"{hosts.address(host)}) exec {words} sh sh -c \"$*\" ;;\n")
        file.write("*) exit 255 ;;\nesac\n")
    os.chmod(script, 0o755)
    return script


def mpirun(hosts, script, each, extra):
    """Open MPI on the two hosts. What it is told besides is where they are: nothing that would slow it down. Two that start at once must not share a folder."""
    place = tempfile.mkdtemp(prefix="mpi-", dir=os.path.dirname(script))
    addresses = ",".join(f"{hosts.address(host)}:{each}" for host in range(2))
    crowded = ["--mca", "mpi_yield_when_idle", "1"] if 2 * each > len(os.sched_getaffinity(0)) else []
    return hosts.command(0, [shutil.which("mpirun.openmpi") or "mpirun", "--allow-run-as-root", "--bind-to", "none", "--oversubscribe", "--host", addresses,
                             "-n", str(2 * each), "--mca", "plm_rsh_agent", script, "--mca", "orte_tmpdir_base", place, "--mca", "oob_tcp_if_include", "eth0", *crowded, *extra])


OVER_UCX = ["--mca", "pml", "ucx", "--mca", "pml_ucx_tls", "any", "--mca", "pml_ucx_devices", "any", "-x", "UCX_NET_DEVICES=eth0", "-x", "UCX_TLS=tcp,self,sysv"]
OVER_TCP = ["--mca", "pml", "ob1", "--mca", "btl", "self,vader,tcp", "--mca", "btl_tcp_if_include", "eth0"]


def tutti_places(hosts, build, secret, each, port):
    return [hosts.command(node, [os.path.join(build, "bin", "tutti"), "run", "-q", "--bind", "none", "--nodes", "2", "--node", str(node), "--meet",
                                 f"{hosts.address(0)}:{PORT + each + port}", "--secret-file", secret, "-n", str(each)]) for node in range(2)]


def start(peers, hosts, build, each, cpus, folder, versions, wanted):
    """Everyone that is installed and wanted."""
    contenders = []

    def add(name, label, command, environments=None, places=None):
        if not wanted or name in wanted or name in ("tutti", BY_KEY, *FLOORS):
            contenders.append(peers.Contender(name, label, command, 2 * each, cpus, environments, places))

    secret, script = os.path.join(folder, "secret"), write_rsh(hosts, folder)
    with open(os.open(secret, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
        file.write("a secret for a measurement\n")
    plugins = {"TUTTI_PLUGIN_PATH": os.path.join(build, "plugins"), "TUTTI_HOST_TIMEOUT": "100"}
    if 2 * each > len(os.sched_getaffinity(0)):  # each host believes that the CPUs are its own; MPI is told the same (mpi_yield_when_idle)
        plugins["TUTTI_SPIN"] = "0"
    add("tutti", "Tutti", [os.path.join(build, "bench", "peers", "tutti")], [plugins, plugins], tutti_places(hosts, build, secret, each, 0))
    if each == 1:
        by_key = {**plugins, "TUTTI_RMA": "on"}
        add(BY_KEY, "Tutti, RMA", [os.path.join(build, "bench", "peers", "tutti")], [by_key, by_key], tutti_places(hosts, build, secret, each, 30))
        for index, (name, label) in enumerate((("stream", "one TCP stream"), ("ucx", "UCX alone"))):
            program = os.path.join(build, "bench", "hosts", name)
            where = {"ADDRESS": hosts.address(0), "PORT": str(PORT + 20 + index)}
            if os.path.exists(program):
                add(name, label, [program], [{**where, "RANK": str(rank)} for rank in range(2)], [hosts.command(host, []) for host in range(2)])
    compiler = shutil.which("mpicc.openmpi") or shutil.which("mpicc")
    if compiler and "Open MPI" in peers.first_line("ompi_info", "--version"):
        program = peers.compile_mpi(compiler, folder)
        versions["Open MPI"] = peers.first_line("ompi_info", "--version")
        add("openmpi_ucx", "Open MPI, UCX", mpirun(hosts, script, each, [*OVER_UCX, program]))
        add("openmpi_tcp", "Open MPI, TCP", mpirun(hosts, script, each, [*OVER_TCP, program]))
    python = peers.find_torch()
    if python:
        versions["gloo"] = "PyTorch " + peers.first_line(python, "-c", "import torch; print(torch.__version__)")
        environments = [{"RANK": str(rank), "WORLD_SIZE": str(2 * each), "MASTER_ADDR": hosts.address(0), "MASTER_PORT": str(PORT + 10 + each),
                         "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"} for rank in range(2 * each)]
        add("gloo", "gloo (PyTorch)", [python, os.path.join(SOURCE, "bench", "peers", "gloo.py")], environments,
            [hosts.command(rank // each, []) for rank in range(2 * each)])
    return contenders


# ---- what is measured ----

def rows_of(each):
    """(operation, type, bytes, mode, state)"""
    rows = [("all_reduce", "f32", size, mode, "clean") for size in TARGETS for mode in ("streaming", "isolated")]
    if each == 1:
        rows += [("put", "f32", size, "isolated", "clean") for size in (4 * KIB, MIB, 64 * MIB)] + [("signal", "f32", 4, "streaming", "clean")]
    return rows


def measure_row(peers, row, contenders, rounds, seconds):
    mine = ("tutti", BY_KEY, "stream")
    columns = [one for one in contenders if (one.name != BY_KEY if row[0] == "all_reduce" else one.name in mine)]
    buffers = "private" if row[0] == "all_reduce" else "symmetric"
    found, plans = {}, {}
    for one in columns:
        first = one.turn(peers.command(row, buffers, 2, 1, False))
        if first:
            plans[one.name] = peers.lengths(row, first[0][1], seconds)
            found[one.name] = {"rounds": [], "wrong": -1, "measurements": plans[one.name][0]}
    for number in range(rounds):
        for one in columns[number % len(columns):] + columns[:number % len(columns)]:
            if one.name in found:
                averages, wrong = one.turn(peers.command(row, buffers, *plans[one.name], number == 0))
                found[one.name]["rounds"].append(averages[0])
                found[one.name]["wrong"] = max(found[one.name]["wrong"], wrong)
    return found


def ratio_to(peers, found, other):
    return peers.median([mine / theirs for mine, theirs in zip(found["tutti"]["rounds"], found[other]["rounds"])])


def ratio(peers, found):
    """Tutti's time over the best peer's, and who that is; the best by its median of all rounds."""
    others = {name: peers.median(one["rounds"]) for name, one in found.items() if name not in ("tutti", BY_KEY, *FLOORS)}
    if not others:
        return None, None
    best = min(others, key=others.get)
    return ratio_to(peers, found, best), best


def show(peers, row, each, found):
    text = ", ".join(f"{name} {peers.median(one['rounds']) / 1e3:.1f}" for name, one in found.items())
    value, best = ratio(peers, found)
    judged = f": {value:.2f} of {best} (target {TARGETS[row[2]]})" if best else ""
    judged += "".join(f"; {ratio_to(peers, found, floor):.2f} of {floor}" for floor in (*FLOORS, BY_KEY) if floor in found)
    if row[2] >= MIB and "stream" in found:
        judged += f"; {row[2] / peers.median(found['tutti']['rounds']):.2f} GB/s"
    wrong = "".join(f" WRONG RESULTS OF {name}" for name, one in found.items() if one["wrong"] > 0)
    print(f"{each} each, {row[0]} {row[2]} {row[3]}: {text} us{judged}{wrong}", flush=True)


def measure_ranks(peers, hosts, options, each, folder, document):
    available = sorted(os.sched_getaffinity(0))
    cpus = ",".join(map(str, available[:2])) if each == 1 else "-" + ",".join(str(available[rank // each % len(available)]) for rank in range(2 * each))
    contenders = start(peers, hosts, options.build, each, cpus, folder, document["versions"], options.only)
    document["labels"].update({contender.name: contender.label for contender in contenders})
    try:
        for row in rows_of(each):
            if not re.search(options.filter, " ".join(map(str, row))):
                continue
            found = measure_row(peers, row, contenders, options.rounds, options.seconds)
            document["rows"].append({"operation": row[0], "bytes": row[2], "mode": row[3], "each": each, "results": found})
            show(peers, row, each, found)
            peers.save(options.out, document)
    finally:
        for contender in contenders:
            contender.stop()


# ---- starting ----

def measure_start(peers, hosts, options, folder, document):
    """2 x 4 ranks: start, open the world, a barrier, close, end."""
    script = write_rsh(hosts, folder)
    source, program = os.path.join(folder, "meet.c"), os.path.join(folder, "meet")
    with open(source, "w") as file:
        file.write("#include <mpi.h>\nint main(int c, char **v) { MPI_Init(&c, &v); MPI_Barrier(MPI_COMM_WORLD); return MPI_Finalize(); }\n")
    listed = ",".join(f"{hosts.address(host)}:4" for host in range(2))
    commands = {"tutti": hosts.command(0, [os.path.join(options.build, "bin", "tutti"), "run", "-q", "--hosts", listed, "--rsh", script,
                                           os.path.join(options.build, "bench", "launch"), "rank"])}
    compiler = shutil.which("mpicc.openmpi") or shutil.which("mpicc")
    if compiler and subprocess.run([compiler, "-O2", "-o", program, source], capture_output=True).returncode == 0:
        commands["openmpi_ucx"] = mpirun(hosts, script, 4, [*OVER_UCX, program])
        commands["openmpi_tcp"] = mpirun(hosts, script, 4, [*OVER_TCP, program])
    environment = {**os.environ, "TUTTI_PLUGIN_PATH": os.path.join(options.build, "plugins")}
    found = {name: {"rounds": [], "wrong": -1} for name in commands}
    names = list(commands)
    for number in range(options.rounds + 1):
        for name in names[number % len(names):] + names[:number % len(names)]:
            begin = time.monotonic_ns()
            done = subprocess.run(commands[name], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=peers.PATIENCE)
            if done.returncode != 0:
                raise RuntimeError(f"{name}: status {done.returncode}\n{done.stdout}{done.stderr}")
            if number > 0:
                found[name]["rounds"].append(float(time.monotonic_ns() - begin))
    document["rows"].append({"operation": "start", "bytes": 0, "mode": "isolated", "each": 4, "results": found})
    value, best = ratio(peers, found)
    print("start of 2 x 4 ranks: " + ", ".join(f"{name} {peers.median(one['rounds']) / 1e6:.0f}" for name, one in found.items()) + " ms" +
          (f": {value:.2f} of {best}" if best else ""), flush=True)
    peers.save(options.out, document)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release", help="the build folder")
    parser.add_argument("--each", default="1,2", help="numbers of ranks on each host, separated by commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.1, help="of one turn")
    parser.add_argument("--congestion", default="cubic", help="how TCP of all contenders finds its rate, by the route between the hosts")
    parser.add_argument("--only", nargs="*", default=[], help="peers that take part: openmpi_ucx openmpi_tcp gloo")
    parser.add_argument("--filter", default="", help="rows whose text (operation type bytes mode state) matches this regular expression; start")
    parser.add_argument("--append", action="store_true", help="add to the file, if it is there, instead of beginning anew")
    parser.add_argument("--out", required=True, help="JSON file")
    options = parser.parse_args()
    options.build = os.path.abspath(options.build)
    namespaces, peers = modules(options.build)
    if namespaces.why_not():
        raise SystemExit(namespaces.why_not())
    document = {"machine": peers.machine(), "commit": peers.commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "rounds": options.rounds,
                "congestion": options.congestion, "versions": {}, "labels": {}, "rows": []}
    if options.append and os.path.exists(options.out):
        import json
        with open(options.out) as file:
            document = json.load(file)
    with namespaces.Hosts(2, direct=True) as hosts, tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        for name in hosts.names:
            namespaces.run("ip", "-n", name, "route", "replace", "10.77.0.0/24", "dev", "eth0", "congctl", options.congestion)
        for each in [int(word) for word in options.each.split(",") if word]:
            measure_ranks(peers, hosts, options, each, folder, document)
        if re.search(options.filter, "start"):
            measure_start(peers, hosts, options, folder, document)
    print(options.out)


if __name__ == "__main__":
    main()
