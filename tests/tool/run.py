# SPDX-License-Identifier: Apache-2.0
"""tutti run, as a user meets it: statuses, output, input, signals, failures, and nothing left behind."""
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
from cases import LIMIT, TUTTI, children_of, contains, equal, main, processes_with, test, wait_for  # noqa: E402


def run(*arguments, stdin=subprocess.DEVNULL, environment=None, limit=LIMIT):
    """Runs tutti run and returns (status, standard output, standard error)."""
    done = subprocess.run([TUTTI, "run", *arguments], stdin=stdin, capture_output=True, text=True, timeout=limit,
                          env={**os.environ, **(environment or {})})
    return done.returncode, done.stdout, done.stderr


def start(*arguments, **more):
    return subprocess.Popen([TUTTI, "run", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, **more)


# ---- statuses ----

@test
def all_ranks_that_end_well_give_status_0():
    equal(run("-n", "4", "true"), (0, "", ""))


@test
def the_exit_status_is_the_failing_ranks():
    status, _, error = run("-n", "3", "sh", "-c", "[ $RANK != 1 ] || exit 42")
    equal(status, 42)
    assert re.search(r"^tutti run: rank 1 \(pid \d+\) exited with status 42$", error, re.M), error


@test
def a_signal_gives_128_and_its_number():
    status, _, error = run("-n", "2", "sh", "-c", "[ $RANK = 0 ] || kill -SEGV $$")
    equal(status, 128 + signal.SIGSEGV)
    contains(error, "was killed by signal 11 (Segmentation fault)")


@test
def a_program_that_is_not_there_gives_127_and_its_name():
    for name in ("no-such-program", "./no-such-program"):
        status, output, error = run("-n", "2", name)
        equal((status, output), (127, ""))
        contains(error, f"there is no program {name}")


@test
def a_file_that_is_no_program_gives_126():
    with tempfile.NamedTemporaryFile() as file:
        equal(run("-n", "2", file.name)[0], 126)
    equal(run("-n", "2", "/")[0], 126)


@test
def wrong_usage_gives_2_and_a_word():
    for arguments, part in ((["-n", "0", "true"], "from 1 to"), (["-n", "two", "true"], "from 1 to"), ([], "which program"),
                            (["--bind", "socket", "true"], "core, numa or none"), (["--grace", "-1", "true"], "--grace"),
                            (["--no-such-option", "true"], "there is no option --no-such-option"), (["-n"], "needs a value")):
        status, _, error = run(*arguments)
        equal(status, 2)
        contains(error, part)


@test
def what_cannot_be_executed_is_told_by_what_it_is():
    with tempfile.TemporaryDirectory() as folder:
        for name, part in (("ring.c", "it is source code; build it first"), ("ring.py", "say tutti run python3 ring.py"), ("ring", "chmod +x ring"),
                           ("rings", "it is a folder")):
            path = pathlib.Path(folder, name)
            path.mkdir() if name == "rings" else path.write_text("")
            for typed in ((name, f"./{name}") if name != "ring.py" and name != "ring" else (name,)):
                done = subprocess.run([TUTTI, "run", "-n", "2", typed], capture_output=True, text=True, cwd=folder, timeout=LIMIT)
                equal(done.returncode, 126)
                contains(done.stderr, part)


@test
def a_signal_from_outside_is_no_death_of_ranks():
    for number, name in ((signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")) * 10:  # the guardian may end before it is told, or after
        job = start("-n", "3", "sh", "-c", "echo up; exec sleep 1000")
        for _ in range(3):
            contains(job.stdout.readline(), "up")
        job.send_signal(number)
        _, error = job.communicate(timeout=LIMIT)
        equal((job.returncode, error), (128 + number, f"tutti run: stopped by {name} from outside\n"))


@test
def the_same_signal_twice_is_no_death_of_ranks_either():
    job = start("-n", "2", "sh", "-c", "trap '' TERM; echo up; exec sleep 1000")
    for _ in range(2):
        contains(job.stdout.readline(), "up")
    while job.poll() is None:
        job.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    _, error = job.communicate(timeout=LIMIT)
    equal(job.returncode, 128 + signal.SIGKILL)
    contains(error, "stopped by SIGTERM from outside")
    assert "killed" not in error, error


@test
def a_signal_from_outside_is_told_where_a_rank_catches_it_first():
    job = start("-n", "2", "--grace", "60s", "sh", "-c", "[ $RANK = 0 ] && trap 'exit 3' TERM || trap 'sleep 1; trap - TERM; kill -TERM $$' TERM; echo up; "
                "while :; do sleep 0.1; done")
    for _ in range(2):
        contains(job.stdout.readline(), "up")
    job.send_signal(signal.SIGTERM)
    _, error = job.communicate(timeout=LIMIT)
    contains(error, "exited with status 3")
    contains(error, "stopped by SIGTERM from outside")
    assert "killed" not in error, error


@test
def the_nearest_option_is_suggested():
    for arguments, part in ((["run", "--rnaks", "4", "true"], "there is no option --rnaks. Did you mean --ranks?"),
                            (["info", "--jsno"], "Did you mean --json?"), (["ps", "--countres"], "Did you mean --counters?"),
                            (["trace", "--lsit"], "Did you mean --list?"), (["doctor", "--verbsoe"], "Did you mean --verbose?"),
                            (["bench", "all_reduce", "--datatpye=f32"], "there is no option --datatpye. Did you mean --datatype?"),
                            (["bench", "all_reduce", "-q"], "there is no option -q"), (["bench", "all_reduce", "--list=3"], "--list takes no value"),
                            (["ps", "--js=5"], "--json takes no value"), (["ps", "--json", "-xq"], "there is no option -x"),
                            (["trace", "--last=4", "-Zq"], "there is no option -Z"),
                            (["info", "extra"], "takes options alone"), (["doctor", "extra"], "takes options alone")):
        done = subprocess.run([TUTTI, *arguments], capture_output=True, text=True, timeout=LIMIT)
        equal(done.returncode, 2)
        contains(done.stderr, part)


@test
def the_nearest_sub_command_is_suggested():
    for typed, meant in (("rnu", "run"), ("b", "bench"), ("doc", "doctor"), ("trac", "trace"), ("benhc", "bench")):
        done = subprocess.run([TUTTI, typed], capture_output=True, text=True)
        equal(done.returncode, 2)
        contains(done.stderr, f'Did you mean "{meant}"?')
    done = subprocess.run([TUTTI, "x"], capture_output=True, text=True)
    equal((done.returncode, "Did you mean" in done.stderr), (2, False))


@test
def a_script_without_interpreter_line_runs_in_the_shell():
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder, "script")
        script.write_text("echo $1 $2\n")
        script.chmod(0o755)
        equal(run("-n", "1", str(script), "a", "b c"), (0, "[0] a b c\n", ""))


# ---- environment ----

@test
def ranks_find_themselves_in_the_environment():
    names = ("TUTTI_RANK TUTTI_SIZE TUTTI_LOCAL_RANK TUTTI_LOCAL_SIZE RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE "
             "MASTER_ADDR").split()
    status, output, _ = run("-q", "-n", "3", "sh", "-c", "echo " + " ".join(f"${name}" for name in names),
                            environment={"RANK": "77", "TORCHELASTIC_RUN_ID": "x"})
    equal(status, 0)
    equal(sorted(output.splitlines()), [f"{rank} 3 {rank} 3 {rank} 3 {rank} 3 127.0.0.1" for rank in range(3)])


@test
def ranks_that_share_a_gpu_under_mps_have_a_share_each():
    echo = ("sh", "-c", "echo ${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE-none}")
    with tempfile.TemporaryDirectory() as pipes:
        here = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_MPS_PIPE_DIRECTORY": pipes}
        equal(run("-q", "-n", "3", *echo, environment=here)[1], 3 * "none\n")  # no MPS
        pathlib.Path(pipes, "control").touch()
        equal(run("-q", "-n", "3", *echo, environment=here)[1], 3 * "33\n")
        equal(run("-q", "-n", "3", *echo, environment={**here, "CUDA_VISIBLE_DEVICES": "0,2"})[1], 3 * "50\n")
        equal(run("-q", "-n", "2", *echo, environment={**here, "CUDA_VISIBLE_DEVICES": "0,2"})[1], 2 * "none\n")
        equal(run("-q", "-n", "2", *echo, environment={**here, "CUDA_VISIBLE_DEVICES": ""})[1], 2 * "none\n")
        equal(run("-q", "-n", "2", *echo, environment={**here, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "70"})[1], 2 * "70\n")


@test
def another_launchers_variables_do_not_reach_the_ranks():
    _, output, _ = run("-q", "-n", "1", "env", environment={"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "1"})
    assert "TORCHELASTIC" not in output
    assert "MASTER_PORT=1\n" not in output


@test
def every_rank_reads_the_same_secret():
    _, output, _ = run("-q", "-n", "3", "sh", "-c", "od -An -tx1 <&$TUTTI_SECRET_FD | tr -d ' \\n'; echo")
    secrets = output.split()
    equal(len(secrets), 3)
    assert len(set(secrets)) == 1 and len(secrets[0]) == 64, secrets


@test
def ranks_inherit_no_other_descriptors():
    _, output, _ = run("-q", "-n", "2", "sh", "-c", "ls /proc/self/fd | tr '\\n' ' '; echo")
    for line in output.splitlines():
        equal(line.split(), ["0", "1", "2", "3", "4"])  # 3 the secret, 4 ls's own


@test
def the_soft_limit_on_descriptors_is_raised():
    import resource
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    done = subprocess.run(["sh", "-c", f"ulimit -S -n 64; exec {TUTTI} run -q -n 1 sh -c 'ulimit -S -n'"],
                          capture_output=True, text=True, timeout=LIMIT)
    equal(int(done.stdout), min(hard, 65536))


# ---- output ----

@test
def lines_are_tagged_and_never_mixed():
    program = ("import os,sys\nrank=os.environ['RANK']\n"
               "for i in range(300):\n"
               "  for part in range(5): os.write(1, (rank*37).encode())\n"
               "  os.write(1, b'\\n'); os.write(2, b'e'*50 + b'\\n')\n")
    status, output, error = run("-n", "4", sys.executable, "-c", program)
    equal(status, 0)
    lines = output.splitlines()
    equal(len(lines), 1200)
    for line in lines:
        equal(line, f"[{line[1]}] " + line[1] * 185)
    equal({line[4:] for line in error.splitlines()}, {"e" * 50})


@test
def a_last_line_without_end_is_completed():
    equal(run("-n", "1", "printf", "a\\nb"), (0, "[0] a\n[0] b\n", ""))


@test
def a_very_long_line_is_not_lost():
    program = "import sys; sys.stdout.write('x' * 3000000)"
    status, output, _ = run("-q", "-n", "1", sys.executable, "-c", program)
    equal((status, output.count("x")), (0, 3000000))


@test
def quiet_output_is_as_the_ranks_wrote_it():
    equal(run("-q", "-n", "1", "echo", "hello"), (0, "hello\n", ""))
    status, output, error = run("--quiet", "-n", "2", "sh", "-c", "exit 5")
    equal((status, output), (5, ""))
    equal(len(error.splitlines()), 1)  # the failure is an error and is told


@test
def log_files_hold_what_each_rank_wrote():
    with tempfile.TemporaryDirectory() as folder:
        where = os.path.join(folder, "new")
        equal(run("-n", "2", "--log-dir", where, "sh", "-c", "echo out $RANK; echo err $RANK >&2")[0], 0)
        for rank in range(2):
            equal(pathlib.Path(where, f"rank-{rank}.out").read_text(), f"out {rank}\n")
            equal(pathlib.Path(where, f"rank-{rank}.err").read_text(), f"err {rank}\n")


@test
def a_reader_that_goes_away_ends_the_job_as_it_ends_a_program():
    done = subprocess.run(["bash", "-c", f"{TUTTI} run -n 2 yes | head -n 1; exit ${{PIPESTATUS[0]}}"], capture_output=True,
                          text=True, timeout=LIMIT)
    equal(done.returncode, 128 + signal.SIGPIPE)
    equal(len(done.stdout.splitlines()), 1)


def stands_still(marker):
    """The processes run no more: what they write is taken by nobody."""
    def used():
        return [pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13] for pid in processes_with(marker)]
    before = used()
    time.sleep(0.3)
    return len(before) >= 3 and used() == before


@test
def signals_get_through_while_nobody_takes_the_output():
    words = marker("this fills the pipe that nobody reads")
    job = start("-n", "2", "yes", words)
    wait_for(lambda: stands_still(words), "the output to be held up")
    job.send_signal(signal.SIGTERM)
    equal(job.wait(LIMIT), 128 + signal.SIGTERM)
    equal(processes_with(words), [])
    job.stdout.close()
    job.stderr.close()


@test
def signals_get_through_while_nobody_takes_what_the_launcher_tells():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        pass
    os.set_blocking(writing, True)
    words = marker("one fails, the other stays")
    job = subprocess.Popen([TUTTI, "run", "--survive", "-n", "2", "sh", "-c", "[ $RANK = 1 ] && exit 3; sleep 1000", words],
                           stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=writing)
    wait_for(lambda: len(processes_with(words)) >= 3, "launcher, guardian and rank 0")
    time.sleep(1)  # it wants to tell about rank 1 by now
    job.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    job.wait(LIMIT)
    equal(processes_with(words), [])
    os.close(reading)
    os.close(writing)


@test
def tags_are_coloured_on_a_terminal_only():
    def on_terminal(environment):
        master, slave = pty.openpty()
        child = subprocess.Popen([TUTTI, "run", "-n", "1", "echo", "x"], stdin=subprocess.DEVNULL, stdout=slave, stderr=slave,
                                 env={**os.environ, "TERM": "xterm", **environment})
        os.close(slave)
        text = b""
        try:
            while part := os.read(master, 1000):
                text += part
        except OSError:
            pass
        child.wait(LIMIT)
        os.close(master)
        return text
    contains(on_terminal({}).decode(), "\033[36m[0]\033[0m x")
    contains(on_terminal({"NO_COLOR": "1"}).decode(), "[0] x")


# ---- input ----

@test
def rank_0_gets_the_standard_input_and_the_others_none():
    with tempfile.TemporaryFile() as file:
        file.write(b"one\ntwo\n")
        file.seek(0)
        status, output, _ = run("-n", "3", "sh", "-c", "cat; echo end", stdin=file)
    equal(status, 0)
    equal(sorted(output.splitlines()), ["[0] end", "[0] one", "[0] two", "[1] end", "[2] end"])


class Terminal:
    """tutti run as the foreground job of a terminal of its own."""

    def __init__(self, *arguments):
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            try:
                os.execve(TUTTI, [TUTTI, "run", *arguments], {**os.environ, "NO_COLOR": "1"})
            finally:
                os._exit(127)
        self.text = ""

    def read_until(self, part, limit=LIMIT):
        deadline = time.monotonic() + limit
        while part not in self.text:
            assert time.monotonic() < deadline, f"{part!r} did not come in:\n{self.text}"
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.master, 4096).decode()
                except OSError:
                    break
        contains(self.text, part)

    def end(self):
        _, status = os.waitpid(self.pid, 0)
        os.close(self.master)
        return os.waitstatus_to_exitcode(status)


@test
def what_is_typed_reaches_rank_0():
    terminal = Terminal("-n", "2", "sh", "-c", "[ $RANK = 1 ] || { read word; echo got $word; }")
    os.write(terminal.master, b"hello\n")
    terminal.read_until("[0] got hello")
    equal(terminal.end(), 0)


@test
def a_prompt_is_shown_before_its_line_ends():
    with tempfile.TemporaryDirectory() as folder:
        go = pathlib.Path(folder, "go")  # rank 1 speaks when it is there
        terminal = Terminal("-n", "2", "sh", "-c", "[ $RANK = 1 ] && { until [ -e \"$0\" ]; do sleep 0.05; done; echo other; exit; }; printf 'name? '; "
                            "read word; echo hello $word; printf 'more? '; read word; printf 'end '; sleep 1; echo really", str(go))
        terminal.read_until("[0] name? ")
        os.write(terminal.master, b"bob\n")
        terminal.read_until("[0] hello bob\r\n")
        terminal.read_until("[0] more? ")
        go.touch()
        terminal.read_until("[0] more? \r\n[1] other\r\n")
        os.write(terminal.master, b"no\n")
        terminal.read_until("[0] end really")
        equal(terminal.end(), 0)


# ---- signals ----

COUNT_SIGNALS = """
import os, signal, sys, time
count = 0
def seen(*_):
    global count
    count += 1
signal.signal(signal.{name}, seen)
print("ready", flush=True)
while count == 0: time.sleep(0.01)
time.sleep(0.3)
print("count", count, flush=True)
"""


@test
def ctrl_c_reaches_every_rank_once():
    terminal = Terminal("-n", "2", sys.executable, "-c", COUNT_SIGNALS.format(name="SIGINT"))
    terminal.read_until("[0] ready")
    terminal.read_until("[1] ready")
    os.write(terminal.master, b"\x03")
    terminal.read_until("[0] count 1")
    terminal.read_until("[1] count 1")
    equal(terminal.end(), 0)


@test
def signals_are_passed_on():
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT"):
        job = start("-n", "2", sys.executable, "-c", COUNT_SIGNALS.format(name=name))
        for _ in range(2):
            contains(job.stdout.readline(), "ready")
        job.send_signal(getattr(signal, name))
        output, _ = job.communicate(timeout=LIMIT)
        equal(sorted(output.splitlines()), ["[0] count 1", "[1] count 1"])
        equal(job.returncode, 0)


@test
def a_signal_that_ends_the_ranks_is_the_exit_status():
    job = start("-n", "2", "sh", "-c", "echo ready; exec sleep 300")
    for _ in range(2):
        contains(job.stdout.readline(), "ready")
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=LIMIT)
    equal(job.returncode, 128 + signal.SIGTERM)


@test
def the_same_signal_twice_kills():
    job = start("-n", "2", "sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done")
    for _ in range(2):
        contains(job.stdout.readline(), "ready")

    def again():  # two that come together are one, and two that are far apart are none: on a busy machine it takes a few
        job.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        return job.poll() is not None
    wait_for(again, "the ranks to be killed")
    job.communicate(timeout=LIMIT)
    equal(job.returncode, 128 + signal.SIGKILL)


@test
def stopping_and_going_on_reaches_the_ranks():
    job = start("-n", "1", "sh", "-c", "echo $$; exec sleep 300")
    rank = int(job.stdout.readline().split()[1])
    state = lambda pid: pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2]
    job.send_signal(signal.SIGTSTP)
    wait_for(lambda: state(rank) == "T" and state(job.pid) == "T", "rank and launcher to stop")
    job.send_signal(signal.SIGCONT)
    wait_for(lambda: state(rank) == "S", "the rank to go on")
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=LIMIT)


