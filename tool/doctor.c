/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti doctor`: looks for what makes jobs fail or slow on this machine, and prints the fix for each finding.
 *
 * A check is one function that reports what it saw: good, a note (nothing to do, worth knowing), a warning (slower or
 * nearer to a limit than need be) or a failure (jobs will not run, or not these). Warnings and failures come with a
 * fix.
 */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "base/settings.h"
#include "doctor.h"
#include "job/dump.h"
#include "job/inspect.h"
#include "machine.h"
#include "tool.h"
#include "topology.h"

static const char help_text[] =
    "Usage: tutti doctor [OPTION…]\n"
    "\n"
    "Checks this machine: limits on memory, locked memory, descriptors, processes and mappings; what\n"
    "Tutti needs of the kernel; huge pages, NUMA, hyper-threads, frequency governor, load, CPU quota,\n"
    "clock, ports, ptrace; GPUs and MPS where present; libraries that backends load. Prints each finding\n"
    "with its fix.\n"
    "\n"
    "  -n, --ranks N   for jobs of this many ranks; default: one per CPU that this command may use\n"
    "  -v, --verbose   also what is in order\n"
    "      --json      everything as JSON, for programs\n"
    "      --hosts A,B also whether jobs can run on these hosts together with this one: names, addresses, MTU,\n"
    "                  ssh, versions, firewalls; with --rsh COMMAND as for tutti run\n"
    "      --strict    warnings count as failures in the exit status\n"
    "\n"
    "Exit status: 0 when jobs can run here, warnings or not; 1 when there are failures, with --strict also\n"
    "when there are warnings; 2 for wrong usage.\n";

static int doctor_main(int argc, char **argv);
const tool_command tool_doctor = { "doctor", "check this machine and print the fix for each finding", help_text,
                                   doctor_main };

static const char *const level_names[] = { "good", "note", "warning", "failure" };

void doctor_put(report *to, level found, const char *subject, const char *fix, const char *format, ...) {
    static const char *const colours[] = { "\033[32m", "\033[36m", "\033[33m", "\033[1;31m" };
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    bool first =
        to->count[DOCTOR_GOOD] + to->count[DOCTOR_NOTE] + to->count[DOCTOR_WARNING] + to->count[DOCTOR_FAILURE] == 0;
    to->count[found]++;
    if (to->json) {
        printf("%s\n  {\"subject\": ", first ? "" : ",");
        tu_json_string(stdout, subject);
        printf(", \"level\": \"%s\", \"finding\": ", level_names[found]);
        tu_json_string(stdout, text);
        printf(", \"fix\": ");
        if (fix != NULL)
            tu_json_string(stdout, fix);
        else
            printf("null");
        printf("}");
    } else if (found >= DOCTOR_NOTE || to->verbose) {
        printf("%s%-8s%s %s: %s\n", to->colour ? colours[found] : "", level_names[found], to->colour ? "\033[0m" : "",
               subject, text);
        if (fix != NULL)
            printf("         fix: %s\n", fix);
    }
}

/* ---- reading /proc and /sys ---- */

/* A number in a file; -1 when there is none, INT64_MAX for "max". */
static int64_t read_number(const char *path) {
    char text[64];
    if (!machine_first_line(path, text, sizeof text))
        return -1;
    return strncmp(text, "max", 3) == 0 ? INT64_MAX : strtoll(text, NULL, 10);
}

/* "MemAvailable:  123 kB" in bytes; -1 when it is not there. */
static int64_t memory_line(const char *name) {
    char text[64];
    return machine_line_of("/proc/meminfo", name, text, sizeof text) ? strtoll(text, NULL, 10) * 1024 : -1;
}

/* Folder of this process in the unified control-group tree; false when there is none. */
static bool own_group(char *path, size_t bytes) {
    char line[512];
    FILE *file = fopen("/proc/self/cgroup", "re");
    bool found = false;
    while (file != NULL && !found && fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        found = strncmp(line, "0::", 3) == 0;
        if (found)
            snprintf(path, bytes, "/sys/fs/cgroup%s", strcmp(line + 3, "/") == 0 ? "" : line + 3);
    }
    if (file != NULL)
        fclose(file);
    return found;
}

/* ---- the kernel ---- */

static void check_kernel(report *to) {
    struct utsname system;
    int major = 0, minor = 0;
    uname(&system);
    sscanf(system.release, "%d.%d", &major, &minor);
    if (major < 5 || (major == 5 && minor < 4))
        doctor_put(to, DOCTOR_FAILURE, "kernel", "use Linux 5.4 or newer",
                   "Linux %s is too old: pidfds and memfd seals are needed", system.release);
    else
        doctor_put(to, DOCTOR_GOOD, "kernel", NULL, "Linux %s", system.release);
}

static void check_memfd(report *to) {
    int descriptor = memfd_create("tutti-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    bool works = descriptor >= 0 && fallocate(descriptor, 0, 0, 1 << 20) == 0 &&
                 fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
    if (works)
        doctor_put(to, DOCTOR_GOOD, "memfd", NULL, "sealed shared memory can be made");
    else
        doctor_put(to, DOCTOR_FAILURE, "memfd",
                   "allow memfd_create in the container's seccomp profile, and give it memory",
                   "sealed shared memory cannot be made: %s", strerror(errno));
    if (descriptor >= 0)
        close(descriptor);
}

static void check_liveness(report *to) {
    int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (pidfd < 0)
        doctor_put(to, DOCTOR_WARNING, "pidfd", "allow pidfd_open in the container's seccomp profile",
                   "pidfd_open fails (%s): deaths are confirmed by sockets only", strerror(errno));
    else
        doctor_put(to, DOCTOR_GOOD, "pidfd", NULL, "works");
    if (pidfd >= 0)
        close(pidfd);
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    if (pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST) != 0)
        doctor_put(to, DOCTOR_FAILURE, "robust mutexes", "use a kernel and C library with robust futexes",
                   "not available: deaths would not be noticed at once");
    else
        doctor_put(to, DOCTOR_GOOD, "robust mutexes", NULL, "available");
    pthread_mutexattr_destroy(&attributes);
    long commands = syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0);
    if (commands < 0 || (commands & MEMBARRIER_CMD_GLOBAL_EXPEDITED) == 0)
        doctor_put(to, DOCTOR_WARNING, "membarrier",
                   "allow membarrier in the container's seccomp profile; Linux 4.16 or newer",
                   "not available: sleeping ranks wake up every millisecond instead of when they are needed");
    else
        doctor_put(to, DOCTOR_GOOD, "membarrier", NULL, "works");
}

static void check_ptrace(report *to) {
    int64_t scope = read_number("/proc/sys/kernel/yama/ptrace_scope");
    if (scope >= 2 && geteuid() != 0)
        doctor_put(to, DOCTOR_NOTE, "ptrace", NULL,
                   "kernel.yama.ptrace_scope is %d: debuggers cannot attach to ranks; Tutti itself needs no ptrace",
                   (int)scope);
    else
        doctor_put(to, DOCTOR_GOOD, "ptrace", NULL,
                   scope < 0 ? "not restricted by Yama" : "kernel.yama.ptrace_scope is %d; Tutti needs no ptrace",
                   (int)scope);
    tu_job_list list = { 0 };
    struct stat own;
    bool readable = tu_inspect_process(&list, getpid(), false) == TUTTI_OK && stat("/proc/self/fd", &own) == 0;
    tu_inspect_free(&list);
    if (!readable)
        doctor_put(to, DOCTOR_WARNING, "/proc", "mount /proc",
                   "cannot be read: \"tutti ps\" and \"tutti trace\" will find nothing");
}

/* ---- limits ---- */

static void check_descriptors(report *to) {
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    /* Each rank holds a socket and a pidfd to every other, and a few more; in flight the same again. */
    int64_t needed = 4 * (int64_t)to->ranks + 64;
    char fix[200];
    snprintf(fix, sizeof fix,
             "ulimit -n %lld (and the hard limit in /etc/security/limits.conf or the service's LimitNOFILE)",
             (long long)(needed > 4096 ? needed : 4096));
    if ((int64_t)limit.rlim_max < needed)
        doctor_put(to, DOCTOR_FAILURE, "descriptors", fix, "the hard limit is %lld, but %d ranks need about %lld each",
                   (long long)limit.rlim_max, to->ranks, (long long)needed);
    else if ((int64_t)limit.rlim_cur < needed)
        doctor_put(
            to, DOCTOR_WARNING, "descriptors", fix,
            "the soft limit is %lld, and %d ranks need about %lld each; \"tutti run\" raises it, other launchers do "
            "not",
            (long long)limit.rlim_cur, to->ranks, (long long)needed);
    else
        doctor_put(to, DOCTOR_GOOD, "descriptors", NULL, "soft limit %lld", (long long)limit.rlim_cur);
}

static void check_memlock(report *to) {
    struct rlimit limit;
    getrlimit(RLIMIT_MEMLOCK, &limit);
    bool network = access("/sys/class/infiniband", F_OK) == 0, gpu = access("/dev/nvidiactl", F_OK) == 0;
    if (limit.rlim_cur != RLIM_INFINITY && (network || gpu) && limit.rlim_cur < (1u << 30))
        doctor_put(to, DOCTOR_WARNING, "locked memory", "ulimit -l unlimited (memlock in /etc/security/limits.conf)",
                   "the limit is %llu KiB; %s drivers register memory and may fail",
                   (unsigned long long)limit.rlim_cur / 1024, network ? "InfiniBand" : "GPU");
    else
        doctor_put(to, DOCTOR_GOOD, "locked memory", NULL, "enough for what is in this machine");
}

static void check_processes(report *to) {
    struct rlimit limit;
    getrlimit(RLIMIT_NPROC, &limit);
    int64_t needed = 8 * (int64_t)to->ranks + 64; /* ranks with their helper threads */
    if (limit.rlim_cur != RLIM_INFINITY && (int64_t)limit.rlim_cur < needed && geteuid() != 0)
        doctor_put(to, DOCTOR_FAILURE, "processes", "ulimit -u unlimited (nproc in /etc/security/limits.conf)",
                   "this user may have %llu processes and threads; %d ranks need about %lld",
                   (unsigned long long)limit.rlim_cur, to->ranks, (long long)needed);
    else
        doctor_put(to, DOCTOR_GOOD, "processes", NULL, "enough for %d ranks", to->ranks);
    char path[600], file[640];
    int64_t tasks = -1;
    if (own_group(path, sizeof path)) {
        snprintf(file, sizeof file, "%s/pids.max", path);
        tasks = read_number(file);
    }
    if (tasks > 0 && tasks < needed)
        doctor_put(to, DOCTOR_FAILURE, "processes", "raise pids.max (docker run --pids-limit, TasksMax of the service)",
                   "this control group may have %lld tasks; %d ranks need about %lld", (long long)tasks, to->ranks,
                   (long long)needed);
}

static void check_address_space(report *to) {
    struct rlimit limit;
    getrlimit(RLIMIT_AS, &limit);
    if (limit.rlim_cur != RLIM_INFINITY)
        doctor_put(to, DOCTOR_WARNING, "address space", "ulimit -v unlimited",
                   "limited to %llu MiB; every rank maps the memory of all its peers",
                   (unsigned long long)limit.rlim_cur >> 20);
    else
        doctor_put(to, DOCTOR_GOOD, "address space", NULL, "unlimited");
    int64_t maps = read_number("/proc/sys/vm/max_map_count");
    if (maps >= 0 && maps < 65530)
        doctor_put(to, DOCTOR_WARNING, "mappings", "sysctl -w vm.max_map_count=65530", "vm.max_map_count is %lld",
                   (long long)maps);
    else
        doctor_put(to, DOCTOR_GOOD, "mappings", NULL, "vm.max_map_count is %lld", (long long)maps);
}

static void check_memory(report *to) {
    int64_t available = memory_line("MemAvailable"), total = memory_line("MemTotal");
    if (available >= 0 && available < total / 20)
        doctor_put(to, DOCTOR_WARNING, "memory", "end what uses it, or run fewer ranks",
                   "only %lld MiB of %lld MiB are available", (long long)(available >> 20), (long long)(total >> 20));
    else
        doctor_put(to, DOCTOR_GOOD, "memory", NULL, "%lld MiB of %lld MiB are available", (long long)(available >> 20),
                   (long long)(total >> 20));
    char path[600], file[640];
    if (!own_group(path, sizeof path))
        return;
    /* Every ancestor limits too; the root has no files. */
    for (; strlen(path) > strlen("/sys/fs/cgroup"); *strrchr(path, '/') = '\0') {
        snprintf(file, sizeof file, "%s/memory.max", path);
        int64_t limit = read_number(file);
        if (limit < 0 || limit == INT64_MAX)
            continue;
        snprintf(file, sizeof file, "%s/memory.current", path);
        int64_t used = read_number(file), left = limit - (used > 0 ? used : 0);
        doctor_put(to, left < limit / 10 ? DOCTOR_WARNING : DOCTOR_NOTE, "memory limit",
                   left < limit / 10 ? "raise memory.max (docker run -m, MemoryMax of the service), or use less" : NULL,
                   "control group %s allows %lld MiB, of which %lld are left; shared memory counts",
                   path + strlen("/sys/fs/cgroup"), (long long)(limit >> 20), (long long)(left >> 20));
    }
}

/* ---- speed ---- */

static void check_huge_pages(report *to) {
    char shared[128];
    if (!machine_first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled", shared, sizeof shared)) {
        doctor_put(to, DOCTOR_NOTE, "huge pages", NULL, "this kernel has none for shared memory");
        return;
    }
    if (strstr(shared, "[never]") != NULL || strstr(shared, "[deny]") != NULL)
        doctor_put(
            to, DOCTOR_WARNING, "huge pages",
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (as root)",
            "off for shared memory: large symmetric blocks are mapped in pages of 4 KiB, which costs large collectives "
            "some speed");
    else
        doctor_put(to, DOCTOR_GOOD, "huge pages", NULL, "shared memory: %s", shared);
}

static void check_numa(report *to) {
    int nodes = machine_nodes();
    if (nodes > 1 && read_number("/proc/sys/kernel/numa_balancing") > 0)
        doctor_put(
            to, DOCTOR_WARNING, "NUMA", "sysctl -w kernel.numa_balancing=0",
            "%d nodes with automatic balancing, which unmaps pages to see who uses them and disturbs ranks that are "
            "bound",
            nodes);
    else
        doctor_put(to, DOCTOR_GOOD, "NUMA", NULL, "%d node%s", nodes,
                   nodes > 1 ? "s; bind ranks (tutti run does)" : "");
}

static void check_smt(report *to) {
    int64_t active = read_number("/sys/devices/system/cpu/smt/active");
    int cpus = topology_cpus();
    if (active == 1 && to->ranks > cpus / 2 && to->ranks > 1)
        doctor_put(to, DOCTOR_WARNING, "hyper-threads", "run one rank per core",
                   "%d ranks on %d CPUs that are pairs of hyper-threads: two ranks would share a core", to->ranks,
                   cpus);
    else
        doctor_put(to, DOCTOR_GOOD, "hyper-threads", NULL, active == 1 ? "on, with a core per rank" : "off");
}

static void check_governor(report *to) {
    char governor[64];
    if (!machine_first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", governor, sizeof governor)) {
        doctor_put(to, DOCTOR_GOOD, "frequency", NULL, "not governed by this kernel");
        return;
    }
    if (strcmp(governor, "powersave") == 0 || strcmp(governor, "conservative") == 0)
        doctor_put(to, DOCTOR_WARNING, "frequency", "cpupower frequency-set -g performance (as root)",
                   "the governor is %s: measurements vary, and short operations run at a low frequency", governor);
    else
        doctor_put(to, DOCTOR_GOOD, "frequency", NULL, "the governor is %s", governor);
}

static void check_load(report *to) {
    double load = 0;
    int cpus = topology_cpus();
    if (getloadavg(&load, 1) == 1 && load > 0.5 * cpus + 0.5)
        doctor_put(to, DOCTOR_NOTE, "load", "wait for the others, or leave them their CPUs (taskset, --bind)",
                   "%.1f processes want to run on %d CPUs at the moment: ranks will wait for their turn", load, cpus);
    else
        doctor_put(to, DOCTOR_GOOD, "load", NULL, "%.1f", load);
    if (to->ranks > cpus)
        doctor_put(to, DOCTOR_WARNING, "oversubscription", "run at most one rank per CPU",
                   "%d ranks for %d CPUs: they take turns, and every step of a collective may cost a switch", to->ranks,
                   cpus);
    char path[600], file[640], quota[64];
    if (!own_group(path, sizeof path))
        return;
    snprintf(file, sizeof file, "%s/cpu.max", path);
    long long allowed, period;
    if (machine_first_line(file, quota, sizeof quota) && sscanf(quota, "%lld %lld", &allowed, &period) == 2 &&
        allowed < period * to->ranks)
        doctor_put(
            to, DOCTOR_WARNING, "CPU quota",
            "raise cpu.max (docker run --cpus, CPUQuota of the service), or run fewer ranks",
            "this control group may use %.1f CPUs; %d ranks that wait for each other would be held back together",
            (double)allowed / (double)period, to->ranks);
}

static void check_clock(report *to) {
    char source[64] = "unknown";
    struct timespec begin, end, ignored;
    machine_first_line("/sys/devices/system/clocksource/clocksource0/current_clocksource", source, sizeof source);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int i = 0; i < 1000; i++)
        clock_gettime(CLOCK_MONOTONIC, &ignored);
    clock_gettime(CLOCK_MONOTONIC, &end);
    long each = ((end.tv_sec - begin.tv_sec) * 1000000000L + end.tv_nsec - begin.tv_nsec) / 1000;
    if (each > 150)
        doctor_put(to, DOCTOR_WARNING, "clock", "boot with clocksource=tsc where the processor has a stable one",
                   "the clock source is %s, and reading it takes %ld ns: it is a system call", source, each);
    else
        doctor_put(to, DOCTOR_GOOD, "clock", NULL, "%s, %ld ns a reading", source, each);
}

static void check_ports(report *to) {
    int probe = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (probe < 0) {
        doctor_put(to, DOCTOR_WARNING, "network", "give the container a loopback interface", "no TCP sockets: %s",
                   strerror(errno));
        return;
    }
    close(probe);
    char range[64] = "";
    int low = 0, high = 0;
    if (machine_first_line("/proc/sys/net/ipv4/ip_local_port_range", range, sizeof range))
        sscanf(range, "%d %d", &low, &high);
    if (high > 0 && high - low < 1000)
        doctor_put(to, DOCTOR_WARNING, "ports", "sysctl -w net.ipv4.ip_local_port_range=\"32768 60999\"",
                   "only %d ports for connections", high - low + 1);
    else
        doctor_put(to, DOCTOR_GOOD, "ports", NULL, "%d to %d for connections", low, high);
    int64_t backlog = read_number("/proc/sys/net/core/somaxconn");
    if (backlog >= 0 && backlog < to->ranks)
        doctor_put(to, DOCTOR_WARNING, "backlog", "sysctl -w net.core.somaxconn=4096",
                   "%lld connections may wait, and %d ranks come at once", (long long)backlog, to->ranks);
}

/* ---- GPUs ---- */

static bool runs(const char *name) {
    DIR *folder = opendir("/proc");
    struct dirent *entry;
    bool found = false;
    while (folder != NULL && !found && (entry = readdir(folder)) != NULL) {
        tu_process_view view;
        found = isdigit((unsigned char)entry->d_name[0]) && tu_process_look(atoi(entry->d_name), &view) &&
                strncmp(view.name, name, 15) == 0; /* the kernel keeps 15 letters */
    }
    if (folder != NULL)
        closedir(folder);
    return found;
}

static void check_gpus(report *to) {
    int gpus = machine_gpus();
    if (gpus == 0) {
        doctor_put(to, DOCTOR_GOOD, "GPUs", NULL, "none");
        return;
    }
    if (access("/dev/nvidiactl", R_OK | W_OK) != 0)
        doctor_put(to, DOCTOR_FAILURE, "GPUs",
                   "give this user the devices /dev/nvidia* (group video, or the container's --gpus)",
                   "%d found, but /dev/nvidiactl cannot be opened: %s", gpus, strerror(errno));
    bool mps = runs("nvidia-cuda-mps-control");
    if (!mps && to->ranks > gpus)
        doctor_put(to, DOCTOR_WARNING, "MPS", "nvidia-cuda-mps-control -d",
                   "%d ranks for %d GPU%s without MPS: they take turns on the device", to->ranks, gpus,
                   gpus == 1 ? "" : "s");
    else if (mps)
        doctor_put(to, DOCTOR_NOTE, "MPS", NULL,
                   "is running; a rank that is killed may cost all its clients their context");
    else
        doctor_put(to, DOCTOR_GOOD, "MPS", NULL, "not needed for one rank per GPU");
}

/* ---- the command ---- */

static int doctor_main(int argc, char **argv) {
    static const struct option longs[] = {
        { "ranks", required_argument, NULL, 'n' }, { "verbose", no_argument, NULL, 'v' },
        { "json", no_argument, NULL, 'j' },        { "strict", no_argument, NULL, 's' },
        { "hosts", required_argument, NULL, 'H' }, { "rsh", required_argument, NULL, 'R' },
        { "reach", required_argument, NULL, 'r' }, { "port", required_argument, NULL, 'p' },
        { "help", no_argument, NULL, 'h' },        { 0 }
    };
    static void (*const checks[])(report *) = { check_kernel,    check_memfd,         check_liveness, check_ptrace,
                                                check_memory,    check_address_space, check_memlock,  check_descriptors,
                                                check_processes, check_huge_pages,    check_numa,     check_smt,
                                                check_governor,  check_load,          check_clock,    check_ports,
                                                check_gpus,      doctor_libraries };
    report to = { .ranks = topology_cpus(), .colour = tool_colour(1) };
    const char *hosts = NULL, *rsh = NULL, *reach = NULL; /* --reach HOST --port P: what --hosts runs over there */
    int64_t port = 0;
    int option;
    opterr = 0;
    while ((option = getopt_long(argc, argv, ":n:vh", longs, NULL)) != -1) {
        int64_t ranks;
        switch (option) {
        case 'n':
            if (tu_parse_integer(optarg, &ranks) || ranks < 1 || ranks > 65535)
                return tool_usage(&tool_doctor, "-n %s: the number of ranks must be from 1 to 65535", optarg);
            to.ranks = (int)ranks;
            break;
        case 'v':
            to.verbose = true;
            break;
        case 'j':
            to.json = true;
            break;
        case 's':
            to.strict = true;
            break;
        case 'H':
            hosts = optarg;
            break;
        case 'R':
            rsh = optarg;
            break;
        case 'r':
            reach = optarg;
            break;
        case 'p':
            if (tu_parse_integer(optarg, &port) || port < 1 || port > 65535)
                return tool_usage(&tool_doctor, "--port %s: must be from 1 to 65535", optarg);
            break;
        default:
            return tool_other_option(&tool_doctor, option, argv, longs);
        }
    }
    if (optind < argc)
        return tool_usage(&tool_doctor, "\"%s\": it takes options alone", argv[optind]);
    if (rsh != NULL && hosts == NULL)
        return tool_usage(&tool_doctor, "--rsh goes with --hosts");
    if (reach != NULL)
        return doctor_reach(reach, (int)port);
    if (to.json)
        printf("{\"ranks\": %d, \"findings\": [", to.ranks);
    for (size_t i = 0; i < sizeof checks / sizeof checks[0]; i++)
        checks[i](&to);
    if (hosts != NULL)
        doctor_hosts(&to, hosts, rsh);
    if (to.json)
        printf("],\n \"warnings\": %d, \"failures\": %d}\n", to.count[DOCTOR_WARNING], to.count[DOCTOR_FAILURE]);
    else
        printf("%d in order, %d note%s, %d warning%s, %d failure%s, for jobs of %d rank%s\n", to.count[DOCTOR_GOOD],
               to.count[DOCTOR_NOTE], to.count[DOCTOR_NOTE] == 1 ? "" : "s", to.count[DOCTOR_WARNING],
               to.count[DOCTOR_WARNING] == 1 ? "" : "s", to.count[DOCTOR_FAILURE],
               to.count[DOCTOR_FAILURE] == 1 ? "" : "s", to.ranks, to.ranks == 1 ? "" : "s");
    return to.count[DOCTOR_FAILURE] > 0 || (to.strict && to.count[DOCTOR_WARNING] > 0);
}
