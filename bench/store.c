/* SPDX-License-Identifier: Apache-2.0
 *
 * Stores side by side: Tutti's server and PyTorch's two (event loop and poll), each with Tutti's clients and with
 * PyTorch's, so that servers are compared with the same client and clients with the same server. 1, 8 and 64 clients,
 * each a process, work at once; rounds alternate.
 *
 *     bench/store [rounds] [seconds per measurement]          TEST_PYTHON: a Python that has torch
 *
 * add is one round trip; get of a key that is there is one for Tutti's client and two for PyTorch's (wait, then get);
 * set has no reply: 64 of them, then one question. Tutti's server is also measured over a Unix socket, which PyTorch
 * has not: with Tutti's clients only.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <tutti/store.h>
#include <unistd.h>

enum {
    SERVERS = 4,
    MOST_CLIENTS = 64,
    MOST_ROUNDS = 101,
    BATCH = 64,
    MOST_TIMES = 1 << 20
};
static const char *const server_names[SERVERS] = { "Tutti", "PyTorch (event loop)", "PyTorch (poll)",
                                                   "Tutti, Unix socket" };
static const char *const operations[] = { "add", "get", "set" };

typedef struct result {
    double per_second, p50, p99; /* times in ns, per call (a batch for set) */
} result;

_Noreturn static void die(const char *what) {
    fprintf(stderr, "bench/store: %s: %s\n", what, tutti_error_message()[0] ? tutti_error_message() : strerror(errno));
    exit(1);
}

static void must(tutti_status status, const char *what) {
    if (status != TUTTI_OK)
        die(what);
}

static double now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static int by_value(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static char unix_host[64];

static const char *host_of(int server) {
    return server == SERVERS - 1 ? unix_host : "127.0.0.1";
}

/* Whether these clients (0 Tutti's, 1 PyTorch's) can be measured with that server. */
static bool possible(int server, int kind, bool peers) {
    if (kind == 1)
        return peers && server < SERVERS - 1;
    return peers || server == 0 || server == SERVERS - 1;
}

/* ---- Tutti's clients ---- */

typedef struct command {
    int server;
    char operation[8];
    double seconds;
} command;

static double times[MOST_TIMES];

static void call(tutti_store *store, const char *operation, const char *key) {
    int64_t number;
    void *value;
    if (operation[0] == 'a') {
        must(tutti_store_add(store, key, 1, &number), "add");
    } else if (operation[0] == 'g') {
        must(tutti_store_get(store, "value", 0, &value, NULL), "get");
        tutti_free(value);
    } else {
        for (int i = 0; i < BATCH; i++)
            must(tutti_store_set(store, key, "0123456789abcdef", 16), "set");
        must(tutti_store_num_keys(store, &number), "num_keys");
    }
}

static result work(tutti_store *store, const command *command, int number) {
    char key[32];
    snprintf(key, sizeof key, command->operation[0] == 's' ? "client-%d-set" : "client-%d", number);
    size_t count = 0;
    double start = now_ns(), now = start, end = start + command->seconds * 1e9;
    while (now < end && count < MOST_TIMES) {
        call(store, command->operation, key);
        double before = now;
        now = now_ns();
        times[count++] = now - before;
    }
    qsort(times, count, sizeof *times, by_value);
    double each = command->operation[0] == 's' ? BATCH : 1;
    return (result){ (double)count * each * 1e9 / (now - start), times[count / 2], times[count * 99 / 100] };
}

static void client(int channel, int number, const int ports[SERVERS]) {
    tutti_store *stores[SERVERS];
    for (int i = 0; i < SERVERS; i++)
        must(tutti_store_open_tcp(host_of(i), ports[i], NULL, &stores[i]), "connecting");
    command command;
    if (write(channel, "r", 1) != 1)
        _exit(1);
    while (read(channel, &command, sizeof command) == sizeof command) {
        result result = work(stores[command.server], &command, number);
        if (write(channel, &result, sizeof result) != sizeof result)
            _exit(1);
    }
    _exit(0);
}

typedef struct crew {
    int count;
    int channel[MOST_CLIENTS];
    pid_t pid[MOST_CLIENTS];
} crew;

static void crew_start(crew *crew, int count, const int ports[SERVERS]) {
    char ready;
    crew->count = count;
    for (int i = 0; i < count; i++) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0 || (crew->pid[i] = fork()) < 0)
            die("starting a client");
        if (crew->pid[i] == 0) {
            for (int j = 0; j < i; j++)
                close(crew->channel[j]);
            close(pair[0]);
            client(pair[1], i, ports);
        }
        close(pair[1]);
        crew->channel[i] = pair[0];
    }
    for (int i = 0; i < count; i++) {
        if (read(crew->channel[i], &ready, 1) != 1)
            die("a client did not connect");
    }
}

