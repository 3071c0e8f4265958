# SPDX-License-Identifier: Apache-2.0
"""tutti info, tutti doctor and tutti help: what they say about this machine, this build and this environment."""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
from cases import LIMIT, TUTTI, contains, equal, main, test  # noqa: E402


def tutti(*arguments, environment=None, limits=""):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TUTTI_")}
    done = subprocess.run(["bash", "-c", f'{limits} exec "$0" "$@"', TUTTI, *arguments], capture_output=True, text=True, timeout=LIMIT,
                          env={**clean, **(environment or {})})
    return done.returncode, done.stdout, done.stderr


@test
def every_setting_is_shown_with_its_value_and_origin():
    status, output, _ = tutti("info", environment={"TUTTI_TIMEOUT": "45s"})
    equal(status, 0)
    assert re.search(r"^  TUTTI_TIMEOUT +45s +environment ", output, re.M), output
    assert re.search(r"^  TUTTI_LOG +warn +default ", output, re.M), output


@test
def a_misspelt_variable_is_pointed_out():
    status, output, _ = tutti("info", environment={"TUTTI_TIMOUT": "45s"})
    equal(status, 1)
    contains(output, "did you mean TUTTI_TIMEOUT?")


@test
def a_value_that_cannot_be_understood_is_pointed_out_and_hides_nothing():
    status, output, _ = tutti("info", "--json", environment={"TUTTI_TIMEOUT": "soon", "TUTTI_SPIN": "100"})
    equal(status, 1)
    settings = {setting["name"]: setting for setting in json.loads(output)["settings"]}
    contains(settings["TUTTI_TIMEOUT"]["problem"], "soon")
    equal((settings["TUTTI_SPIN"]["value"], settings["TUTTI_SPIN"]["origin"]), ("100", "environment"))


@test
def a_setting_with_which_no_world_opens_is_pointed_out():
    for name, value in (("TUTTI_TUNING", "/no/such/table"), ("TUTTI_ALGORITHM", "all_reduce=fastest"), ("TUTTI_LOG", "loud"),
                        ("TUTTI_HUGE_PAGES", "maybe"), ("TUTTI_NVSHMEM_HEAP", "lots"), ("TUTTI_NVSHMEM_MAP", "some"), ("TUTTI_FAULT", "rank=0,do=dance"), ("TUTTI_ISA", "mmx"), ("TUTTI_TRACE_ENTRIES", "1")):
        status, output, _ = tutti("info", "--json", environment={name: value, "TUTTI_SPIN": "100"})
        settings = {setting["name"]: setting for setting in json.loads(output)["settings"]}
        assert settings[name].get("problem"), (name, settings[name])
        assert "problem" not in settings["TUTTI_SPIN"], settings["TUTTI_SPIN"]
        equal(status, 1)


@test
def a_fault_that_is_asked_for_is_no_problem():
    status, output, _ = tutti("info", "--json", environment={"TUTTI_FAULT": "rank=0,op=all_reduce,at=0,do=kill"})
    equal(status, 0)
    json.loads(output)


@test
def only_plug_ins_that_exist_are_listed():
    with tempfile.TemporaryDirectory() as folder:
        names = set(json.loads(tutti("info", "--json", environment={"TUTTI_PLUGIN_PATH": folder})[1])["backends"])
        assert "nvshmem" not in names and "shm" in names, names
        pathlib.Path(folder, "libtutti-broken.so").write_text("no library")
        pathlib.Path(folder, "libtutti-.so").write_text("")
        backends = json.loads(tutti("info", "--json", environment={"TUTTI_PLUGIN_PATH": folder})[1])["backends"]
        contains(backends["broken"], "cannot be used")
        equal(set(backends) - names, {"broken"})


@test
def the_json_of_info_has_every_section():
    status, output, _ = tutti("info", "--json")
    equal(status, 0)
    information = json.loads(output)
    for section in ("build", "machine", "backends", "launch", "settings", "unknown"):
        assert section in information, section
    equal(information["backends"]["shm"], "works, 1 device")
    equal(information["launch"]["found"], "alone")


