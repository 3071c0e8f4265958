/* SPDX-License-Identifier: Apache-2.0
 *
 * What `tutti run` gives to its ranks: the program, environment, limits, the store's socket and the secret.
 */
#include "machine.h"
#include "run_inner.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define WANTED_FILES 65536 /* descriptors per rank, where the hard limit allows it */

/* ---- the program ---- */

/* 0, NOT_FOUND or NOT_EXECUTABLE. */
static int examine(const char *path) {
    struct stat file;
    if (stat(path, &file) != 0)
        return NOT_FOUND;
    return S_ISDIR(file.st_mode) || access(path, X_OK) != 0 ? NOT_EXECUTABLE : 0;
}

static void tell_why_not(const char *name, const char *path) {
    struct stat file;
    const char *ending = strrchr(name, '.');
    if (stat(path, &file) == 0 && S_ISDIR(file.st_mode))
        fprintf(stderr, "tutti run: %s cannot be executed: it is a folder\n", name);
    else if (ending != NULL && (strcmp(ending, ".c") == 0 || strcmp(ending, ".cc") == 0 || strcmp(ending, ".cpp") == 0))
        fprintf(stderr,
                "tutti run: %s cannot be executed: it is source code; build it first, and run what you get: cc %s "
                "$(pkg-config --cflags --libs tutti) -o %.*s\n",
                name, name, (int)(ending - name), name);
    else if (ending != NULL && strcmp(ending, ".py") == 0)
        fprintf(stderr, "tutti run: %s cannot be executed: say tutti run python3 %s\n", name, name);
    else
        fprintf(stderr, "tutti run: %s cannot be executed: you may not (chmod +x %s)\n", name, name);
}

int run_find_program(const char *name, char *path, size_t bytes) {
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
        int here = result == NOT_FOUND ? examine(name) : NOT_FOUND;
        if (here == NOT_EXECUTABLE) { /* a file of this folder, most likely meant, that is none */
            result = NOT_EXECUTABLE;
            snprintf(path, bytes, "%s", name);
        } else if (result == NOT_FOUND) {
            fprintf(stderr, "tutti run: there is no program %s in the folders of PATH%s%s\n", name,
                    here == 0 ? "; for the one in this folder say ./" : "", here == 0 ? name : "");
        }
    }
    if (result == NOT_EXECUTABLE)
        tell_why_not(name, path);
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

/* Devices that ranks may see. */
static int visible_gpus(void) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    if (list == NULL)
        return machine_gpus();
    int count = list[0] != '\0';
    for (; *list != '\0'; list++)
        count += *list == ',';
    return count;
}

static bool mps_runs(void) {
    const char *folder = getenv("CUDA_MPS_PIPE_DIRECTORY");
    char path[4096];
    snprintf(path, sizeof path, "%s/control", folder != NULL ? folder : "/tmp/nvidia-mps");
    return access(path, F_OK) == 0;
}

/* Kernels of ranks that wait for each other must all be on the GPU at once. Under MPS the products of one rank may take
 * all of it, unless each rank has its share. */
static bool add_mps_share(run_plan *plan, size_t *used) {
    int ranks = plan->options->ranks, gpus = visible_gpus();
    if (gpus == 0 || ranks <= gpus || getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") != NULL || !mps_runs())
        return true;
    int beside = (ranks + gpus - 1) / gpus;
    return add_variable(plan, used, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=%d", beside < 100 ? 100 / beside : 1);
}

bool run_build_environment(run_plan *plan, const job_variables *job) {
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
                   add_variable(plan, &used, "TUTTI_NODES=%d", job->nodes);
    if (complete && plan->news >= 0)
        complete = add_variable(plan, &used, "TUTTI_NEWS_FD=%d", RUN_NEWS_FD);
    if (complete && plan->log_dir != NULL && getenv("TUTTI_TRACE_DIR") == NULL)
        complete = add_variable(plan, &used, "TUTTI_TRACE_DIR=%s", plan->log_dir);
    return complete && add_mps_share(plan, &used);
}

void run_raise_limits(void) {
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

int run_listen_for_store(char *url, size_t bytes) {
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

int run_keep_secret(const tu_secret *secret) {
    int descriptor = memfd_create("tutti-secret", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (descriptor < 0 || write(descriptor, secret->data, secret->bytes) != (ssize_t)secret->bytes ||
        fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) != 0)
        return -1;
    return descriptor;
}

/* ---- the secret ---- */

int run_read_secret(const char *file_name, tu_secret *secret) {
    char text[256];
    size_t used = 0;
    bool standard = strcmp(file_name, "-") == 0;
    int file = standard ? 0 : open(file_name, O_RDONLY | O_CLOEXEC);
    struct stat about;
    if (file < 0 || fstat(file, &about) != 0)
        return tool_fail("run: cannot read the secret in %s: %s", file_name, strerror(errno));
    if (!standard && S_ISREG(about.st_mode) && (about.st_mode & 077) != 0)
        return tool_fail("run: others may read the secret in %s; chmod 600 %s", file_name, file_name);
    /* Byte by byte: what follows is rank 0's. */
    while (used < sizeof text && read(file, text + used, 1) == 1 && !(standard && text[used] == '\n'))
        used++;
    if (!standard)
        close(file);
    while (used > 0 && strchr(" \r\n", text[used - 1]) != NULL)
        used--;
    int result = tu_secret_set(secret, text, used) != TUTTI_OK
                     ? tool_fail("run: the secret in %s does not do: %s", file_name, tutti_error_message())
                     : 0;
    explicit_bzero(text, sizeof text);
    return result;
}
