/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti run --hosts`: starts one launcher per host by ssh, or whatever --rsh says, and is the hub that holds them
 * together (agent.h), without ranks of its own. What the launchers print comes through ssh; what is to be told of ranks
 * and hosts is told here, once. The job's secret goes to each of them through its standard input, and is on no command
 * line and in no environment.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tutti/store.h>

#include "agent.h"
#include "base/clock.h"
#include "base/settings.h"
#include "run.h"
#include "tool.h"
#include "world/launch.h"

#define SECRET_BYTES 32
#define LEAVE_NS (5 * TU_SECOND) /* for ssh and its like, once the job is over */

typedef struct remote {
    char name[256]; /* as given, user@ too */
    int ranks;      /* 0: not said */
    pid_t pid;      /* of ssh; 0: reaped */
} remote;

typedef struct origin {
    const run_options *options;
    remote *remotes;
    int count;
    int (*pipes)[2];
    int input; /* of the launcher of node 0 */
    char typed[4096];
    size_t typed_bytes, typed_written;
    char secret[2 * SECRET_BYTES + 1];
    agent *agent;
    output *output;
    tutti_store *store;
    bool *told;
    int signals;
} origin;

/* ---- the list of hosts ---- */

static int parse_hosts(origin *this) {
    size_t most = 1;
    for (const char *at = this->options->hosts; *at != 0; at++)
        most += *at == ',';
    this->remotes = calloc(most, sizeof *this->remotes);
    char *list = strdup(this->options->hosts), *rest = list;
    if (this->remotes == NULL || list == NULL)
        return tool_fail("run: no memory for the list of hosts");
    int result = 0;
    for (char *item; result == 0 && (item = strsep(&rest, ",")) != NULL;) {
        remote *remote = &this->remotes[this->count++];
        char *colon = strrchr(item, ':');
        int64_t number = this->options->ranks;
        if (colon != NULL)
            *colon = 0;
        if ((colon != NULL && (tu_parse_integer(colon + 1, &number) || number < 1 || number > 65535)) || item[0] == 0 ||
            item[0] == '-' || strlen(item) >= sizeof remote->name)
            result = tool_usage(&tool_run, "--hosts %s: must be a list like a:4,b:4", this->options->hosts);
        snprintf(remote->name, sizeof remote->name, "%s", item);
        remote->ranks = (int)number;
        for (int i = 0; result == 0 && i < this->count - 1; i++)
            if (strcmp(this->remotes[i].name, item) == 0)
                result = tool_usage(&tool_run, "--hosts %s: %s is there twice", this->options->hosts, item);
    }
    free(list);
    return result;
}

/* ---- starting ---- */

/* Appends a word as the shell reads it. */
static void quote(FILE *to, const char *word) {
    fputc('\'', to);
    for (; *word != 0; word++)
        if (*word == '\'')
            fputs("'\\''", to);
        else
            fputc(*word, to);
    fputs("' ", to);
}

/* Settings go along; what belongs to this process or to another job does not. */
static void put_settings(FILE *to) {
    extern char **environ;
    static const char *const own[] = { "TUTTI_RANK",  "TUTTI_SIZE", "TUTTI_LOCAL",  "TUTTI_NODE",
                                       "TUTTI_STORE", "TUTTI_NEWS", "TUTTI_REFILL", "TUTTI_SECRET" };
    for (char **at = environ; *at != NULL; at++) {
        bool goes = strncmp(*at, "TUTTI_", 6) == 0;
        for (size_t i = 0; goes && i < sizeof own / sizeof *own; i++)
            goes = strncmp(*at, own[i], strlen(own[i])) != 0;
        if (goes)
            quote(to, *at);
    }
}

/* This host's address as that one reaches it. A name that only ssh knows cannot be asked for: then our own name. */
static void own_address(const remote *remote, char *address, size_t bytes) {
    const char *at = strrchr(remote->name, '@'), *interface = getenv("TUTTI_INTERFACE");
    if (tu_address_choose(at != NULL ? at + 1 : remote->name, interface != NULL ? interface : "", address, bytes) ==
        TUTTI_OK)
        return;
    if (gethostname(address, bytes) != 0)
        snprintf(address, bytes, "localhost");
    address[bytes - 1] = 0;
}

/* What the shell of the other host is to run. */
static char *command_line(const origin *this, int node) {
    const run_options *options = this->options;
    char *text = NULL, folder[4096], self[4096], address[256];
    size_t bytes;
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    FILE *to = length > 0 && getcwd(folder, sizeof folder) != NULL ? open_memstream(&text, &bytes) : NULL;
    if (to == NULL)
        return NULL;
    self[length] = 0;
    own_address(&this->remotes[node], address, sizeof address);
    fputs("cd ", to);
    quote(to, folder);
    fputs("&& exec env ", to);
    put_settings(to);
    quote(to, self);
    fprintf(to,
            strchr(address, ':') != NULL ? "run --nodes %d --node %d --meet '[%s]:%d' --secret-file - --grace %lldns "
                                         : "run --nodes %d --node %d --meet '%s:%d' --secret-file - --grace %lldns ",
            this->count, node, address, agent_port(this->agent), (long long)options->grace_ns);
    if (this->remotes[node].ranks > 0)
        fprintf(to, "-n %d ", this->remotes[node].ranks);
    static const char *const policies[] = { [BIND_CORE] = "core", [BIND_NUMA] = "numa", [BIND_NONE] = "none" };
    if ((size_t)options->binding < sizeof policies / sizeof *policies && policies[options->binding] != NULL)
        fprintf(to, "--bind %s ", policies[options->binding]);
    fprintf(to, "%s%s%s", options->show_binding ? "--show-binding " : "", options->quiet ? "-q " : "",
            options->survive ? "--survive " : "");
    if (options->log_dir != NULL) {
        fputs("--log-dir ", to);
        quote(to, options->log_dir);
    }
    fputs("-- ", to);
    for (char **word = options->program; *word != NULL; word++)
        quote(to, *word);
    fclose(to);
    return text;
}

/* In the child: becomes ssh, or the shell that runs --rsh with the host and the command line as its last arguments. */
_Noreturn static void become_rsh(const origin *this, const char *host, const char *line, const sigset_t *before) {
    static const int terminal[] = { SIGINT, SIGQUIT, SIGTSTP, SIGHUP }; /* the hub passes them on, once */
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    for (size_t i = 0; i < sizeof terminal / sizeof *terminal; i++)
        signal(terminal[i], SIG_IGN);
    sigprocmask(SIG_SETMASK, before, NULL);
    if (this->options->rsh != NULL) {
        char *script = NULL;
        if (asprintf(&script, "exec %s \"$@\"", this->options->rsh) > 0)
            execl("/bin/sh", "sh", "-c", script, "rsh", host, line, (char *)NULL);
    } else {
        execlp("ssh", "ssh", "-o", "BatchMode=yes", "--", host, line, (char *)NULL);
    }
    fprintf(stderr, "tutti run: cannot start %s: %s\n", this->options->rsh != NULL ? "a shell" : "ssh",
            strerror(errno));
    _exit(127);
}

/* Writes the secret, which a new pipe takes whole. Who has ended already takes nothing: its own words and its status,
 * which tell more, come where the launchers meet. */
static bool hand_over(const origin *this, int descriptor) {
    char line[sizeof this->secret + 1];
    int length = snprintf(line, sizeof line, "%s\n", this->secret);
    bool whole = write(descriptor, line, (size_t)length) == length || errno == EPIPE;
    explicit_bzero(line, sizeof line);
    return whole;
}

static int start_remote(origin *this, int node, const sigset_t *before) {
    remote *remote = &this->remotes[node];
    int input[2];
    char *line = command_line(this, node);
    if (line == NULL || pipe2(input, O_CLOEXEC) != 0 || pipe2(this->pipes[2 * node], O_CLOEXEC) != 0 ||
        pipe2(this->pipes[2 * node + 1], O_CLOEXEC) != 0)
        return tool_fail("run: cannot prepare the launcher of %s: %s", remote->name, strerror(errno));
    remote->pid = fork();
    if (remote->pid == 0) {
        if (dup2(input[0], 0) < 0 || dup2(this->pipes[2 * node][1], 1) < 0 || dup2(this->pipes[2 * node + 1][1], 2) < 0)
            _exit(127);
        become_rsh(this, remote->name, line, before);
    }
    free(line);
    close(input[0]);
    close(this->pipes[2 * node][1]);
    close(this->pipes[2 * node + 1][1]);
    if (remote->pid < 0 || !hand_over(this, input[1]))
        return tool_fail("run: cannot start the launcher of %s: %s", remote->name, strerror(errno));
    if (node == 0) {
        this->input = input[1];
        fcntl(this->input, F_SETFL, O_NONBLOCK);
    } else {
        close(input[1]);
    }
    return 0;
}

/* ---- meeting ---- */

/* Reaps what has ended; one of those that ended, or NULL. */
static const remote *reap(origin *this, int *status) {
    const remote *ended = NULL;
    for (int node = 0; node < this->count; node++) {
        remote *remote = &this->remotes[node];
        if (remote->pid > 0 && waitpid(remote->pid, status, WNOHANG) == remote->pid) {
            remote->pid = 0;
            ended = remote;
            break;
        }
    }
    return ended;
}

static bool hopeless(void *argument) {
    origin *this = argument;
    int status;
    output_drain(this->output, -1);
    const remote *ended = reap(this, &status);
    if (ended == NULL)
        return false;
    output_drain(this->output, -1);
    char text[128];
    tool_wait_text(status, text, sizeof text);
    fprintf(stderr, "tutti run: the launcher of host %s did not come: %s %s\n", ended->name,
            this->options->rsh != NULL ? this->options->rsh : "ssh", text);
    return true;
}

/* ---- running ---- */

static void end_input(origin *this) {
    if (this->input >= 0)
        close(this->input);
    this->input = -1;
}

static void relay_input(origin *this) {
    if (this->typed_bytes == 0) {
        ssize_t count = read(0, this->typed, sizeof this->typed);
        if (count <= 0 && !(count < 0 && (errno == EINTR || errno == EAGAIN))) {
            end_input(this);
            return;
        }
        this->typed_bytes = count > 0 ? (size_t)count : 0;
        this->typed_written = 0;
    }
    ssize_t wrote = write(this->input, this->typed + this->typed_written, this->typed_bytes - this->typed_written);
    if (wrote < 0 && errno != EAGAIN && errno != EINTR) {
        end_input(this);
        return;
    }
    this->typed_written += wrote > 0 ? (size_t)wrote : 0;
    if (this->typed_written == this->typed_bytes)
        this->typed_bytes = 0;
}

static void take_signals(origin *this) {
    struct signalfd_siginfo signal;
    while (read(this->signals, &signal, sizeof signal) == sizeof signal)
        if (signal.ssi_signo != SIGCHLD)
            agent_signal(this->agent, (int)signal.ssi_signo);
}

static bool held_up(void *argument) {
    take_signals(argument);
    return false;
}

static void tell_news(origin *this) {
    char line[640];
    bool colour = tool_colour(2);
    for (int rank; agent_next(this->agent, line, sizeof line, &rank);) {
        if (rank >= 0)
            this->told[rank] = true;
        output_drain(this->output, -1);
        line[strcspn(line, "\n")] = 0;
        output_tell(this->output, "%s%s%s\n", colour ? "\033[1;31m" : "", line, colour ? "\033[0m" : "");
    }
}

static int relay_everything(origin *this) {
    int status, ended;
    while (!agent_finished(this->agent, &status)) {
        struct pollfd polled[3 + 2 * this->count];
        bool full = this->typed_bytes > 0;
        bool reads = this->input >= 0 && (!isatty(0) || run_may_read_terminal());
        polled[0] = (struct pollfd){ .fd = this->signals, .events = POLLIN };
        polled[1] = (struct pollfd){ .fd = agent_events(this->agent), .events = POLLIN };
        polled[2] = full ? (struct pollfd){ .fd = this->input, .events = POLLOUT }
                         : (struct pollfd){ .fd = reads ? 0 : -1, .events = POLLIN };
        int streams = output_poll(this->output, polled + 3);
        poll(polled, (nfds_t)(3 + streams), 500);
        take_signals(this);
        output_read(this->output, polled + 3, streams);
        if (polled[2].revents != 0)
            relay_input(this);
        tell_news(this);
        while (reap(this, &ended) != NULL)
            continue; /* whether its host is lost, its link tells */
    }
    tell_news(this);
    return status;
}

/* The job is over: ssh and its like end by themselves, with the last of the output, or are ended. */
static void wait_for_remotes(origin *this) {
    int64_t deadline = tu_deadline(LEAVE_NS);
    bool any = true;
    int status;
    end_input(this);
    while (any) {
        while (reap(this, &status) != NULL)
            continue;
        any = false;
        bool late = tu_clock_now() >= deadline;
        for (int node = 0; node < this->count; node++) {
            any |= this->remotes[node].pid > 0;
            if (this->remotes[node].pid > 0 && late)
                kill(this->remotes[node].pid, SIGKILL);
        }
        struct pollfd polled[2 * this->count + 1];
        polled[0] = (struct pollfd){ .fd = this->signals, .events = POLLIN };
        int streams = output_poll(this->output, polled + 1);
        if (any)
            poll(polled, (nfds_t)(1 + streams), 100);
        struct signalfd_siginfo ignored;
        while (read(this->signals, &ignored, sizeof ignored) == sizeof ignored)
            continue;
        output_read(this->output, polled + 1, streams);
    }
    output_drain(this->output, -1);
}

/* Starting them failed half-way. */
static void kill_remotes(origin *this) {
    for (int node = 0; node < this->count; node++)
        if (this->remotes[node].pid > 0) {
            kill(this->remotes[node].pid, SIGKILL);
            waitpid(this->remotes[node].pid, NULL, 0);
        }
}

static int prepare(origin *this, sigset_t *before) {
    tu_settings settings;
    unsigned char random[SECRET_BYTES];
    sigset_t ours;
    if (tu_settings_load(&settings) != TUTTI_OK || getrandom(random, sizeof random, 0) != sizeof random)
        return tool_fail("run: %s", tutti_error_message());
    for (int i = 0; i < SECRET_BYTES; i++)
        snprintf(this->secret + 2 * i, 3, "%02x", random[i]);
    run_block_signals(before, &ours);
    this->signals = signalfd(-1, &ours, SFD_CLOEXEC | SFD_NONBLOCK);
    agent_options options = { .nodes = this->count,
                              .node = -1,
                              .hub = true,
                              .survive = this->options->survive,
                              .quiet = this->options->quiet,
                              .deadline = tu_deadline(tu_settings_number(&settings, TU_SETTING_TIMEOUT)),
                              .silence_ns = tu_settings_number(&settings, TU_SETTING_HOST_TIMEOUT),
                              .signals = this->signals };
    tu_settings_free(&settings);
    if (this->signals < 0 || tu_address_set(&options.meet, "", 0) != TUTTI_OK ||
        tu_secret_set(&options.secret, this->secret, strlen(this->secret)) != TUTTI_OK)
        return tool_fail("run: cannot prepare the job: %s", tutti_error_message());
    int result = agent_open(&options, &this->agent);
    tu_secret_wipe(&options.secret);
    this->pipes = calloc((size_t)this->count * 2, sizeof *this->pipes);
    if (result == 0 && this->pipes == NULL)
        result = tool_fail("run: no memory for %d hosts", this->count);
    return result;
}

static int serve_store(origin *this) {
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    const tu_secret *secret = agent_secret(this->agent);
    options.listen_fd = agent_store_listener(this->agent);
    options.secret = secret->data;
    options.secret_bytes = secret->bytes;
    if (tutti_store_serve("", 0, &options, &this->store) != TUTTI_OK)
        return tool_fail("run: cannot host the store where the ranks meet: %s", tutti_error_message());
    return 0;
}

static int run(origin *this) {
    sigset_t before;
    int result = prepare(this, &before);
    for (int node = 0; node < this->count && result == 0; node++)
        result = start_remote(this, node, &before);
    run_options plain = { .ranks = this->count, .quiet = true };
    if (result == 0 && (this->output = output_open(&plain, this->pipes, this->signals, held_up, this)) == NULL)
        result = 1;
    if (result == 0)
        result = agent_meet(this->agent, hopeless, this);
    if (result == 0)
        result = serve_store(this);
    if (result == 0 && (this->told = calloc((size_t)agent_size(this->agent), sizeof *this->told)) == NULL)
        result = tool_fail("run: no memory for %d ranks", agent_size(this->agent));
    if (result == 0)
        result = agent_start(this->agent, NULL, -1, -1);
    if (result == 0)
        result = relay_everything(this);
    return result;
}

int run_on_hosts(const run_options *options) {
    origin this = { .options = options, .input = -1 };
    int result = parse_hosts(&this);
    if (result == 0) {
        result = run(&this);
        if (this.output != NULL)
            wait_for_remotes(&this);
        else
            kill_remotes(&this);
    }
    if (this.told != NULL && !options->quiet)
        run_tell_others_of_hosts(this.output, this.agent, this.told);
    if (this.output != NULL)
        output_close(this.output);
    tutti_store_release(this.store);
    agent_close(this.agent);
    explicit_bzero(this.secret, sizeof this.secret);
    free(this.told);
    free(this.pipes);
    free(this.remotes);
    return result;
}