@test
def the_launch_environment_is_recognised():
    _, output, _ = tutti("info", "--json", environment={"TUTTI_RANK": "1", "TUTTI_SIZE": "4", "TUTTI_STORE": "unix:@nowhere"})
    launch = json.loads(output)["launch"]
    equal((launch["found"], launch["rank"], launch["meeting place"]), ("tutti run", "1 of 4", "unix:@nowhere"))
    status, output, _ = tutti("info", "--json", environment={"TUTTI_RANK": "1"})
    equal(status, 1)
    contains(json.loads(output)["launch"]["found"], "TUTTI_SIZE")


@test
def the_matrix_of_another_machine_is_right():
    _, output, _ = tutti("info", "--json", "-n", "4", environment={"HWLOC_SYNTHETIC": "numa:2 pack:1 core:2 pu:2"})
    information = json.loads(output)
    if "processors" not in information:
        return "built without hwloc"
    equal(information["ranks"]["links"][0], ["self", "node", "machine", "machine"])
    equal(information["processors"]["links"][0][:3], ["self", "core", "node"])
    equal(len(information["nodes"]["links"]), 2)


@test
def the_doctor_reports_every_subject_with_a_level():
    status, output, _ = tutti("doctor", "--json", "-n", "2")
    report = json.loads(output)
    subjects = {finding["subject"] for finding in report["findings"]}
    for subject in ("kernel", "memfd", "pidfd", "robust mutexes", "membarrier", "ptrace", "memory", "address space", "locked memory",
                    "descriptors", "processes", "huge pages", "NUMA", "hyper-threads", "frequency", "load", "clock", "ports", "GPUs"):
        if subject == "GPUs" and "MPS" in subjects:
            continue
        assert subject in subjects, (subject, subjects)
    for finding in report["findings"]:
        assert finding["level"] in ("good", "note", "warning", "failure")
        assert finding["fix"] is not None or finding["level"] in ("good", "note"), finding
    equal(status, 1 if report["failures"] else 0)


# What is said about the library of a backend: its plug-in, the file, the words of what to install, how it is made old, and what it says then.
LIBRARIES = (("nccl", "libnccl.so.2", "libnccl2", {"STANDIN_NCCL_VERSION": "22603"}, "NCCL 2.26.3"),
             ("nvshmem", "libnvshmem_host.so.3", "nvidia-nvshmem-cu13", {"STANDIN_NVSHMEM": "old"}, "NVSHMEM 3.2.5"))


def standins(name):
    """The folder of the plug-in, and that of the stand-ins for its libraries; None where they were not built."""
    tests = os.path.join(os.environ.get("TEST_BUILD", ""), "tests")
    plugins = os.path.join(tests, "standin_nvshmem") if name == "nvshmem" else os.environ.get("TUTTI_PLUGIN_PATH", "")
    libraries = os.path.join(tests, "standin") + ":" + os.path.join(tests, "standin_" + name)
    there = os.path.exists(os.path.join(plugins, f"libtutti-{name}.so"))
    return (plugins, libraries) if there else (None, None)


def finding_of(name, environment):
    _, output, _ = tutti("doctor", "--json", environment=environment)
    return next(finding for finding in json.loads(output)["findings"] if finding["subject"] == name)


@test
def a_library_of_a_backend_that_is_missing_is_a_note_and_a_broken_one_a_warning():
    for name, file, install, _, _ in LIBRARIES:
        plugins, _ = standins(name)
        if plugins is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            environment = {"TUTTI_PLUGIN_PATH": plugins, "LD_LIBRARY_PATH": folder}
            finding = finding_of(name, environment)
            if finding["level"] != "good":  # the machine may have one
                equal(finding["level"], "note")
                contains(finding["finding"], install)
            with open(os.path.join(folder, file), "w") as broken:
                broken.write("no library")
            finding = finding_of(name, environment)
            equal(finding["level"], "warning")
            contains(finding["finding"], "cannot be loaded")
            contains(finding["fix"], install)
            status, output, _ = tutti("info", environment=environment)
            equal(status, 0)
            contains(output, "cannot be loaded")


