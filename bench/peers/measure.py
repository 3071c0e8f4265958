# SPDX-License-Identifier: Apache-2.0
"""Measures Tutti beside its peers on this machine and writes the figures as JSON; report.py makes docs/performance.md of them.

    cmake --build build/release
    python3 bench/peers/measure.py --build build/release --ranks 2 --out two-cores.json

Open MPI (as it is, and with ob1 and vader), MPICH and gloo through PyTorch take part where they are installed; TEST_PYTHON names a Python that
can import torch when the one on PATH cannot. All contenders are alive at once and take turns, row by row and round by round, on the same CPUs;
those that wait sleep. The first round of each row checks the results. A long table can be measured in several short runs, with --filter and --append.
"""
import argparse
import contextlib
import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
KIB, MIB = 1 << 10, 1 << 20
PATIENCE = 180  # seconds for one turn


class Contender:
    """Ranks of one library, each with a pipe for commands and one for answers."""

    def __init__(self, name, label, command, ranks, cpus, environments=None, places=None):
        """One process per environment, or one. places: what stands before the command, for each process."""
        self.name, self.label, self.ranks = name, label, ranks
        self.folder = tempfile.mkdtemp(prefix="peers-")
        self.commands, self.answers, self.rest = [], [], [b""] * ranks
        for rank in range(ranks):
            for kind in ("commands", "answers"):
                os.mkfifo(f"{self.folder}/{kind}.{rank}")
            # Both ends, so that opening does not wait and nobody sees an end of file in between.
            self.commands.append(os.open(f"{self.folder}/commands.{rank}", os.O_RDWR))
            self.answers.append(os.open(f"{self.folder}/answers.{rank}", os.O_RDWR | os.O_NONBLOCK))
        self.log = open(f"{self.folder}/log", "w+")
        environments = environments or [{}]
        self.processes = [subprocess.Popen([*place, *command, self.folder, cpus], env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
                                           stdout=self.log, stderr=self.log, start_new_session=True)
                          for environment, place in zip(environments, places or [[]] * len(environments))]

    def failed(self, why):
        self.log.flush()
        self.log.seek(0)
        return RuntimeError(f"{self.label}: {why}\n{self.log.read()[-2000:]}")

    def read_line(self, rank, deadline):
        while b"\n" not in self.rest[rank]:
            ready, _, _ = select.select([self.answers[rank]], [], [], 0.5)
            if ready:
                self.rest[rank] += os.read(self.answers[rank], 4096)
            elif any(process.poll() not in (None, 0) for process in self.processes):
                raise self.failed("ended")
            elif time.monotonic() > deadline:
                raise self.failed("no answer")
        line, self.rest[rank] = self.rest[rank].split(b"\n", 1)
        return line.decode()

    def turn(self, line):
        """One command on all ranks: [median, minimum, mean] in ns averaged over the ranks, and wrong elements. None: it cannot do that."""
        for pipe in self.commands:
            os.write(pipe, (line + "\n").encode())
        deadline = time.monotonic() + PATIENCE
        answers = [self.read_line(rank, deadline) for rank in range(self.ranks)]
        if "none" in answers:
            return None
        figures = [[float(word) for word in answer.split()] for answer in answers]
        averages = [sum(column) / self.ranks for column in list(zip(*figures))[:3]]
        wrong = [int(figure[3]) for figure in figures]
        return averages, (-1 if min(wrong) < 0 else sum(wrong))

    def stop(self):
        for pipe in self.commands:
            with contextlib.suppress(OSError):
                os.write(pipe, b"quit\n")
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for pipe in self.commands + self.answers:
            os.close(pipe)
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


# ---- who takes part ----

def find_torch():
    for python in (os.environ.get("TEST_PYTHON"), sys.executable, shutil.which("python3")):
        if not python or not shutil.which(python):
            continue
        if subprocess.run([python, "-c", "import torch.distributed as d; assert d.is_gloo_available()"], capture_output=True).returncode == 0:
            return python
    return None