# ---- failures ----

@test
def the_first_failure_is_told_first_and_the_others_are_stopped():
    status, _, error = run("-n", "4", "--grace", "5s", "sh", "-c", "[ $RANK != 2 ] || exit 9; exec sleep 300")
    equal(status, 9)
    lines = error.splitlines()
    assert re.fullmatch(r"tutti run: rank 2 \(pid \d+\) exited with status 9", lines[0]), error
    equal(lines[1], "tutti run: stopping ranks 0, 1 and 3")
    equal(lines[2], "tutti run: then ranks 0, 1 and 3 were killed by signal 15 (Terminated)")


@test
def the_others_get_a_moment():
    status, output, _ = run("-n", "2", "--grace", "20s", "sh", "-c", "[ $RANK = 0 ] && exit 3; sleep 0.3; echo saved")
    equal((status, output), (3, "[1] saved\n"))


@test
def a_rank_that_ignores_sigterm_is_killed():
    status, _, error = run("-n", "2", "--grace", "100ms", "sh", "-c",
                           "[ $RANK = 0 ] && exit 3; trap '' TERM; while :; do sleep 0.05; done")
    equal(status, 3)
    contains(error, "then rank 1 was killed by signal 9 (Killed)")


@test
def a_stopped_rank_is_ended_too():
    status, _, error = run("-n", "2", "--grace", "100ms", "sh", "-c",
                           "[ $RANK = 0 ] && { sleep 0.3; exit 3; }; kill -STOP $$; sleep 300")
    equal(status, 3)
    contains(error, "then rank 1 was killed by signal")