@test
def a_library_of_a_backend_that_is_too_old_is_a_warning_with_its_version():
    for name, file, install, old, version in LIBRARIES:
        plugins, libraries = standins(name)
        if plugins is None or not os.path.exists(os.path.join(libraries.split(":")[1], file)):
            continue
        environment = {"TUTTI_PLUGIN_PATH": plugins, "LD_LIBRARY_PATH": libraries}
        finding = finding_of(name, environment)
        equal(finding["level"], "good")
        contains(finding["finding"], file)
        finding = finding_of(name, {**environment, **old})
        equal(finding["level"], "warning")
        contains(finding["finding"], version)
        contains(finding["finding"], "too old")
        contains(finding["fix"], install)
        status, output, _ = tutti("info", environment={**environment, **old})
        equal(status, 0)
        contains(output, version)


@test
def a_low_limit_is_a_failure_with_its_fix():
    status, output, _ = tutti("doctor", "-n", "200", limits="ulimit -n 128;")
    equal(status, 1)
    contains(output, "failure  descriptors: the hard limit is 128, but 200 ranks need about")
    contains(output, "fix: ulimit -n")
    status, output, _ = tutti("doctor", "-n", "200", limits="ulimit -S -n 128;")
    contains(output, "warning  descriptors: the soft limit is 128")


@test
def more_ranks_than_cpus_are_a_warning_which_is_no_failure():
    ranks = str(8 * os.cpu_count())
    status, output, _ = tutti("doctor", "-n", ranks, limits="ulimit -n 4096;")
    contains(output, f"warning  oversubscription: {ranks} ranks for")
    equal(status, 1 if re.search("^failure ", output, re.M) else 0)
    equal(tutti("doctor", "-n", ranks, "--strict")[0], 1)


@test
def what_is_in_order_is_shown_on_request_only():
    assert "good" not in tutti("doctor")[1]
    contains(tutti("doctor", "-v")[1], "good     kernel: Linux")


@test
def every_command_has_help_and_refuses_what_it_does_not_know():
    status, output, _ = tutti("help")
    equal(status, 0)
    commands = re.findall(r"^  ([a-z]+) ", output, re.M)
    for command in commands:
        if command == "help":
            continue
        status, text, _ = tutti("help", command)
        equal(status, 0)
        contains(text, f"Usage: tutti {command}")
        equal(tutti(command, "--help")[1], text)
        equal(tutti(command, "--no-such-option")[0], 2)
    assert {"run", "info", "doctor", "ps", "trace"} <= set(commands), commands
    equal(tutti("help", "rum")[0], 2)
    for mistake, meant in (("hlep", "help"), ("docter", "doctor"), ("trcae", "trace")):
        status, _, error = tutti(mistake)
        equal(status, 2)
        contains(error, f'Did you mean "{meant}"?')
    equal(tutti()[0], 2)
    assert re.fullmatch(r"tutti \d+\.\d+\.\d+\n", tutti("--version")[1])


@test
def the_manual_has_every_option_and_every_setting():
    manual = pathlib.Path(os.environ["TEST_SOURCE"], "man", "tutti.1").read_text()
    for command in re.findall(r"^  ([a-z]+) ", tutti("help")[1], re.M):
        if command == "help":
            continue
        section = re.search(rf"^\.Ss tutti {command}\n(.*?)^\.S[sh] ", manual, re.M | re.S)[1]
        listed = " ".join(re.findall(r"^ {2,}(-\S.*?)(?:  |$)", tutti("help", command)[1], re.M))
        for option in re.findall(r"(?<![\w-])--([a-z][a-z-]*)", listed):
            assert re.search(rf"Fl -{option}\b", section), f"tutti {command} --{option} is not in the manual"
    for setting in json.loads(tutti("info", "--json")[1])["settings"]:
        contains(manual, setting["name"])


main()