def compile_mpi(compiler, folder):
    program = os.path.join(folder, "mpi-" + os.path.basename(compiler))
    done = subprocess.run([compiler, "-O2", "-o", program, os.path.join(HERE, "mpi.c"), "-lm"], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{compiler} cannot compile mpi.c:\n{done.stderr}")
    return program


def first_line(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip().splitlines()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return "?"


def start(build, ranks, cpus, folder, versions, wanted):
    """Starts everyone that is installed and wanted."""
    contenders, crowded = [], cpus.startswith("-")

    def add(name, label, command, environments=None):
        if not wanted or name in wanted or name in ("tutti", "floor", "floor_recorded"):
            contenders.append(Contender(name, label, command, ranks, cpus, environments))

    add("tutti", "Tutti", [os.path.join(build, "bin", "tutti"), "run", "-q", "--bind", "none", "-n", str(ranks), os.path.join(build, "bench", "peers", "tutti")])
    for name, label, file in (("floor", "floor", "floor"), ("floor_recorded", "floor, recorded", "recorded"), ("floor_one_copy", "floor, one copy", "one_copy")):
        program = os.path.join(build, "bench", "peers", file)
        if ranks <= 16 and os.path.exists(program) and (name in wanted or name != "floor_one_copy"):  # the kernel may refuse that one
            add(name, label, [os.path.join(build, "bin", "tutti"), "run", "-q", "--bind", "none", "-n", str(ranks), program])
    openmpi = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
    compiler = shutil.which("mpicc.openmpi") or shutil.which("mpicc")
    if openmpi and compiler and "Open MPI" in first_line(openmpi, "--version") + first_line("ompi_info", "--version"):
        program = compile_mpi(compiler, folder)
        base = [openmpi, "--bind-to", "none", "--oversubscribe", "-n", str(ranks)]
        if os.geteuid() == 0:
            base.insert(1, "--allow-run-as-root")
        if crowded:
            base += ["--mca", "mpi_yield_when_idle", "1"]
        versions["Open MPI"] = first_line(openmpi, "--version")
        add("openmpi", "Open MPI", base + [program])
        add("openmpi_vader", "Open MPI, ob1 + vader", base + ["--mca", "pml", "ob1", "--mca", "btl", "self,vader", program])
    mpich, compiler = shutil.which("mpirun.mpich"), shutil.which("mpicc.mpich")
    if mpich and compiler:
        versions["MPICH"] = " ".join(first_line("mpichversion").split())
        add("mpich", "MPICH", [mpich, "-n", str(ranks), compile_mpi(compiler, folder)])
    python = find_torch()
    if python:
        port = str(20000 + os.getpid() % 20000)
        versions["gloo"] = "PyTorch " + first_line(python, "-c", "import torch; print(torch.__version__)")
        add("gloo", "gloo (PyTorch)", [python, os.path.join(HERE, "gloo.py")],
            [{"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
              "OMP_NUM_THREADS": "1"} for rank in range(ranks)])
    return contenders


# ---- what is measured ----

def rows_of(quick):
    """(operation, type, bytes, mode, state)"""
    sizes = [8, KIB, 4 * KIB, 64 * KIB, MIB, 32 * MIB, 64 * MIB]
    rows = [("barrier", "f32", 0, mode, "clean") for mode in ("streaming", "isolated")]
    for mode in ("isolated", "streaming"):
        for state in ("clean", "dirty"):
            rows += [("all_reduce", "f32", size, mode, state) for size in sizes]
    if not quick:
        rows += [("all_reduce", "f32", 256 * MIB, "isolated", state) for state in ("clean", "dirty")]
    for operation in ("all_gather", "reduce_scatter", "broadcast", "all_to_all"):
        rows += [(operation, "f32", size, "isolated", state) for size in (4 * KIB, MIB, 64 * MIB) for state in ("clean", "dirty")]
    rows += [("all_reduce", dtype, size, "isolated", "dirty") for dtype in ("bf16", "f16") for size in (MIB, 64 * MIB)]
    return rows


def competitors(row, contenders):
    """(name of the column, contender, buffers)"""
    operation, dtype = row[0], row[1]
    tutti, others = contenders[0], [c for c in contenders[1:] if not c.name.startswith("floor") or has_floor(row, c.name)]
    if operation == "barrier":
        return [("tutti", tutti, "private")] + [(c.name, c, "private") for c in others]
    mine = [("tutti_symmetric", tutti, "symmetric"), ("tutti_private", tutti, "private")]
    return mine + ([(c.name, c, "private") for c in others] if dtype == "f32" else [])


def has_floor(row, name):
    """Which rows have a floor: short ones, and of long ones the moves, which are copies and nothing else. How long reductions are done best is a matter of
    caches, which floor.c knows nothing of; a copy is their limit."""
    operation, size = row[0], row[2]
    is_move = operation in ("all_gather", "all_to_all")
    if name == "floor_recorded":
        return operation in ("barrier", "all_reduce") and size <= 48
    if name == "floor_one_copy":
        return is_move and size >= MIB
    return is_move or size <= (64 if operation == "exchange" else 4 * KIB)


def command(row, buffers, measurements, batch, check):
    operation, dtype, size, mode, state = row
    return f"{operation} {dtype} {size} {mode} {state} {buffers} {measurements} {batch} {'check' if check else 'trust'}"


def lengths(row, ns, seconds):
    """Measurements and calls per measurement that take about that long; short streaming calls are timed several at once."""
    batch = max(1, int(20000 / max(ns, 50))) if row[3] == "streaming" and row[4] == "clean" and ns < 10000 else 1
    return max(3, min(3000, int(seconds * 1e9 / (max(ns, 50) * batch)))), batch


def measure_row(row, contenders, rounds, seconds):
    columns, plans = competitors(row, contenders), {}
    if row[2] >= 64 * KIB and row[0] == "all_reduce" and row[1] == "f32":
        columns += [("copy", contenders[0], "symmetric"), ("copy_stream", contenders[0], "symmetric")]
    found = {}

    def rename(name):
        return (name, *row[1:3], "isolated", row[4]) if name.startswith("copy") else row

    for name, contender, buffers in columns:
        first = contender.turn(command(rename(name), buffers, 2, 1, False))
        if first:
            plans[name] = lengths(row, first[0][1], seconds)
            found[name] = {"rounds": [], "least": [], "wrong": -1, "measurements": plans[name][0]}
    for number in range(rounds):
        turned = columns[number % len(columns):] + columns[:number % len(columns)]
        for name, contender, buffers in turned:
            if name in found:
                averages, wrong = contender.turn(command(rename(name), buffers, *plans[name], number == 0))
                found[name]["rounds"].append(averages[0])
                found[name]["least"].append(averages[1])
                found[name]["wrong"] = max(found[name]["wrong"], wrong)
    return found


def measure_overhead(options, ranks, cpus, contender, rounds):
    """An 8-byte all-reduce beside the same code without deadlines, checks and recorder, in many short turns; None where that is not built."""
    program = os.path.join(options.build, "bench", "peers", "bare")
    if not os.path.exists(program):
        return None
    bare = Contender("bare", "Tutti, bare", [os.path.join(options.build, "bin", "tutti"), "run", "-q", "--bind", "none", "-n", str(ranks), program], ranks, cpus)
    found = {"whole": [], "bare": []}
    try:
        line = "all_reduce f32 8 streaming clean symmetric 200 100 trust"
        for number in range(rounds + 1):
            for name, one in (("whole", contender), ("bare", bare)) if number % 2 else (("bare", bare), ("whole", contender)):
                averages, _ = one.turn(line)
                if number > 0:
                    found[name].append(averages[0])
    finally:
        bare.stop()
    print(f"{ranks} ranks: 8-byte all-reduce {median(found['whole']):.1f} ns, bare {median(found['bare']):.1f} ns: "
          f"{median([whole / bare for whole, bare in zip(found['whole'], found['bare'])]):.3f}", flush=True)
    return found


def median(values):
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def show(row, ranks, found):
    peers = {name: median(one["rounds"]) for name, one in found.items() if not name.startswith(("tutti", "copy", "floor"))}
    best = min(peers.values()) if peers else None
    text = " ".join(f"{name} {median(one['rounds']) / 1e3:.2f}" for name, one in found.items())
    ratios = " ".join(f"{name[6:] or name} {median(one['rounds']) / best:.2f}" for name, one in found.items() if name.startswith("tutti")) if best else ""
    for name in [name for name in found if best and name.startswith("floor")]:
        ratios += f" {name} {median(found[name]['rounds']) / best:.2f}"
    wrong = [name for name, one in found.items() if one["wrong"] > 0]
    print(f"{ranks} ranks {' '.join(map(str, row))}: {text} us | ratio {ratios}{' WRONG ' + ','.join(wrong) if wrong else ''}", flush=True)


# ---- the machine ----

def machine():
    def line_of(path, key):
        with contextlib.suppress(OSError):
            for line in open(path):
                if line.startswith(key):
                    return line.split(":", 1)[1].strip()
        return "?"
    cache = {}
    for index in range(8):
        with contextlib.suppress(OSError):
            folder = f"/sys/devices/system/cpu/cpu0/cache/index{index}"
            if open(folder + "/type").read().strip() != "Instruction":
                cache["L" + open(folder + "/level").read().strip()] = open(folder + "/size").read().strip()
    return {"processor": line_of("/proc/cpuinfo", "model name"), "cpus": len(os.sched_getaffinity(0)), "memory": line_of("/proc/meminfo", "MemTotal"),
            "caches": cache, "load": [round(load, 1) for load in os.getloadavg()], "system": f"{platform.system()} {platform.release()} {platform.machine()}"}


def commit():
    text = first_line("git", "-C", HERE, "describe", "--always", "--dirty")
    return text if text != "?" else "unknown"


def save(path, document):
    """After each row, so that a run that is stopped leaves what it has."""
    with open(path + ".new", "w") as file:
        json.dump(document, file, indent=1)
    os.replace(path + ".new", path)


def shared_cpus(place, ranks, available):
    """Where several ranks share a CPU: the kernel places each contender as luck has it, and that decides more than the contender does."""
    if place == "free":
        return ""
    return ",".join(str(available[rank * len(available) // ranks if place == "neighbours" else rank % len(available)]) for rank in range(ranks))


def measure_ranks(options, ranks, rows, folder, document):
    available = sorted(os.sched_getaffinity(0))
    cpus = ",".join(map(str, available[:ranks])) if ranks <= len(available) else "-" + shared_cpus(options.place, ranks, available)
    contenders = start(options.build, ranks, cpus, folder, document["versions"], options.only)
    document["labels"].update({contender.name: contender.label for contender in contenders})
    try:
        if ranks > 1 and not cpus.startswith("-"):
            trips = document["handover"].get(str(ranks), []) + [contenders[0].turn("handover f32 0 isolated clean symmetric 50 1 trust")[0][0] / 2000 * ranks / 2 for _ in range(options.rounds)]
            document["handover"][str(ranks)] = trips
            print(f"{ranks} ranks: one cache line handed over in {median(trips):.0f} ns", flush=True)
            overhead = None if str(ranks) in document["overhead"] else measure_overhead(options, ranks, cpus, contenders[0], max(options.rounds, 31))
            if overhead:
                document["overhead"][str(ranks)] = overhead
        for row in rows:
            if row[2] * ranks * 6 > options.memory << 20:
                continue
            if time.monotonic() > options.end:
                document["left_out"] += 1
                continue
            found = measure_row(row, contenders, options.rounds, options.seconds)
            document["rows"].append({"operation": row[0], "type": row[1], "bytes": row[2], "mode": row[3], "state": row[4], "ranks": ranks,
                                     "results": found})
            show(row, ranks, found)
            save(options.out, document)
    finally:
        for contender in contenders:
            contender.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release", help="the build folder")
    parser.add_argument("--ranks", default=str(len(os.sched_getaffinity(0))), help="numbers of ranks for the full table, separated by commas")
    parser.add_argument("--growth", default="", help="further numbers of ranks, for a barrier and few sizes")
    parser.add_argument("--place", choices=("free", "neighbours", "round"), default="free",
                        help="which ranks share a CPU where there are more ranks than CPUs: as the kernel has it, neighbours, or every n-th")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.05, help="of one turn")
    parser.add_argument("--memory", type=int, default=8192, help="MiB that the buffers of all may take")
    parser.add_argument("--minutes", type=float, default=60, help="after which rows are left out")
    parser.add_argument("--only", nargs="*", default=[], help="peers that take part: openmpi openmpi_vader mpich gloo")
    parser.add_argument("--quick", action="store_true", help="without 256 MiB")
    parser.add_argument("--filter", default="", help="rows whose text (operation type bytes mode state) matches this regular expression")
    parser.add_argument("--append", action="store_true", help="add to the file, if it is there, instead of beginning anew")
    parser.add_argument("--out", required=True, help="JSON file")
    options = parser.parse_args()
    options.build = os.path.abspath(options.build)
    options.end = time.monotonic() + 60 * options.minutes
    document = {"machine": machine(), "commit": commit(), "command": "python3 bench/peers/measure.py " + " ".join(os.path.basename(word) if os.path.isabs(word) else word for word in sys.argv[1:]),
                "date": time.strftime("%Y-%m-%d", time.gmtime()), "rounds": options.rounds, "versions": {}, "labels": {}, "handover": {}, "overhead": {}, "left_out": 0, "rows": []}
    if options.append and os.path.exists(options.out):
        with open(options.out) as file:
            before = json.load(file)
        before["command"] = before["command"] + " && " + document["command"]
        before["versions"].update(document["versions"])
        document = before
    rows = [row for row in rows_of(options.quick) if re.search(options.filter, " ".join(map(str, row)))]
    few = ([("barrier", "f32", 0, "streaming", "clean")] + [("all_reduce", "f32", size, "streaming", "clean") for size in (8, 64 * KIB, MIB)] +
           [("exchange", "f32", size, "streaming", "clean") for size in (64, KIB, 16 * KIB)])
    few = [row for row in few if re.search(options.filter, " ".join(map(str, row)))]
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        for ranks in [int(word) for word in options.ranks.split(",") if word]:
            measure_ranks(options, ranks, rows, folder, document)
        for ranks in [int(word) for word in options.growth.split(",") if word]:
            measure_ranks(options, ranks, few, folder, document)
    save(options.out, document)
    print(options.out + (f", without {document['left_out']} rows for want of time" if document["left_out"] else ""))


if __name__ == "__main__":
    main()
