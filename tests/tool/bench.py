# SPDX-License-Identifier: Apache-2.0
"""tutti bench: what it measures, checks, writes and refuses. Nothing here looks at how fast anything is."""
import csv
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.dom.minidom

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
from cases import LIMIT, TUTTI, contains, equal, main, test  # noqa: E402

QUICK = ["--time", "0.002", "-w", "1"]
COLLECTIVES = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v", "all_gather", "all_gather_v", "broadcast", "gather", "scatter",
               "all_to_all", "all_to_all_v", "permute", "send_recv"]


def bench(*arguments, environment=None):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TUTTI_")}
    done = subprocess.run([TUTTI, "bench", *arguments], capture_output=True, text=True, timeout=LIMIT, env={**clean, **(environment or {})})
    return done.returncode, done.stdout, done.stderr


def results(*arguments):
    status, output, error = bench(*arguments, "--json", *QUICK)
    equal((status, error), (0, ""))
    return json.loads(output)["results"]


def all_right(rows, count):
    equal(len(rows), count)
    for row in rows:
        equal((row["operation"], row["size"], row["wrong"]), (row["operation"], row["size"], 0))


@test
def every_operation_gives_right_results_on_processes():
    rows = results(*COLLECTIVES, "put", "get", "--ranks", "3", "-b", "100", "-e", "100000", "-f", "1000", "-c")
    all_right(rows, 2 * (len(COLLECTIVES) + 2))
    assert all(row["ranks"] == 3 for row in rows)


@test
def every_collective_gives_right_results_on_threads_in_place_dirty_and_private():
    for extra in (["--in-place"], ["--dirty", "--isolated"], ["--private"]):
        rows = results(*COLLECTIVES[:-1], "--threads", "--ranks", "4", "-b", "1000", "-e", "1000", "--check", *extra)
        all_right(rows, len(COLLECTIVES) - 1)


@test
def every_type_and_reduction_is_checked():
    for dtype in ("f64", "half", "bfloat16", "float8_e4m3fn", "f8_e5m2", "int8", "i16", "int32", "i64", "uint8", "u16", "u32", "u64"):
        for reduction in ("sum", "avg", "prod", "max"):
            all_right(results("all_reduce", "--threads", "--ranks", "3", "-b", "600", "-e", "600", "-c", "1", "-d", dtype, "-o", reduction), 1)
    for dtype, reduction in (("bool", "bxor"), ("c64", "sum"), ("c128", "premul_sum"), ("u8", "band"), ("f32", "premul_sum")):
        all_right(results("all_reduce", "--threads", "--ranks", "3", "-b", "600", "-e", "600", "-c", "-d", dtype, "-o", reduction), 1)


@test
def operations_without_data_have_one_row():
    rows = results("barrier", "signal", "signal_barrier", "--ranks", "2")
    equal([(row["operation"], row["size"], row["wrong"]) for row in rows],
          [("barrier", 0, None), ("signal", 0, None), ("signal_barrier", 0, None)])


@test
def names_of_osu_and_nccl_tests_are_understood():
    rows = results("osu_allreduce", "all_gather_perf", "bcast", "-g", "2", "-m", "64:64", "--type", "float", "--validation", "--iterations", "5")
    equal([row["operation"] for row in rows], ["all_reduce", "all_gather", "broadcast"])
    equal([row["iterations"] for row in rows], [5, 5, 5])


@test
def the_table_has_the_columns_and_the_header_says_where():
    status, output, _ = bench("all_reduce", "--ranks", "2", "-b", "8", "-e", "64", "-f", "8", *QUICK)
    equal(status, 0)
    lines = output.splitlines()
    contains(output, "# machine: ")
    contains(output, "binding: ")
    columns = next(line for line in lines if "busbw" in line)
    equal(columns.strip("# ").split(), "size count type op min p50 avg p99 max algbw busbw wrong".split())
    rows = [line.split() for line in lines if not line.startswith("#")]
    equal([row[:4] for row in rows], [["8", "2", "f32", "sum"], ["64", "16", "f32", "sum"]])
    assert all(row[-1] == "-" for row in rows), "not checked, so nothing can be right or wrong"


@test
def files_are_json_csv_and_a_picture():
    with tempfile.TemporaryDirectory() as folder:
        path = {kind: os.path.join(folder, "rows." + kind) for kind in ("json", "csv", "svg")}
        status, output, _ = bench("all_reduce", "broadcast", "--threads", "--ranks", "2", "-e", "1K", "-f", "8", f"--json={path['json']}",
                                  f"--csv={path['csv']}", "--plot", path["svg"], *QUICK)
        equal(status, 0)
        contains(output, "busbw")
        document = json.load(open(path["json"]))
        equal(sorted(document), ["machine", "results"])
        for key in ("processor", "cpus", "version", "kernels", "binding", "launcher"):
            assert key in document["machine"], key
        for key in ("size", "count", "type", "op", "min_us", "p50_us", "avg_us", "p99_us", "max_us", "algbw_gbs", "busbw_gbs", "wrong"):
            assert key in document["results"][0], key
        rows = list(csv.DictReader(open(path["csv"])))
        equal([row["size"] for row in rows], [str(row["size"]) for row in document["results"]])
        picture = xml.dom.minidom.parse(path["svg"])
        equal(len(picture.getElementsByTagName("polyline")), 2)
        words = [node.firstChild.data for node in picture.getElementsByTagName("text") if node.firstChild is not None]
        assert any(os.uname().nodename in word and document["machine"]["processor"] in word for word in words), words
        ticks = [word for word in words if re.fullmatch(r"[0-9.e+]+ ?(ns|µs|ms|s)?", word)]
        assert len(ticks) >= 2 and all(re.fullmatch(r"10{0,2} (ns|µs|ms|s)", tick) for tick in ticks), ticks


