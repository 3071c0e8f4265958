/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti run`: starts a program as several ranks on this host, and stays until the last has ended. The parts are in
 * run.h; this file is the launcher: arguments, environment, store, input, signals, and what the user is told.
 */
#include "run.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <tutti/store.h>

#include "agent.h"
#include "base/clock.h"
#include "base/settings.h"
#include "tool.h"

#define MAX_RANKS 65535
#define NOT_FOUND 127
#define NOT_EXECUTABLE 126
#define SECRET_BYTES 32
#define WANTED_FILES 65536 /* descriptors per rank, where the hard limit allows it */

static const char help_text[] =
    "Usage: tutti run [OPTION…] PROGRAM [ARGUMENT…]\n"
    "\n"
    "Starts PROGRAM as several ranks and waits for all of them. Their output comes line\n"
    "by line, tagged with the rank. When a rank fails, it is named first, with its pid and its exit\n"
    "status or signal; the others get a moment to end by themselves and are then stopped. Whatever\n"
    "happens to this command, nothing it started survives it.\n"
    "\n"
    "  -n, --ranks N        how many; default: one per CPU that this command may use\n"
    "      --bind POLICY    core: an equal share of the cores each; numa: the NUMA nodes of that share; none;\n"
    "                       default: core, or none when there are more ranks than cores\n"
    "      --show-binding   print which rank gets which CPUs; without PROGRAM print only that\n"
    "  -q, --quiet          output as the ranks wrote it, without tags; of Tutti's own only errors\n"
    "      --log-dir DIR    also write the output to DIR/rank-R.out and rank-R.err; after a failure also the flight\n"
    "                       recorders, for \"tutti trace\"\n"
    "      --grace TIME     how long the others may go on after a failure before they get SIGTERM, and again before\n"
    "                       SIGKILL; seconds, or with a suffix (500ms, 1min); default 2s\n"
    "      --survive        leave the others running when a rank fails\n"
    "      --refill N       as --survive, and start the program anew for a rank that died, at most N times in all: "
    "the\n"
    "                       newcomer takes its place when the others call tutti_group_refill\n"
    "\n"
    "On several hosts, one command for all, which starts one launcher per host:\n"
    "      --hosts A:4,B:4  hosts and their ranks; -n for those that say none\n"
    "      --rsh COMMAND    how to run a command on a host: COMMAND HOST COMMAND-LINE; default ssh\n"
    "or one command per host, each with all of these and its own -n:\n"
    "      --nodes N        how many hosts\n"
    "      --node I         which one this is, from 0; ranks are numbered host by host\n"
    "      --meet HOST:PORT where the launcher of node 0 is reached\n"
    "      --secret-file F  the job's secret, 16 to 64 bytes, the same on all hosts, readable by you alone. Without "
    "one\n"
    "                       hosts meet on loopback only, or on a network that TUTTI_TRUST_NETWORK=1 trusts\n"
    "A host whose launcher ends, or says nothing for TUTTI_HOST_TIMEOUT, is lost: that is a failure, or with "
    "--survive\n"
    "the others go on when at least half of the ranks are left with node 0's launcher.\n"
    "\n"
    "Rank 0 gets the standard input. SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP and\n"
    "SIGCONT are passed on, each once; the same one twice within a second kills.\n"
    "\n"
    "Ranks find each other through TUTTI_RANK, TUTTI_SIZE, TUTTI_LOCAL_RANK, TUTTI_LOCAL_SIZE,\n"
    "TUTTI_STORE and TUTTI_SECRET_FD. PyTorch programs find RANK, WORLD_SIZE, LOCAL_RANK,\n"
    "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (a free port, left to PyTorch).\n"
    "\n"
    "Exit status: 0 when all ranks ended with 0; that of the first failure, or 128 and its signal;\n"
    "with --survive 0 when any rank ended with 0; 127 when PROGRAM is not found, 126 when it cannot\n"
    "be executed; 2 for wrong usage.\n";

static int run_main(int argc, char **argv);
const tool_command tool_run = { "run", "start a program as several ranks", help_text, run_main };

/* ---- arguments ---- */

/* Options about hosts that do not fit each other. */
static int check_hosts(const run_options *options) {
    bool by_node = options->nodes > 0 || options->node >= 0 || options->meet != NULL || options->secret_file != NULL;
    if (options->hosts != NULL && by_node)
        return tool_usage(&tool_run, "--hosts starts the launchers of all hosts itself: leave --nodes, --node, --meet "
                                     "and --secret-file out");
    if (options->rsh != NULL && options->hosts == NULL)
        return tool_usage(&tool_run, "--rsh goes with --hosts");
    if ((options->hosts != NULL || by_node) && options->refill > 0)
        return tool_usage(&tool_run, "--refill starts newcomers on one host alone; on several use --survive");
    if (!by_node)
        return 0;
    if (options->nodes == 0 || options->node < 0 || options->meet == NULL)
        return tool_usage(&tool_run, "several hosts need --nodes N, --node I and --meet HOST:PORT on each of them");
    if (options->node >= options->nodes)
        return tool_usage(&tool_run, "--node %d: with --nodes %d it must be 0 to %d", options->node, options->nodes,
                          options->nodes - 1);
    return 0;
}

static int parse_arguments(int argc, char **argv, run_options *options) {
    static const struct option longs[] = {
        { "ranks", required_argument, NULL, 'n' },   { "bind", required_argument, NULL, 'b' },
        { "show-binding", no_argument, NULL, 's' },  { "quiet", no_argument, NULL, 'q' },
        { "log-dir", required_argument, NULL, 'l' }, { "grace", required_argument, NULL, 'g' },
        { "survive", no_argument, NULL, 'v' },       { "refill", required_argument, NULL, 'r' },
        { "nodes", required_argument, NULL, 'N' },   { "node", required_argument, NULL, 'I' },
        { "meet", required_argument, NULL, 'm' },    { "secret-file", required_argument, NULL, 'S' },
        { "hosts", required_argument, NULL, 'H' },   { "rsh", required_argument, NULL, 'R' },
        { "help", no_argument, NULL, 'h' },          { 0 }
    };
    int option;
    int64_t number;
    opterr = 0;
    while ((option = getopt_long(argc, argv, "+:n:qh", longs, NULL)) != -1) {
        switch (option) {
        case 'n':
            if (tu_parse_integer(optarg, &number) || number < 1 || number > MAX_RANKS)
                return tool_usage(&tool_run, "-n %s: the number of ranks must be from 1 to %d", optarg, MAX_RANKS);
            options->ranks = (int)number;
            break;
        case 'b':
            if (strcmp(optarg, "core") == 0)
                options->binding = BIND_CORE;
            else if (strcmp(optarg, "numa") == 0)
                options->binding = BIND_NUMA;
            else if (strcmp(optarg, "none") == 0)
                options->binding = BIND_NONE;
            else
                return tool_usage(&tool_run, "--bind %s: must be core, numa or none", optarg);
            break;
        case 's':
            options->show_binding = true;
            break;
        case 'q':
            options->quiet = true;
            break;
        case 'l':
            options->log_dir = optarg;
            break;
        case 'g':
            if (tu_parse_duration(optarg, &options->grace_ns) || options->grace_ns <= 0)
                return tool_usage(&tool_run, "--grace %s: must be a time, like 2s or 500ms", optarg);
            break;
        case 'v':
            options->survive = true;
            break;
        case 'r':
            if (tu_parse_integer(optarg, &number) || number < 1 || number > MAX_RANKS)
                return tool_usage(&tool_run, "--refill %s: the number of newcomers must be from 1 to %d", optarg,
                                  MAX_RANKS);
            options->refill = (int)number;
            options->survive = true;
            break;
        case 'N':
            if (tu_parse_integer(optarg, &number) || number < 1 || number > MAX_RANKS)
                return tool_usage(&tool_run, "--nodes %s: the number of hosts must be from 1 to %d", optarg, MAX_RANKS);
            options->nodes = (int)number;
            break;
        case 'I':
            if (tu_parse_integer(optarg, &number) || number < 0 || number >= MAX_RANKS)
                return tool_usage(&tool_run, "--node %s: hosts are numbered from 0", optarg);
            options->node = (int)number;
            break;
        case 'm':
            options->meet = optarg;
            break;
        case 'S':
            options->secret_file = optarg;
            break;
        case 'H':
            options->hosts = optarg;
            break;
        case 'R':
            options->rsh = optarg;
            break;
        case 'h':
            fputs(help_text, stdout);
            return 0;
        case ':':
            return tool_usage(&tool_run, "%s needs a value", argv[optind - 1]);
        default:
            return tool_usage(&tool_run, "there is no option %s", argv[optind - 1]);
        }
    }
    options->program = argv + optind;
    int wrong = check_hosts(options);
    if (wrong != 0)
        return wrong;
    if (options->program[0] == NULL && !options->show_binding)
        return tool_usage(&tool_run, "which program? tutti run -n %d ./program",
                          options->ranks > 0 ? options->ranks : 4);
    return -1;
}

/* ---- the program ---- */

/* 0, NOT_FOUND or NOT_EXECUTABLE. */
static int examine(const char *path) {
    struct stat file;
    if (stat(path, &file) != 0)
        return NOT_FOUND;
    return S_ISDIR(file.st_mode) || access(path, X_OK) != 0 ? NOT_EXECUTABLE : 0;
}

/* Where the shell would find it; the error is the shell's, too. */
static int find_program(const char *name, char *path, size_t bytes) {
    int result = NOT_FOUND;
    if (strchr(name, '/') != NULL) {
        snprintf(path, bytes, "%s", name);
        result = examine(path);
        if (result == NOT_FOUND)
            fprintf(stderr, "tutti run: there is no program %s: %s\n", name, strerror(errno));
    } else {
        const char *folders = getenv("PATH");
        for (const char *at = folders != NULL ? folders : "/usr/local/bin:/usr/bin:/bin"; result != 0;) {
            size_t length = strcspn(at, ":");
            snprintf(path, bytes, "%.*s%s%s", (int)length, at, length > 0 ? "/" : "", name);
            int found = examine(path);
            if (found != NOT_FOUND)
                result = found;
            if (at[length] == '\0')
                break;
            at += length + 1;
        }
        if (result == NOT_FOUND)
            fprintf(stderr, "tutti run: there is no program %s in the folders of PATH%s%s\n", name,
                    examine(name) == 0 ? "; for the one in this folder say ./" : "", examine(name) == 0 ? name : "");
    }
    if (result == NOT_EXECUTABLE)
        fprintf(stderr, "tutti run: %s cannot be executed: it is a folder, or you may not (chmod +x)\n", name);
    return result;
}

/* ---- environment ---- */

/* A port that nobody uses now, below the range from which the kernel takes ports for connections, so that it stays
 * free until PyTorch's rank 0 binds it. */
int run_free_port(void) {
    for (int attempt = 0; attempt < 64; attempt++) {
        uint16_t random;
        if (getrandom(&random, sizeof random, 0) != sizeof random)
            break;
        int port = 15000 + random % 17000;
        int probe = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
        int taken = probe < 0 || bind(probe, (struct sockaddr *)&address, sizeof address) != 0;
        if (probe >= 0)
            close(probe);
        if (!taken)
            return port;
    }
    return 29500;
}

/* Variables that we set, and those of another launcher that would contradict them. */
static bool replaced(const char *variable) {
    static const char *const ours[] = { "TUTTI_RANK",  "TUTTI_SIZE",       "TUTTI_LOCAL_RANK", "TUTTI_LOCAL_SIZE",
                                        "TUTTI_STORE", "TUTTI_SECRET_FD",  "TUTTI_REFILL",     "RANK",
                                        "TUTTI_NODE",  "TUTTI_NODES",      "TUTTI_NEWS_FD",    "WORLD_SIZE",
                                        "LOCAL_RANK",  "LOCAL_WORLD_SIZE", "MASTER_ADDR",      "MASTER_PORT",
                                        "GROUP_RANK",  "ROLE_RANK",        "ROLE_WORLD_SIZE" };
    size_t length = strcspn(variable, "=");
    if (strncmp(variable, "TORCHELASTIC_", 13) == 0)
        return true;
    for (size_t i = 0; i < sizeof ours / sizeof ours[0]; i++)
        if (strlen(ours[i]) == length && memcmp(ours[i], variable, length) == 0)
            return true;
    return false;
}

/* Adds "NAME=value"; the text is freed with the plan. */
static bool add_variable(run_plan *plan, size_t *used, const char *format, ...) TUTTI_PRINTF(3, 4);
static bool add_variable(run_plan *plan, size_t *used, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    char *text = NULL;
    bool made = plan->own_count < RUN_VARIABLES && vasprintf(&text, format, arguments) > 0;
    va_end(arguments);
    if (made)
        plan->environment[(*used)++] = plan->own[plan->own_count++] = text;
    return made;
}

typedef struct job_variables {
    int size, nodes, node; /* 0 nodes: one host */
    const char *store, *master;
    int master_port;
    bool secret;
} job_variables;

static bool build_environment(run_plan *plan, const job_variables *job) {
    extern char **environ;
    static const char *const rank_names[4] = { "RANK", "LOCAL_RANK", "TUTTI_RANK", "TUTTI_LOCAL_RANK" };
    size_t count = 0, used = 0;
    while (environ[count] != NULL)
        count++;
    int ranks = plan->options->ranks;
    plan->environment = calloc(count + RUN_VARIABLES + 1, sizeof *plan->environment);
    bool complete = plan->environment != NULL;
    for (size_t i = 0; complete && i < count; i++)
        if (!replaced(environ[i]))
            plan->environment[used++] = environ[i];
    for (int i = 0; complete && i < 4; i++) { /* room for any rank */
        complete = add_variable(plan, &used, "%s=%d", rank_names[i], MAX_RANKS);
        plan->rank_variables[i] = complete ? plan->environment[used - 1] : NULL;
    }
    if (complete && plan->options->refill > 0) {
        complete = add_variable(plan, &used, "TUTTI_REFILL=%d", MAX_RANKS * 10);
        plan->refill_variable = complete ? plan->environment[used - 1] : NULL;
    }
    complete = complete && add_variable(plan, &used, "TUTTI_SIZE=%d", job->size) &&
               add_variable(plan, &used, "TUTTI_LOCAL_SIZE=%d", ranks) &&
               add_variable(plan, &used, "WORLD_SIZE=%d", job->size) &&
               add_variable(plan, &used, "LOCAL_WORLD_SIZE=%d", ranks) &&
               add_variable(plan, &used, "GROUP_RANK=%d", job->node) &&
               add_variable(plan, &used, "MASTER_ADDR=%s", job->master) &&
               add_variable(plan, &used, "MASTER_PORT=%d", job->master_port) &&
               add_variable(plan, &used, "TUTTI_STORE=%s", job->store);
    if (complete && job->secret)
        complete = add_variable(plan, &used, "TUTTI_SECRET_FD=%d", RUN_SECRET_FD);
    if (complete && job->nodes > 0)
        complete = add_variable(plan, &used, "TUTTI_NODE=%d", job->node) &&
                   add_variable(plan, &used, "TUTTI_NODES=%d", job->nodes) &&
                   add_variable(plan, &used, "TUTTI_NEWS_FD=%d", RUN_NEWS_FD);
    if (complete && plan->log_dir != NULL && getenv("TUTTI_TRACE_DIR") == NULL)
        complete = add_variable(plan, &used, "TUTTI_TRACE_DIR=%s", plan->log_dir);
    return complete;
}

/* Soft limits up to the hard ones, as far as it makes sense: a job of many ranks needs many descriptors. */
static void raise_limits(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < WANTED_FILES) {
        limit.rlim_cur = limit.rlim_max < WANTED_FILES ? limit.rlim_max : WANTED_FILES;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_MEMLOCK, &limit);
    }
}

/* ---- store ---- */

/* A socket that listens already, so that ranks may come before the store is up. Abstract: no file is left. */
static int listen_for_store(char *url, size_t bytes) {
    uint64_t random[2];
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || getrandom(random, sizeof random, 0) != sizeof random)
        return -1;
    snprintf(url, bytes, "unix:@tutti-run-%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
    size_t length = strlen(url) - strlen("unix:@");
    memcpy(address.sun_path + 1, url + strlen("unix:@"), length);
    if (bind(listener, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length)) !=
            0 ||
        listen(listener, 4096) != 0)
        return -1;
    return listener;
}

/* The secret in a sealed memfd, readable through as many descriptors as there are ranks. */
static int keep_secret(const tu_secret *secret) {
    int descriptor = memfd_create("tutti-secret", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (descriptor < 0 || write(descriptor, secret->data, secret->bytes) != (ssize_t)secret->bytes ||
        fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) != 0)
        return -1;
    return descriptor;
}

/* ---- the launcher ---- */

typedef struct launcher {
    run_options options;
    run_plan plan;
    run_state *state;
    output *output;
    tutti_store *store;
    tu_secret secret; /* of the job; none on a network that is trusted */
    agent *agent;     /* NULL: one host */
    bool silent;      /* the command that started this one by --hosts tells the user */
    pid_t guardian;
    int socket;  /* to the guardian */
    int signals; /* signalfd */
    int relay;   /* write end of rank 0's input when a terminal is relayed, else -1 */
    bool relay_full;
    char typed[4096];
    size_t typed_bytes, typed_written;
    char *log_dir; /* the whole path of --log-dir, or NULL */
    time_t began;
    long memory_kills; /* on this host before the job began */
    bool told_first, told_stopping;
    bool ending;       /* the user has sent a signal that ends */
    bool *told;        /* [rank of the job]: its end */
    uint32_t *refills; /* [rank]: newcomers that were told */
} launcher;

static const int forwarded[] = { SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT };

bool run_forwards(int signal_number) {
    for (size_t i = 0; i < sizeof forwarded / sizeof forwarded[0]; i++)
        if (forwarded[i] == signal_number)
            return true;
    return false;
}

static int system_error(const char *what) {
    return tool_fail("run: %s: %s", what, strerror(errno));
}

/* Descriptors 0 to 2 must exist, else a pipe would take their place. */
static void fill_standard_descriptors(void) {
    int descriptor;
    do
        descriptor = open("/dev/null", O_RDWR);
    while (descriptor >= 0 && descriptor <= 2);
    if (descriptor > 2)
        close(descriptor);
}

static int make_pipes(launcher *l) {
    int count = 2 * l->options.ranks;
    l->plan.pipes = calloc((size_t)count, sizeof *l->plan.pipes);
    if (l->plan.pipes == NULL)
        return system_error("no memory for the ranks' pipes");
    for (int i = 0; i < count; i++)
        if (pipe2(l->plan.pipes[i], O_CLOEXEC) != 0)
            return system_error("cannot make pipes for the ranks' output (raise ulimit -n)");
    return 0;
}

/* A file or pipe goes to rank 0 as it is. A terminal is relayed, because rank 0 is not in its foreground. */
static int prepare_input(launcher *l) {
    int ends[2];
    l->relay = -1;
    l->plan.input = 0;
    if (l->options.first_rank > 0 || !isatty(0)) /* rank 0 is elsewhere: nobody reads it here */
        return 0;
    if (pipe2(ends, O_CLOEXEC) != 0)
        return system_error("cannot make a pipe for the standard input");
    l->plan.input = ends[0];
    l->relay = ends[1];
    fcntl(l->relay, F_SETFL, O_NONBLOCK);
    return 0;
}

void run_block_signals(sigset_t *before, sigset_t *ours) {
    sigemptyset(ours);
    for (size_t i = 0; i < sizeof forwarded / sizeof forwarded[0]; i++)
        sigaddset(ours, forwarded[i]);
    sigaddset(ours, SIGCHLD);
    sigset_t blocked = *ours;
    sigaddset(&blocked, SIGPIPE); /* a closed pipe is an error of write */
    sigprocmask(SIG_BLOCK, &blocked, before);
}

/* Forks the guardian before any thread exists, then brings the store up. */
static int start_guardian(launcher *l) {
    int sockets[2];
    size_t bytes = sizeof *l->state + (size_t)l->options.ranks * sizeof l->state->ranks[0];
    void *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    l->state = shared != MAP_FAILED ? shared : NULL;
    if (l->state == NULL || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0)
        return system_error("cannot prepare the guardian process");
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    l->guardian = fork();
    if (l->guardian < 0)
        return system_error("cannot start the guardian process");
    if (l->guardian == 0) {
        close(sockets[0]);
        close(l->signals);
        if (l->relay >= 0)
            close(l->relay);
        guardian_main(&l->plan, l->state, sockets[1]);
    }
    close(sockets[1]);
    l->socket = sockets[0];
    for (int i = 0; i < 2 * l->options.ranks; i++)
        close(l->plan.pipes[i][1]);
    if (l->plan.input > 2)
        close(l->plan.input);
    return 0;
}

static int start_store(launcher *l, const char *host) {
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.listen_fd = l->plan.store;
    options.trust_network = l->agent != NULL; /* the agent has asked whether it may listen there */
    if (tu_auth_available() &&
        l->secret.bytes > 0) { /* else the kernel's credentials admit only this user's processes */
        options.secret = l->secret.data;
        options.secret_bytes = l->secret.bytes;
    }
    if (l->plan.store >= 0 && tutti_store_serve(host, 0, &options, &l->store) != TUTTI_OK)
        return tool_fail("run: cannot host the store where the ranks meet: %s", tutti_error_message());
    return 0;
}

/* ---- telling ---- */

static int pid_of(const launcher *l, int rank) {
    return atomic_load_explicit(&l->state->ranks[rank].pid, memory_order_relaxed);
}

static int status_of(const launcher *l, int rank) {
    return atomic_load_explicit(&l->state->ranks[rank].wait_status, memory_order_relaxed);
}

static bool has_ended(const launcher *l, int rank) {
    /* Acquire pairs with the guardian's release: the wait status is there. */
    return atomic_load_explicit(&l->state->ranks[rank].ended, memory_order_acquire) != 0;
}

/* How many processes the kernel has killed for want of memory, ever; -1 unknown. */
static long memory_kills(void) {
    char line[128];
    long count = -1;
    FILE *file = fopen("/proc/vmstat", "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL && sscanf(line, "oom_kill %ld", &count) != 1)
        continue;
    if (file != NULL)
        fclose(file);
    return count;
}

static void tell_end(launcher *l, int rank, const char *and_then) {
    char text[192];
    output_drain(l->output, rank); /* its last words come before */
    int status = status_of(l, rank);
    tool_wait_text(status, text, sizeof text);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && memory_kills() > l->memory_kills)
        snprintf(text + strlen(text), sizeof text - strlen(text),
                 ", likely by the kernel for want of memory (dmesg tells)");
    bool colour = tool_colour(2);
    output_tell(l->output, "%stutti run: rank %d (pid %d) %s%s%s\n", colour ? "\033[1;31m" : "", rank, pid_of(l, rank),
                text, and_then, colour ? "\033[0m" : "");
}

static void tell_stopping(launcher *l) {
    bool stopped[MAX_RANKS];
    char text[256];
    int count = 0;
    memset(stopped, 0, sizeof stopped);
    for (int rank = 0; rank < l->options.ranks; rank++) {
        bool *this = &stopped[l->options.first_rank + rank];
        *this = atomic_load_explicit(&l->state->ranks[rank].stopped, memory_order_relaxed) != 0;
        count += *this;
    }
    l->told_stopping = true;
    if (count == 0 || l->options.quiet)
        return;
    tool_rank_list(stopped, l->options.first_rank + l->options.ranks, text, sizeof text);
    output_tell(l->output, "tutti run: stopping rank%s %s\n", count == 1 ? "" : "s", text);
}

static void tell_refills(launcher *launcher) {
    for (int rank = 0; rank < launcher->options.ranks; rank++) {
        run_rank *slot = &launcher->state->ranks[rank];
        uint32_t refills = atomic_load_explicit(&slot->refills, memory_order_acquire);
        if (refills == launcher->refills[rank] || launcher->options.quiet)
            continue;
        launcher->refills[rank] = refills;
        char text[128];
        tool_wait_text(atomic_load_explicit(&slot->lost_status, memory_order_relaxed), text, sizeof text);
        output_tell(launcher->output, "tutti run: rank %d (pid %d) %s; a newcomer (pid %d) takes its place\n", rank,
                    atomic_load_explicit(&slot->lost_pid, memory_order_relaxed), text,
                    atomic_load_explicit(&slot->pid, memory_order_relaxed));
    }
}

/* What the agent has to say of ranks and hosts. */
static void tell_of_hosts(launcher *l) {
    char line[640];
    bool colour = tool_colour(2);
    for (int rank; agent_next(l->agent, line, sizeof line, &rank);) {
        int here = rank - l->options.first_rank;
        if (rank >= 0)
            l->told[rank] = true;
        if (rank >= 0 && here >= 0 && here < l->options.ranks)
            output_drain(l->output, here); /* its last words come before */
        line[strcspn(line, "\n")] = 0;
        if (!l->silent)
            output_tell(l->output, "%s%s%s\n", colour ? "\033[1;31m" : "", line, colour ? "\033[0m" : "");
    }
}

static void tell_news(launcher *l) {
    if (l->agent != NULL) {
        tell_of_hosts(l);
        if (!l->silent && !l->told_stopping && atomic_load_explicit(&l->state->stopping, memory_order_acquire) != 0)
            tell_stopping(l);
        return;
    }
    if (l->options.refill > 0)
        tell_refills(l);
    uint32_t first = atomic_load_explicit(&l->state->first_failure, memory_order_acquire);
    bool survive = l->options.survive;
    if (first != 0 && !l->told_first) {
        l->told_first = l->told[first - 1] = true;
        tell_end(l, (int)first - 1, survive ? "; the others go on" : "");
    }
    if (survive && l->told_first && !l->options.quiet)
        for (int rank = 0; rank < l->options.ranks; rank++)
            if (!l->told[rank] && has_ended(l, rank) && status_of(l, rank) != 0) {
                l->told[rank] = true;
                tell_end(l, rank, "");
            }
    if (!l->told_stopping && atomic_load_explicit(&l->state->stopping, memory_order_acquire) != 0)
        tell_stopping(l);
}

int run_status_of_news(const void *news, int rank) {
    return tu_news_of(news, rank) == TU_NEWS_DEAD ? tu_news_wait_status(news, rank) : 0;
}

static int status_here(const void *argument, int rank) {
    return status_of(argument, rank);
}

static void tell_others(launcher *l) {
    if (l->agent != NULL)
        run_tell_others(l->output, agent_size(l->agent), l->told, run_status_of_news, agent_news(l->agent));
    else
        run_tell_others(l->output, l->options.ranks, l->told, status_here, l);
}

void run_tell_others(output *output, int size, bool *told, run_status_of *status_of_rank, const void *argument) {
    bool same[MAX_RANKS];
    for (int rank = 0; rank < size; rank++) {
        int status = status_of_rank(argument, rank);
        if (told[rank] || status == 0)
            continue;
        int count = 0;
        for (int other = 0; other < size; other++) {
            same[other] = !told[other] && status_of_rank(argument, other) == status;
            count += same[other];
        }
        for (int other = 0; other < size; other++)
            told[other] |= same[other];
        char text[128], ranks[256];
        tool_wait_text(status, text, sizeof text);
        tool_rank_list(same, size, ranks, sizeof ranks);
        bool plural_was = count > 1 && strncmp(text, "was ", 4) == 0;
        output_tell(output, "tutti run: then rank%s %s %s%s\n", count == 1 ? "" : "s", ranks, plural_was ? "were " : "",
                    plural_was ? text + 4 : text);
    }
}

/* ---- the loop ---- */

static void relay_input(launcher *l) {
    if (l->typed_bytes == 0) {
        ssize_t count = read(0, l->typed, sizeof l->typed);
        if (count <= 0 && !(count < 0 && (errno == EINTR || errno == EAGAIN))) {
            close(l->relay);
            l->relay = -1;
            return;
        }
        l->typed_bytes = count > 0 ? (size_t)count : 0;
        if (count > 0)
            output_answered(l->output);
        l->typed_written = 0;
    }
    ssize_t wrote = write(l->relay, l->typed + l->typed_written, l->typed_bytes - l->typed_written);
    l->relay_full = wrote < 0 && errno == EAGAIN;
    if (wrote < 0 && !l->relay_full) { /* rank 0 reads no more */
        close(l->relay);
        l->relay = -1;
        return;
    }
    l->typed_written += wrote > 0 ? (size_t)wrote : 0;
    l->relay_full = l->typed_written < l->typed_bytes;
    if (!l->relay_full)
        l->typed_bytes = 0;
}

bool run_may_read_terminal(void) {
    return tcgetpgrp(0) == getpgrp();
}

static void take_signals(launcher *l) {
    struct signalfd_siginfo signal;
    while (read(l->signals, &signal, sizeof signal) == sizeof signal) {
        int number = (int)signal.ssi_signo;
        if (number == SIGCHLD)
            continue; /* the socket tells when the guardian is gone */
        l->ending |= number == SIGINT || number == SIGTERM || number == SIGHUP || number == SIGQUIT;
        (void)send(l->socket, &number, sizeof number, MSG_NOSIGNAL);
        if (l->agent != NULL)
            agent_signal(l->agent, number);
        else if (number == SIGTSTP) /* over several hosts a launcher that stands still would be given up */
            raise(SIGSTOP);
    }
}

/* Nobody takes our output. Signals get through all the same, and when one of them has ended the job, what is left of
 * the output is given up, as it would be without us. */
static bool held_up(void *argument) {
    launcher *l = argument;
    siginfo_t gone = { 0 };
    take_signals(l);
    if (!l->ending || waitid(P_PID, (id_t)l->guardian, &gone, WEXITED | WNOHANG | WNOWAIT) != 0 || gone.si_pid == 0)
        return false;
    int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    for (int descriptor = 1; descriptor <= 2; descriptor++) /* our own words would be held up next */
        if (nowhere >= 0 && poll(&(struct pollfd){ .fd = descriptor, .events = POLLOUT }, 1, 0) == 0)
            dup2(nowhere, descriptor);
    if (nowhere >= 0)
        close(nowhere);
    return true;
}

static bool own_done(const launcher *l) {
    return atomic_load_explicit(&l->state->done, memory_order_acquire) != 0;
}

/* On this host and on all others. */
static bool all_done(const launcher *l) {
    int status;
    return own_done(l) && (l->agent == NULL || agent_finished(l->agent, &status));
}

/* Until everything has ended. Returns false when the guardian vanished without a word. */
static bool relay_everything(launcher *l) {
    struct pollfd *polled = calloc((size_t)(2 * l->options.ranks + 4), sizeof *polled);
    bool lost = polled == NULL;
    while (!lost && !all_done(l)) {
        polled[0] = (struct pollfd){ .fd = own_done(l) ? -1 : l->socket, .events = POLLIN };
        polled[1] = (struct pollfd){ .fd = l->signals, .events = POLLIN };
        bool terminal = l->relay >= 0 && run_may_read_terminal();
        polled[2] = l->relay_full ? (struct pollfd){ .fd = l->relay, .events = POLLOUT }
                                  : (struct pollfd){ .fd = terminal ? 0 : -1, .events = POLLIN };
        polled[3] = (struct pollfd){ .fd = l->agent != NULL ? agent_events(l->agent) : -1, .events = POLLIN };
        int streams = output_poll(l->output, polled + 4);
        int timeout = output_timeout(l->output);
        if (l->relay >= 0 && !terminal && (timeout < 0 || timeout > 500))
            timeout = 500; /* look whether we have come to the foreground */
        poll(polled, (nfds_t)(4 + streams), timeout);
        if (polled[1].revents != 0)
            take_signals(l);
        output_read(l->output, polled + 4, streams);
        output_show_prompts(l->output);
        if (polled[2].revents != 0)
            relay_input(l);
        char news[16];
        if (polled[0].revents != 0) {
            while (recv(l->socket, news, sizeof news, MSG_DONTWAIT) > 0)
                continue;
            lost = (polled[0].revents & POLLHUP) != 0 && !own_done(l);
        }
        if (atomic_load_explicit(&l->state->start_error, memory_order_acquire) == 0)
            tell_news(l);
    }
    free(polled);
    return !lost;
}

static int exit_status(const launcher *l) {
    int job_status;
    if (l->agent != NULL)
        return agent_finished(l->agent, &job_status) ? job_status : 1;
    uint32_t first = atomic_load_explicit(&l->state->first_failure, memory_order_acquire);
    if (first == 0)
        return 0;
    for (int rank = 0; l->options.survive && rank < l->options.ranks; rank++)
        if (status_of(l, rank) == 0)
            return 0;
    int status = status_of(l, (int)first - 1);
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

/* Whether this job left flight recorders, by the guardian or by its ranks (TUTTI_TRACE_DIR). */
static bool wrote_recorders(const launcher *l) {
    DIR *folder = l->log_dir != NULL ? opendir(l->log_dir) : NULL;
    struct dirent *entry;
    bool found = false;
    while (folder != NULL && !found && (entry = readdir(folder)) != NULL) {
        struct stat file;
        found = strncmp(entry->d_name, "tutti-", 6) == 0 && strstr(entry->d_name, "-rank-") != NULL &&
                fstatat(dirfd(folder), entry->d_name, &file, 0) == 0 && file.st_mtime >= l->began;
    }
    if (folder != NULL)
        closedir(folder);
    return found;
}

/* After the last word of the guardian, or its death. */
static int finish(launcher *l, bool guarded) {
    int guardian_status = 0;
    waitpid(l->guardian, &guardian_status, 0);
    if (!guarded) {
        kill_descendants(); /* the ranks died with the guardian; what they had started is ours now */
        output_drain(l->output, -1);
        char text[128];
        tool_wait_text(guardian_status, text, sizeof text);
        return tool_fail("run: the guardian process (pid %d) %s; all ranks were stopped", l->guardian, text) + 127;
    }
    output_drain(l->output, -1);
    int error = atomic_load_explicit(&l->state->start_error, memory_order_acquire);
    if (error != 0 && l->agent == NULL) {
        fprintf(stderr, "tutti run: cannot start rank %d (%s): %s\n", atomic_load(&l->state->start_rank), l->plan.path,
                strerror(error));
        return error == ENOENT ? NOT_FOUND : NOT_EXECUTABLE;
    }
    tell_news(l);
    uint32_t left_over = atomic_load_explicit(&l->state->left_over, memory_order_relaxed);
    if (!l->options.quiet) {
        if (!l->silent)
            tell_others(l);
        if (left_over > 0)
            fprintf(stderr, "tutti run: killed %u process%s that the ranks had left behind\n", left_over,
                    left_over == 1 ? "" : "es");
        if (exit_status(l) != 0 && wrote_recorders(l))
            fprintf(stderr, "tutti run: \"tutti trace %s\" shows what the ranks did\n", l->options.log_dir);
    }
    return exit_status(l);
}

static int show_binding(const run_options *options, const binding *bindings, int bound, const char *why) {
    for (int rank = 0; bound > 0 && rank < options->ranks; rank++)
        fprintf(stderr, "tutti run: rank %d: %s\n", rank, bindings[rank].text);
    if (bound == 0)
        fprintf(stderr, "tutti run: %s\n", why);
    return 0;
}

static int bind_ranks(launcher *l) {
    const run_options *options = &l->options;
    char why[160] = "";
    binding *bindings = calloc((size_t)options->ranks, sizeof *bindings);
    if (bindings == NULL)
        return system_error("no memory for the bindings");
    int bound = topology_bind(options->binding, options->ranks, bindings, why, sizeof why);
    if (bound < 0) {
        free(bindings);
        return tool_fail("run: cannot bind: %s; --bind none does without", why);
    }
    if (options->show_binding)
        show_binding(options, bindings, bound, why);
    l->plan.bindings = bound > 0 ? bindings : NULL;
    if (bound == 0)
        free(bindings);
    return 0;
}

/* Gives back what preparing took; descriptors go with the process. */
static void free_plan(launcher *l) {
    for (int i = 0; i < l->plan.own_count; i++)
        free(l->plan.own[i]);
    free(l->plan.environment);
    free(l->plan.pipes);
    free((binding *)l->plan.bindings);
    free(l->told);
    free(l->refills);
    free(l->log_dir);
    tu_secret_wipe(&l->secret);
    agent_close(l->agent);
    if (l->state != NULL)
        munmap(l->state, sizeof *l->state + (size_t)l->options.ranks * sizeof l->state->ranks[0]);
}

/* The secret of a file, or of the first line of the standard input; spaces and newlines at its end do not count. */
static int read_secret(launcher *l) {
    char text[256];
    size_t used = 0;
    bool standard = strcmp(l->options.secret_file, "-") == 0;
    int file = standard ? 0 : open(l->options.secret_file, O_RDONLY | O_CLOEXEC);
    struct stat about;
    if (file < 0 || fstat(file, &about) != 0)
        return tool_fail("run: cannot read the secret in %s: %s", l->options.secret_file, strerror(errno));
    if (!standard && S_ISREG(about.st_mode) && (about.st_mode & 077) != 0)
        return tool_fail("run: others may read the secret in %s; chmod 600 %s", l->options.secret_file,
                         l->options.secret_file);
    /* Byte by byte: what follows is rank 0's. */
    while (used < sizeof text && read(file, text + used, 1) == 1 && !(standard && text[used] == '\n'))
        used++;
    if (!standard)
        close(file);
    while (used > 0 && strchr(" \r\n", text[used - 1]) != NULL)
        used--;
    int result = tu_secret_set(&l->secret, text, used) != TUTTI_OK
                     ? tool_fail("run: the secret in %s does not do: %s", l->options.secret_file, tutti_error_message())
                     : 0;
    explicit_bzero(text, sizeof text);
    return result;
}

/* HOST:PORT, [HOST]:PORT. */
static int parse_meet(const char *text, tu_address *address) {
    const char *colon = strrchr(text, ':');
    size_t length = colon != NULL ? (size_t)(colon - text) : 0;
    bool brackets = length > 2 && text[0] == '[' && text[length - 1] == ']';
    char host[256];
    int64_t port;
    if (length == 0 || length >= sizeof host || tu_parse_integer(colon + 1, &port) || port < 1 || port > 65535)
        return tool_usage(&tool_run, "--meet %s: must be HOST:PORT", text);
    snprintf(host, sizeof host, "%.*s", (int)(length - 2 * brackets), text + brackets);
    if (tu_address_set(address, host, (int)port) != TUTTI_OK)
        return tool_usage(&tool_run, "--meet %s: %s", text, tutti_error_message());
    return 0;
}

/* Meets the launchers of the other hosts; then the plan knows who is where. `cannot`: see agent_options. */
static int meet_others(launcher *l, const char *cannot, job_variables *job) {
    tu_settings settings;
    if (tu_settings_load(&settings) != TUTTI_OK)
        return tool_fail("run: %s", tutti_error_message());
    agent_options options = { .nodes = l->options.nodes,
                              .node = l->options.node,
                              .hub = l->options.node == 0 && !l->silent,
                              .secret = l->secret,
                              .trust_network = tu_settings_number(&settings, TU_SETTING_TRUST_NETWORK) != 0,
                              .survive = l->options.survive,
                              .quiet = l->options.quiet,
                              .ranks = l->options.ranks,
                              .cannot = cannot,
                              .deadline = tu_deadline(tu_settings_number(&settings, TU_SETTING_TIMEOUT)),
                              .connect_ns = l->silent ? 10 * TU_SECOND : 0, /* it was there before this one */
                              .silence_ns = tu_settings_number(&settings, TU_SETTING_HOST_TIMEOUT),
                              .signals = l->signals };
    tu_settings_free(&settings);
    int result = options.silence_ns < 10 * TU_MILLISECOND
                     ? tool_fail("run: TUTTI_HOST_TIMEOUT is too short: give at least 10ms")
                     : parse_meet(l->options.meet, &options.meet);
    if (result == 0)
        result = agent_open(&options, &l->agent);
    if (result == 0)
        result = agent_meet(l->agent, NULL, NULL);
    if (result != 0)
        return result;
    l->options.first_rank = agent_first_rank(l->agent);
    l->plan.store = agent_store_listener(l->agent);
    l->plan.news = agent_news_descriptor(l->agent);
    l->plan.page = agent_news(l->agent);
    l->plan.silence_ns = options.silence_ns;
    l->plan.woken = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    *job = (job_variables){
        .size = agent_size(l->agent), .nodes = l->options.nodes, .node = l->options.node, .store = agent_store(l->agent)
    };
    job->master = agent_master(l->agent, &job->master_port);
    return l->plan.woken >= 0 ? 0 : system_error("cannot prepare the job");
}

/* The store's socket, the secret and what the ranks find in their environment. */
static int prepare(launcher *l, int missing, char *url, size_t bytes) {
    static const char *const cannot[2] = { "there is no such program", "it cannot be executed" };
    job_variables job = { .size = l->options.ranks, .store = url, .master = "127.0.0.1" };
    int result = 0;
    if (l->options.secret_file != NULL)
        result = read_secret(l);
    if (result == 0 && l->options.nodes > 0)
        result = meet_others(l, missing != 0 ? cannot[missing == NOT_EXECUTABLE] : NULL, &job);
    if (result != 0)
        return result;
    if (l->options.nodes == 0) {
        unsigned char secret[SECRET_BYTES];
        if (getrandom(secret, sizeof secret, 0) != sizeof secret ||
            tu_secret_set(&l->secret, secret, sizeof secret) != TUTTI_OK)
            return system_error("cannot make a secret");
        l->plan.store = listen_for_store(url, bytes);
        if (l->plan.store < 0)
            return system_error("cannot prepare the job");
        job.master_port = run_free_port();
    }
    job.secret = l->secret.bytes > 0;
    l->plan.secret = job.secret ? keep_secret(&l->secret) : -1;
    l->told = calloc((size_t)job.size, sizeof *l->told);
    l->refills = calloc((size_t)l->options.ranks, sizeof *l->refills);
    if ((job.secret && l->plan.secret < 0) || l->told == NULL || l->refills == NULL ||
        !build_environment(&l->plan, &job))
        return system_error("cannot prepare the job");
    return 0;
}

static int launch(launcher *l) {
    char path[4096], url[80] = "";
    sigset_t before, ours;
    int missing = find_program(l->options.program[0], path, sizeof path);
    if (missing != 0 && l->options.nodes == 0)
        return missing;
    if (l->options.log_dir != NULL && (mkdir(l->options.log_dir, 0777) == 0 || errno == EEXIST))
        l->log_dir = realpath(l->options.log_dir, NULL);
    if (l->options.log_dir != NULL && l->log_dir == NULL)
        return tool_fail("run: cannot make the folder %s: %s", l->options.log_dir, strerror(errno));
    raise_limits();
    if (l->silent) /* ssh and its like were started to ignore the terminal's signals; the ranks are not */
        for (size_t i = 0; i < sizeof forwarded / sizeof forwarded[0]; i++)
            signal(forwarded[i], SIG_DFL);
    run_block_signals(&before, &ours);
    l->plan = (run_plan){ .options = &l->options,
                          .path = path,
                          .log_dir = l->log_dir,
                          .signals = &before,
                          .secret = -1,
                          .store = -1,
                          .news = -1,
                          .woken = -1,
                          .bindings = l->plan.bindings };
    l->began = time(NULL);
    l->signals = signalfd(-1, &ours, SFD_CLOEXEC | SFD_NONBLOCK);
    if (l->signals < 0)
        return system_error("cannot watch for signals");
    int result = prepare(l, missing, url, sizeof url);
    if (result != 0)
        return result;
    if (make_pipes(l) || prepare_input(l) ||
        (l->output = output_open(&l->options, l->plan.pipes, l->signals, held_up, l)) == NULL || start_guardian(l))
        return 1;
    if (l->plan.secret >= 0)
        close(l->plan.secret);
    if (start_store(l, url) || (l->agent != NULL && agent_start(l->agent, l->state, l->socket, l->plan.woken))) {
        close(l->socket); /* the guardian kills what it has started */
        waitpid(l->guardian, NULL, 0);
        return 1;
    }
    l->memory_kills = memory_kills(); /* now, when the ranks are starting: it takes a moment */
    bool guarded = relay_everything(l);
    result = finish(l, guarded);
    tutti_store_release(l->store);
    return result;
}

static int run_main(int argc, char **argv) {
    launcher l = { .options = { .grace_ns = 2 * TU_SECOND, .node = -1 } };
    int result = parse_arguments(argc, argv, &l.options);
    if (result >= 0)
        return result;
    l.silent = l.options.secret_file != NULL && strcmp(l.options.secret_file, "-") == 0;
    if (l.options.hosts != NULL)
        return run_on_hosts(&l.options);
    fill_standard_descriptors();
    if (l.options.ranks == 0)
        l.options.ranks = topology_cpus();
    result = bind_ranks(&l);
    if (result == 0 && l.options.program[0] != NULL)
        result = launch(&l);
    if (l.output != NULL)
        output_close(l.output);
    free_plan(&l);
    return result;
}