@test
def a_killed_rank_with_much_memory_is_blamed_rather_than_those_that_noticed():
    # Rank 1 needs long to die; rank 0 notices at once, by a lock that the kernel gives back early, and exits.
    program = """
import os, signal, sys, time, mmap
rank = os.environ["RANK"]
if rank == "1":
    memory = mmap.mmap(-1, 512 << 20)
    for i in range(0, len(memory), 4096): memory[i] = 1
    with open(sys.argv[1] + ".new", "w") as file: file.write(str(os.getpid()))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    os.kill(os.getpid(), signal.SIGKILL)
EXITING = 4  # PF_EXITING, in the flags of /proc/PID/stat: it is being taken apart
while not os.path.exists(sys.argv[1]): pass
pid = open(sys.argv[1]).read()
try:
    while int(open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[6]) & EXITING == 0: pass
except OSError: pass
os._exit(7)
"""
    with tempfile.TemporaryDirectory() as folder:
        status, _, error = run("-n", "2", sys.executable, "-c", program, os.path.join(folder, "dying"))
    equal(status, 128 + signal.SIGKILL)
    assert re.match(r"tutti run: rank 1 \(pid \d+\) was killed by signal 9", error), error


@test
def survivors_go_on_when_asked_to():
    status, output, error = run("--survive", "-n", "3", "sh", "-c", "[ $RANK = 1 ] && kill -9 $$; sleep 0.3; echo done")
    equal(status, 0)
    equal(sorted(output.splitlines()), ["[0] done", "[2] done"])
    contains(error, "was killed by signal 9 (Killed); the others go on")
    equal(run("--survive", "-n", "2", "sh", "-c", "exit 4")[0], 4)