static result crew_run(crew *crew, const command *command) {
    result sum = { 0 }, part;
    double middles[MOST_CLIENTS];
    for (int i = 0; i < crew->count; i++) {
        if (write(crew->channel[i], command, sizeof *command) != sizeof *command)
            die("commanding a client");
    }
    for (int i = 0; i < crew->count; i++) {
        if (read(crew->channel[i], &part, sizeof part) != sizeof part)
            die("a client ended");
        sum.per_second += part.per_second;
        sum.p99 = fmax(sum.p99, part.p99);
        middles[i] = part.p50;
    }
    qsort(middles, (size_t)crew->count, sizeof *middles, by_value);
    sum.p50 = middles[crew->count / 2];
    return sum;
}

static void crew_end(crew *crew) {
    for (int i = 0; i < crew->count; i++)
        close(crew->channel[i]);
    for (int i = 0; i < crew->count; i++)
        waitpid(crew->pid[i], NULL, 0);
}

/* ---- PyTorch's part, in Python ---- */

typedef struct python {
    pid_t pid;
    FILE *in, *out; /* its standard input and output */
} python;

static void python_start(python *python, const char *program, const char *arguments) {
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0 || (python->pid = fork()) < 0)
        die("starting Python");
    if (python->pid == 0) {
        char line[512];
        dup2(in[0], 0);
        dup2(out[1], 1);
        snprintf(line, sizeof line, "exec '%s' '%s/bench/store_peer.py' %s 2>/dev/null", program, TUTTI_SOURCE,
                 arguments);
        execl("/bin/sh", "sh", "-c", line, NULL);
        _exit(127);
    }
    close(in[0]);
    close(out[1]);
    python->in = fdopen(in[1], "w");
    python->out = fdopen(out[0], "r");
}

static bool python_read(python *python, char *line, size_t bytes) {
    return fgets(line, (int)bytes, python->out) != NULL;
}

static void python_end(python *python) {
    fclose(python->in);
    fclose(python->out);
    waitpid(python->pid, NULL, 0);
}

static result python_run(python *python, const command *command) {
    result result;
    char line[256];
    fprintf(python->in, "%d %s %g\n", command->server, command->operation, command->seconds);
    fflush(python->in);
    if (!python_read(python, line, sizeof line) ||
        sscanf(line, "%lf %lf %lf", &result.per_second, &result.p50, &result.p99) != 3)
        die("PyTorch's clients ended");
    return result;
}

static const char *find_python(void) {
    const char *candidates[] = { getenv("TEST_PYTHON"), "python3" };
    for (int i = 0; i < 2; i++) {
        char line[512];
        if (candidates[i] == NULL)
            continue;
        snprintf(line, sizeof line, "'%s' -c 'import torch.distributed' 2>/dev/null", candidates[i]);
        if (system(line) == 0)
            return candidates[i];
    }
    return NULL;
}

/* ---- Tutti's server, in a process of its own ---- */

static pid_t serve(int *port) {
    int out[2];
    if (pipe2(out, O_CLOEXEC) != 0)
        die("pipe");
    pid_t pid = fork();
    if (pid == 0) {
        tutti_store *server, *local;
        must(tutti_store_serve("localhost", 0, NULL, &server), "serving");
        must(tutti_store_serve(unix_host, 0, NULL, &local), "serving");
        int mine = tutti_store_port(server);
        if (write(out[1], &mine, sizeof mine) != sizeof mine)
            _exit(1);
        for (;;)
            pause();
    }
    if (read(out[0], port, sizeof *port) != sizeof *port)
        die("Tutti's server did not start");
    close(out[0]);
    close(out[1]);
    return pid;
}

/* ---- the table ---- */

typedef struct series {
    double per_second[MOST_ROUNDS], p50[MOST_ROUNDS], p99[MOST_ROUNDS];
} series;

static double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, by_value);
    return values[count / 2];
}

static series all[SERVERS][2];