@test
def rounds_give_a_median_and_a_noise():
    row, = results("all_reduce", "--threads", "--ranks", "2", "-b", "64", "-e", "64", "--rounds", "4")
    equal(row["rounds"], 4)
    assert row["min_us"] <= row["p50_low_us"] <= row["p50_us"] <= row["p50_high_us"] <= row["max_us"], row
    status, output, _ = bench("barrier", "--threads", "--ranks", "2", "--rounds", "2", *QUICK)
    equal(status, 0)
    contains(output, "noise")
    equal(bench("barrier", "--rounds", "0")[0], 2)


@test
def csv_can_be_the_output():
    status, output, _ = bench("barrier", "--threads", "--ranks", "2", "--csv", *QUICK)
    equal(status, 0)
    equal(list(csv.DictReader(io.StringIO(output)))[0]["operation"], "barrier")


@test
def a_slower_row_than_the_baseline_fails_and_is_named():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "old.json")
        arguments = ["all_reduce", "--threads", "--ranks", "2", "-b", "64", "-e", "64", *QUICK]
        equal(bench(*arguments, f"--json={path}")[0], 0)
        document = json.load(open(path))
        document["results"][0]["p50_us"] = document["results"][0]["p50_high_us"] = 1e9
        json.dump(document, open(path, "w"))
        equal(bench(*arguments, "--baseline", path)[0], 0)
        # Faster than now in the middle, but with a round as slow as now: noise.
        document["results"][0]["p50_us"] = 1e-6
        json.dump(document, open(path, "w"))
        status, _, error = bench(*arguments, "--baseline", path)
        equal(status, 0)
        contains(error, "0 of 1 rows that the baseline has are more than 10 % slower; 1 differ within the noise")
        document["results"][0]["p50_high_us"] = 1e-6
        json.dump(document, open(path, "w"))
        status, _, error = bench(*arguments, "--baseline", path)
        equal(status, 1)
        contains(error, "slower: all_reduce of 64 bytes")
        contains(error, "in 15 rounds)")  # what seems slower is measured again, twice
        document["results"][0]["ranks"] = 7
        json.dump(document, open(path, "w"))
        status, _, error = bench(*arguments, "--baseline", path)
        equal(status, 1)
        contains(error, "has no row like those measured now")


@test
def a_tuned_table_can_be_used():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "table")
        status, output, error = bench("--tune", path, "--threads", "--ranks", "2", "-e", "64K", "-f", "1024", "--time", "0.001", "-w", "0")
        equal((status, [line for line in error.splitlines() if "% tuning" not in line]), (0, []))
        contains(output, "the fastest was so by less than the noise")
        table = [line.split() for line in open(path) if not line.startswith("#")]
        assert any(row[0] == "all_reduce" and row[2] == "0" for row in table), table
        status, output, error = bench("all_reduce", "--threads", "--ranks", "2", "-b", "64", "-e", "64", "-c", *QUICK,
                                      environment={"TUTTI_TUNING": path})
        equal((status, error), (0, ""))


@test
def a_forced_algorithm_runs():
    rows = results("all_reduce", "--threads", "--ranks", "2", "-b", "64K", "-e", "64K", "-c", "--algorithm", "one_shot")
    equal((rows[0]["algorithm"], rows[0]["wrong"]), ("one_shot", 0))


@test
def inside_a_job_it_uses_the_ranks_of_the_job():
    done = subprocess.run([TUTTI, "run", "-n", "2", TUTTI, "bench", "barrier", "--csv", *QUICK], capture_output=True, text=True, timeout=LIMIT)
    equal((done.returncode, done.stderr), (0, ""))
    contains(done.stdout, "barrier,0,0,f32,,2,")
    done = subprocess.run([TUTTI, "run", "-n", "2", TUTTI, "bench", "barrier", "--ranks", "3"], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode != 0
    contains(done.stderr, "this job (tutti run) has 2 ranks")


@test
def wrong_usage_is_explained():
    for arguments, part in ((["all_redoce"], "Did you mean \"all_reduce\"?"), (["xyz"], "--list"), ([], "which operation?"),
                            (["all_reduce", "-d", "float31"], "--datatype float31: must be"), (["all_reduce", "-b", "1Q"], "--minbytes 1Q: must be a size"),
                            (["all_reduce", "--ranks", "0"], "--ranks 0: must be a number of ranks, from 1"), (["all_reduce", "-f", "1"], "at least 1.01"),
                            (["all_reduce", "-z", "2"], "-z 2: must be 0 or 1"), (["all_reduce", "-z"], "-z needs a value"),
                            (["all_reduce", "-o", "premul_sum", "-d", "i8"], "premul_sum is not defined for i8"),
                            (["all_reduce", "-b", "64", "-e", "8"], "there are none")):
        status, _, error = bench(*arguments)
        equal(status, 2)
        contains(error, part)
    status, _, error = bench("send_recv", "--ranks", "1")
    equal(status, 1)
    contains(error, "send_recv needs at least 2 ranks")
    status, _, error = bench("broadcast", "--ranks", "2", "-r", "5")
    equal(status, 1)
    contains(error, "root 5 must be in [0, 2)")


main()