# ---- nothing is left behind ----

def marker(name):
    return f"tutti-test-{os.getpid()}-{name}"


# A rank with a child, a grandchild in a session of its own, and one whose parent is gone already.
FAMILY = """(exec -a {0}-a sleep 300) &
bash -c "setsid bash -c 'exec -a {0}-b sleep 300' & wait" &
(setsid bash -c 'exec -a {0}-c sleep 300' &)
echo ready; exec -a {0}-d sleep 300"""


def start_family(name, *options):
    mark = marker(name)
    job = start(*options, "-n", "2", "bash", "-c", FAMILY.format(mark))
    for _ in range(2):
        contains(job.stdout.readline(), "ready")
    wait_for(lambda: all(processes_with(f"{mark}-{letter}\0") for letter in "abcd"), "children and grandchildren")
    return job, mark


@test
def nothing_survives_kill_9_of_the_launcher():
    job, mark = start_family("launcher")
    job.kill()
    job.wait(LIMIT)
    wait_for(lambda: not processes_with(mark), "all descendants to end")
    job.stdout.close(), job.stderr.close()


@test
def nothing_survives_kill_9_of_the_guardian():
    job, mark = start_family("guardian")
    guardian, = children_of(job.pid)
    os.kill(guardian, signal.SIGKILL)
    _, error = job.communicate(timeout=LIMIT)
    equal(job.returncode, 128)
    contains(error, "the guardian process")
    equal(processes_with(mark), [])