static void print_rows(const char *operation, int clients, int rounds, bool peers) {
    for (int kind = 0; kind < (peers ? 2 : 1); kind++) {
        double mine = 0, best = 0;
        for (int server = 0; server < SERVERS; server++) {
            if (!possible(server, kind, peers))
                continue;
            series *series = &all[server][kind];
            double middle = median(series->per_second, rounds);
            if (server == 0)
                mine = middle;
            else if (server < SERVERS - 1)
                best = fmax(best, middle);
            printf("%-4s %7d  %-8s %-21s %10.0f  %9.0f..%-9.0f %9.1f %9.1f\n", operation, clients,
                   kind == 0 ? "Tutti" : "PyTorch", server_names[server], middle, series->per_second[0],
                   series->per_second[rounds - 1], median(series->p50, rounds) / 1e3,
                   median(series->p99, rounds) / 1e3);
        }
        if (peers)
            printf("%-4s %7d  %-8s server: Tutti's time is %.2f of the best of PyTorch's\n", operation, clients,
                   kind == 0 ? "Tutti" : "PyTorch", best / mine);
    }
    if (peers)
        for (int server = 0; server < SERVERS - 1; server++) /* sorted by now: the middle is the median */
            printf("%-4s %7d  client, with the server of %s: Tutti's time is %.2f of PyTorch's\n", operation, clients,
                   server_names[server], all[server][1].per_second[rounds / 2] / all[server][0].per_second[rounds / 2]);
    fflush(stdout);
}

static void measure(int clients, int rounds, double seconds, const int ports[SERVERS], const char *program) {
    crew crew;
    python python;
    bool peers = program != NULL;
    crew_start(&crew, clients, ports);
    if (peers) {
        char arguments[128], line[64];
        snprintf(arguments, sizeof arguments, "clients %d %d %d %d", clients, ports[0], ports[1], ports[2]);
        python_start(&python, program, arguments);
        if (!python_read(&python, line, sizeof line))
            die("PyTorch's clients did not start");
    }
    for (size_t operation = 0; operation < sizeof operations / sizeof *operations; operation++) {
        for (int round = 0; round < rounds; round++) {
            for (int server = 0; server < SERVERS; server++) {
                for (int kind = 0; kind < 2; kind++) {
                    if (!possible(server, kind, peers))
                        continue;
                    command command = { .server = server, .seconds = seconds };
                    strcpy(command.operation, operations[operation]);
                    result result = kind == 0 ? crew_run(&crew, &command) : python_run(&python, &command);
                    all[server][kind].per_second[round] = result.per_second;
                    all[server][kind].p50[round] = result.p50;
                    all[server][kind].p99[round] = result.p99;
                }
            }
        }
        print_rows(operations[operation], clients, rounds, peers);
    }
    if (peers)
        python_end(&python);
    crew_end(&crew);
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 7, ports[SERVERS];
    double seconds = argc > 2 ? atof(argv[2]) : 0.2;
    if (rounds < 1 || rounds > MOST_ROUNDS || !(seconds > 0)) {
        fprintf(stderr, "usage: bench/store [rounds, 1 to %d] [seconds per measurement]\n", MOST_ROUNDS);
        return 2;
    }
    const char *program = find_python();
    python servers = { 0 };
    char line[64];
    snprintf(unix_host, sizeof unix_host, "unix:@tutti-bench-store-%d", (int)getpid());
    pid_t server = serve(&ports[0]);
    ports[1] = ports[2] = ports[3] = ports[0];
    if (program != NULL) {
        python_start(&servers, program, "servers");
        if (!python_read(&servers, line, sizeof line) || sscanf(line, "%d %d", &ports[1], &ports[2]) != 2)
            die("PyTorch's servers did not start");
    } else {
        printf("no Python with torch here (TEST_PYTHON names one): Tutti alone\n");
    }
    for (int i = 0; i < SERVERS; i++) {
        tutti_store *store;
        must(tutti_store_open_tcp(host_of(i), ports[i], NULL, &store), "connecting");
        must(tutti_store_set(store, "value", "0123456789abcdef", 16), "set");
        tutti_store_release(store);
    }
    printf("%d rounds of %g s each, alternating; medians; times in microseconds per call (set: per %d sets and a "
           "question)\n",
           rounds, seconds, BATCH);
    printf("%-4s %7s  %-8s %-21s %10s  %20s %9s %9s\n", "op", "clients", "client", "server", "op/s", "min..max", "p50",
           "p99");
    static const int counts[] = { 1, 8, 64 };
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        measure(counts[i], rounds, seconds, ports, program);
    if (program != NULL)
        python_end(&servers);
    kill(server, SIGKILL);
    waitpid(server, NULL, 0);
    return 0;
}
