/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti run`: starts a program as several ranks on this host, and stays until the last has ended. The parts are in
 * run.h; this file is the launcher: its arguments, and in which order things are prepared and started.
 */
#include "run_inner.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/settings.h"

#define SECRET_BYTES 32

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
    "the others go on when at least half of the ranks are left with node 0's launcher, or more than half with node "
    "1's.\n"
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
        default:
            return tool_other_option(&tool_run, option, argv, longs);
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

/* ---- the launcher ---- */

static const int forwarded[] = { SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT };

bool run_forwards(int signal_number) {
    for (size_t i = 0; i < sizeof forwarded / sizeof forwarded[0]; i++)
        if (forwarded[i] == signal_number)
            return true;
    return false;
}

bool run_ends(int signal_number) {
    return signal_number == SIGINT || signal_number == SIGTERM || signal_number == SIGHUP || signal_number == SIGQUIT;
}

int run_system_error(const char *what) {
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

static int make_pipes(run_launcher *launcher) {
    int count = 2 * launcher->options.ranks;
    launcher->plan.pipes = calloc((size_t)count, sizeof *launcher->plan.pipes);
    if (launcher->plan.pipes == NULL)
        return run_system_error("no memory for the ranks' pipes");
    for (int i = 0; i < count; i++)
        if (pipe2(launcher->plan.pipes[i], O_CLOEXEC) != 0)
            return run_system_error("cannot make pipes for the ranks' output (raise ulimit -n)");
    return 0;
}

/* A file or pipe goes to rank 0 as it is. A terminal is relayed, because rank 0 is not in its foreground. */
static int prepare_input(run_launcher *launcher) {
    int ends[2];
    launcher->relay = -1;
    launcher->plan.input = 0;
    if (launcher->options.first_rank > 0 || !isatty(0)) /* rank 0 is elsewhere: nobody reads it here */
        return 0;
    if (pipe2(ends, O_CLOEXEC) != 0)
        return run_system_error("cannot make a pipe for the standard input");
    launcher->plan.input = ends[0];
    launcher->relay = ends[1];
    fcntl(launcher->relay, F_SETFL, O_NONBLOCK);
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
static int start_guardian(run_launcher *launcher) {
    int sockets[2];
    size_t bytes = sizeof *launcher->state + (size_t)launcher->options.ranks * sizeof launcher->state->ranks[0];
    void *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    launcher->state = shared != MAP_FAILED ? shared : NULL;
    if (launcher->state == NULL || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0)
        return run_system_error("cannot prepare the guardian process");
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    launcher->guardian = fork();
    if (launcher->guardian < 0)
        return run_system_error("cannot start the guardian process");
    if (launcher->guardian == 0) {
        close(sockets[0]);
        close(launcher->signals);
        if (launcher->relay >= 0)
            close(launcher->relay);
        guardian_main(&launcher->plan, launcher->state, sockets[1]);
    }
    close(sockets[1]);
    launcher->socket = sockets[0];
    for (int i = 0; i < 2 * launcher->options.ranks; i++)
        close(launcher->plan.pipes[i][1]);
    if (launcher->plan.input > 2)
        close(launcher->plan.input);
    return 0;
}

static int start_store(run_launcher *launcher, const char *host) {
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.listen_fd = launcher->plan.store;
    options.trust_network = launcher->agent != NULL; /* the agent has asked whether it may listen there */
    if (tu_auth_available() &&
        launcher->secret.bytes > 0) { /* else the kernel's credentials admit only this user's processes */
        options.secret = launcher->secret.data;
        options.secret_bytes = launcher->secret.bytes;
    }
    if (launcher->plan.store >= 0 && tutti_store_serve(host, 0, &options, &launcher->store) != TUTTI_OK)
        return tool_fail("run: cannot host the store where the ranks meet: %s", tutti_error_message());
    return 0;
}

static int show_binding(const run_options *options, const binding *bindings, int bound, const char *why) {
    for (int rank = 0; bound > 0 && rank < options->ranks; rank++)
        fprintf(stderr, "tutti run: rank %d: %s\n", rank, bindings[rank].text);
    if (bound == 0)
        fprintf(stderr, "tutti run: %s\n", why);
    return 0;
}

static int bind_ranks(run_launcher *launcher) {
    const run_options *options = &launcher->options;
    char why[160] = "";
    binding *bindings = calloc((size_t)options->ranks, sizeof *bindings);
    if (bindings == NULL)
        return run_system_error("no memory for the bindings");
    int bound = topology_bind(options->binding, options->ranks, bindings, why, sizeof why);
    if (bound < 0) {
        free(bindings);
        return tool_fail("run: cannot bind: %s; --bind none does without", why);
    }
    if (options->show_binding)
        show_binding(options, bindings, bound, why);
    launcher->plan.bindings = bound > 0 ? bindings : NULL;
    if (bound == 0)
        free(bindings);
    return 0;
}

/* Gives back what preparing took; descriptors go with the process. */
static void free_plan(run_launcher *launcher) {
    for (int i = 0; i < launcher->plan.own_count; i++)
        free(launcher->plan.own[i]);
    free(launcher->plan.environment);
    free(launcher->plan.pipes);
    free((binding *)launcher->plan.bindings);
    free(launcher->told);
    free(launcher->refills);
    free(launcher->over);
    free(launcher->log_dir);
    tu_secret_wipe(&launcher->secret);
    agent_close(launcher->agent);
    tu_news_close(launcher->news);
    if (launcher->state != NULL)
        munmap(launcher->state,
               sizeof *launcher->state + (size_t)launcher->options.ranks * sizeof launcher->state->ranks[0]);
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
static int meet_others(run_launcher *launcher, const char *cannot, job_variables *job) {
    tu_settings settings;
    if (tu_settings_load(&settings) != TUTTI_OK)
        return tool_fail("run: %s", tutti_error_message());
    agent_options options = { .nodes = launcher->options.nodes,
                              .node = launcher->options.node,
                              .hub = launcher->options.node == 0 && !launcher->silent,
                              .secret = launcher->secret,
                              .trust_network = tu_settings_number(&settings, TU_SETTING_TRUST_NETWORK) != 0,
                              .survive = launcher->options.survive,
                              .quiet = launcher->options.quiet,
                              .ranks = launcher->options.ranks,
                              .cannot = cannot,
                              .deadline = tu_deadline(tu_settings_number(&settings, TU_SETTING_TIMEOUT)),
                              .connect_ns = launcher->silent ? 10 * TU_SECOND : 0, /* it was there before this one */
                              .silence_ns = tu_settings_number(&settings, TU_SETTING_HOST_TIMEOUT),
                              .replaceable = !launcher->silent, /* else whoever started all is lost with the hub */
                              .signals = launcher->signals };
    tu_settings_free(&settings);
    int result = options.silence_ns < 10 * TU_MILLISECOND
                     ? tool_fail("run: TUTTI_HOST_TIMEOUT is too short: give at least 10ms")
                     : parse_meet(launcher->options.meet, &options.meet);
    if (result == 0)
        result = agent_open(&options, &launcher->agent);
    if (result == 0)
        result = agent_meet(launcher->agent, NULL, NULL);
    if (result != 0)
        return result;
    launcher->options.first_rank = agent_first_rank(launcher->agent);
    launcher->plan.store = agent_store_listener(launcher->agent);
    launcher->plan.news = agent_news_descriptor(launcher->agent);
    launcher->plan.page = agent_news(launcher->agent);
    launcher->plan.silence_ns = options.silence_ns;
    launcher->plan.woken = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    *job = (job_variables){ .size = agent_size(launcher->agent),
                            .nodes = launcher->options.nodes,
                            .node = launcher->options.node,
                            .store = agent_store(launcher->agent) };
    job->master = agent_master(launcher->agent, &job->master_port);
    return launcher->plan.woken >= 0 ? 0 : run_system_error("cannot prepare the job");
}

/* On one host ranks see each other's deaths in the memory that they share; not while they open their worlds. With
 * agents there is a page anyway; without --survive the job is stopped, and with --refill somebody else comes. */
static int make_news(run_launcher *launcher) {
    char host[256] = "this host";
    (void)gethostname(host, sizeof host - 1);
    tu_news_plan plan = { .nodes = 1,
                          .ranks = &launcher->options.ranks,
                          .silence_ns = INT64_MAX / 4, /* nobody waits for a beat */
                          .hosts = (const char *const[]){ host } };
    if (tu_news_create(&plan, &launcher->news, &launcher->plan.news) != TUTTI_OK)
        return tool_fail("run: %s", tutti_error_message());
    return 0;
}

/* The store's socket, the secret and what the ranks find in their environment. */
static int prepare(run_launcher *launcher, int missing, char *url, size_t bytes) {
    static const char *const cannot[2] = { "there is no such program", "it cannot be executed" };
    job_variables job = { .size = launcher->options.ranks, .store = url, .master = "127.0.0.1" };
    int result = 0;
    if (launcher->options.secret_file != NULL)
        result = run_read_secret(launcher->options.secret_file, &launcher->secret);
    if (result == 0 && launcher->options.nodes > 0)
        result = meet_others(launcher, missing != 0 ? cannot[missing == NOT_EXECUTABLE] : NULL, &job);
    if (result != 0)
        return result;
    if (launcher->options.nodes == 0) {
        unsigned char secret[SECRET_BYTES];
        if (getrandom(secret, sizeof secret, 0) != sizeof secret ||
            tu_secret_set(&launcher->secret, secret, sizeof secret) != TUTTI_OK)
            return run_system_error("cannot make a secret");
        launcher->plan.store = run_listen_for_store(url, bytes);
        if (launcher->plan.store < 0)
            return run_system_error("cannot prepare the job");
        job.master_port = run_free_port();
        if (launcher->options.survive && launcher->options.refill == 0)
            result = make_news(launcher);
        if (result != 0)
            return result;
    }
    job.secret = launcher->secret.bytes > 0;
    launcher->plan.secret = job.secret ? run_keep_secret(&launcher->secret) : -1;
    launcher->told = calloc((size_t)job.size, sizeof *launcher->told);
    launcher->refills = calloc((size_t)launcher->options.ranks, sizeof *launcher->refills);
    launcher->over = calloc((size_t)launcher->options.ranks, sizeof *launcher->over);
    if ((job.secret && launcher->plan.secret < 0) || launcher->told == NULL || launcher->refills == NULL ||
        launcher->over == NULL || !run_build_environment(&launcher->plan, &job))
        return run_system_error("cannot prepare the job");
    return 0;
}

static int launch(run_launcher *launcher) {
    char path[4096], url[80] = "";
    sigset_t before, ours;
    int missing = run_find_program(launcher->options.program[0], path, sizeof path);
    if (missing != 0 && launcher->options.nodes == 0)
        return missing;
    if (launcher->options.log_dir != NULL && (mkdir(launcher->options.log_dir, 0777) == 0 || errno == EEXIST))
        launcher->log_dir = realpath(launcher->options.log_dir, NULL);
    if (launcher->options.log_dir != NULL && launcher->log_dir == NULL)
        return tool_fail("run: cannot make the folder %s: %s", launcher->options.log_dir, strerror(errno));
    run_raise_limits();
    if (launcher->silent) /* ssh and its like were started to ignore the terminal's signals; the ranks are not */
        for (size_t i = 0; i < sizeof forwarded / sizeof forwarded[0]; i++)
            signal(forwarded[i], SIG_DFL);
    run_block_signals(&before, &ours);
    launcher->plan = (run_plan){ .options = &launcher->options,
                                 .path = path,
                                 .log_dir = launcher->log_dir,
                                 .signals = &before,
                                 .secret = -1,
                                 .store = -1,
                                 .news = -1,
                                 .woken = -1,
                                 .bindings = launcher->plan.bindings };
    launcher->began = time(NULL);
    launcher->signals = signalfd(-1, &ours, SFD_CLOEXEC | SFD_NONBLOCK);
    if (launcher->signals < 0)
        return run_system_error("cannot watch for signals");
    int result = prepare(launcher, missing, url, sizeof url);
    if (result != 0)
        return result;
    if (make_pipes(launcher) || prepare_input(launcher) ||
        (launcher->output =
             output_open(&launcher->options, launcher->plan.pipes, launcher->signals, run_held_up, launcher)) == NULL ||
        start_guardian(launcher))
        return 1;
    if (launcher->plan.secret >= 0)
        close(launcher->plan.secret);
    if (start_store(launcher, url) ||
        (launcher->agent != NULL &&
         agent_start(launcher->agent, launcher->state, launcher->socket, launcher->plan.woken))) {
        close(launcher->socket); /* the guardian kills what it has started */
        waitpid(launcher->guardian, NULL, 0);
        return 1;
    }
    launcher->memory_kills = run_memory_kills(); /* now, when the ranks are starting: it takes a moment */
    bool guarded = run_relay_everything(launcher);
    result = run_finish(launcher, guarded);
    tutti_store_release(launcher->store);
    return result;
}

static int run_main(int argc, char **argv) {
    run_launcher launcher = { .options = { .grace_ns = 2 * TU_SECOND, .node = -1 } };
    int result = parse_arguments(argc, argv, &launcher.options);
    if (result >= 0)
        return result;
    launcher.silent = launcher.options.secret_file != NULL && strcmp(launcher.options.secret_file, "-") == 0;
    if (launcher.options.hosts != NULL)
        return run_on_hosts(&launcher.options);
    fill_standard_descriptors();
    if (launcher.options.ranks == 0)
        launcher.options.ranks = topology_cpus();
    result = bind_ranks(&launcher);
    if (result == 0 && launcher.options.program[0] != NULL)
        result = launch(&launcher);
    if (launcher.output != NULL)
        output_close(launcher.output);
    free_plan(&launcher);
    return result;
}