@test
def what_ranks_leave_behind_ends_with_the_job():
    mark = marker("behind")
    status, _, error = run("-n", "2", "bash", "-c", f"(setsid bash -c 'exec -a {mark} sleep 300' &); sleep 0.1")
    equal(status, 0)
    contains(error, "killed 2 processes that the ranks had left behind")
    equal(processes_with(mark), [])


@test
def many_ranks_run_too():
    status, output, error = run("-n", "100", "sh", "-c", "echo $RANK")
    equal((status, error), (0, ""))
    equal(sorted(output.splitlines()), sorted(f"[{rank}] {rank}" for rank in range(100)))


@test
def too_few_descriptors_are_said_so():
    done = subprocess.run(["bash", "-c", f"ulimit -n 40; exec {TUTTI} run -n 40 true"], capture_output=True, text=True, timeout=LIMIT)
    equal(done.returncode, 1)
    contains(done.stderr, "ulimit -n")


# ---- binding ----

def has_hwloc():
    done = subprocess.run([TUTTI, "run", "-n", "8", "--bind", "core", "--show-binding"], capture_output=True, text=True,
                          env={**os.environ, "HWLOC_SYNTHETIC": "pack:1 core:8 pu:1"})
    return done.returncode == 0 and "package" in done.stderr


@test
def shares_of_other_machines_are_equal_and_side_by_side():
    if not has_hwloc():
        return "built without hwloc"
    def binding(machine, *arguments):
        status, output, error = run("--show-binding", *arguments, environment={"HWLOC_SYNTHETIC": machine})
        return status, [line.removeprefix("tutti run: ") for line in error.splitlines()]
    equal(binding("numa:2 pack:1 core:4 pu:2", "-n", "2"),
          (0, ["rank 0: cores 0-3 (CPUs 0-7), package 0, NUMA node 0", "rank 1: cores 4-7 (CPUs 8-15), package 1, NUMA node 1"]))
    equal(binding("numa:2 pack:1 core:2 pu:1", "-n", "4", "--bind", "numa"),
          (0, ["rank 0: cores 0-1 (CPUs 0-1), package 0, NUMA node 0", "rank 1: cores 0-1 (CPUs 0-1), package 0, NUMA node 0",
               "rank 2: cores 2-3 (CPUs 2-3), package 1, NUMA node 1", "rank 3: cores 2-3 (CPUs 2-3), package 1, NUMA node 1"]))
    equal(binding("pack:1 core:3 pu:1", "-n", "2")[1],
          ["rank 0: core 0 (CPU 0), package 0, NUMA node 0", "rank 1: cores 1-2 (CPUs 1-2), package 0, NUMA node 0"])
    equal(binding("pack:1 core:2 pu:1", "-n", "3"), (0, ["3 ranks for 2 cores"]))
    equal(binding("pack:1 core:2 pu:1", "-n", "3", "--bind", "core")[0], 1)


@test
def ranks_run_where_they_were_bound():
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        return "only one CPU"
    _, output, _ = run("-n", "2", "--bind", "core", sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))")
    sets = [set(line.split()[1:]) for line in output.splitlines()]
    assert sets[0].isdisjoint(sets[1]), output
    _, output, _ = run("-n", "2", "--bind", "none", sys.executable, "-c", "import os; print(*sorted(os.sched_getaffinity(0)))")
    for line in output.splitlines():
        equal([int(cpu) for cpu in line.split()[1:]], cpus)


main()
