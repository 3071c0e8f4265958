/* SPDX-License-Identifier: Apache-2.0
 *
 * Launch environments. In this order: tutti_spawn, tutti run, torchrun, Open MPI, Hydra (MPICH, Intel MPI), Slurm. The
 * first complete set of variables wins; when there is none, the first incomplete one is an error that names the
 * variable, and with nothing at all the world has one rank. A value that contradicts the others is an error wherever it
 * is.
 *
 * Complete means rank, size and a meeting place. mpirun and srun give none: on one host rank 0 then serves a store on
 * an abstract Unix socket whose name is made of the user and the job, and kernel credentials keep others out; across
 * hosts MASTER_ADDR and MASTER_PORT, or TUTTI_STORE, must say where.
 */
#include "world/launch.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"

/* ---- reading variables ---- */

static const char *text_of(const char *name) {
    const char *text = secure_getenv(name);
    return text != NULL && text[0] != 0 ? text : NULL;
}

/* A number that must lie in [least, most]; -1 when the variable is not set. */
static tutti_status number_of(const char *name, int64_t least, int64_t most, int *number) {
    const char *text = text_of(name);
    *number = -1;
    if (text == NULL)
        return TUTTI_OK;
    int64_t value;
    if (tu_parse_integer(text, &value) != TUTTI_OK)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s is \"%s\", which is no number", name, text);
    if (value < least || value > most)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s is %lld; it must be %lld to %lld", name, (long long)value,
                        (long long)least, (long long)most);
    *number = (int)value;
    return TUTTI_OK;
}

typedef struct names {
    const char *launcher;
    const char *rank, *size;
    const char *local_rank, *local_size; /* NULL: has none */
} names;

typedef enum verdict {
    ABSENT,
    COMPLETE,
    INCOMPLETE,
    CONTRADICTORY
} verdict;

typedef struct ranks {
    int rank, size, local_rank, local_size; /* local ones -1 when not said */
} ranks;

static verdict incomplete(const names *names, const char *missing, const char *given) {
    tu_error(TUTTI_ERROR_ARGUMENT, "the environment of %s is incomplete: %s is set, %s is not", names->launcher, given,
             missing);
    return INCOMPLETE;
}

/* Rank and size of one launcher. Both must be there, and fit each other. */
static verdict read_ranks(const names *names, ranks *found) {
    *found = (ranks){ -1, -1, -1, -1 };
    if (number_of(names->rank, 0, INT32_MAX - 1, &found->rank) != TUTTI_OK ||
        number_of(names->size, 1, INT32_MAX, &found->size) != TUTTI_OK)
        return CONTRADICTORY;
    if (found->rank < 0 && found->size < 0)
        return ABSENT;
    if (found->rank < 0)
        return incomplete(names, names->rank, names->size);
    if (found->size < 0)
        return incomplete(names, names->size, names->rank);
    if (found->rank >= found->size) {
        tu_error(TUTTI_ERROR_ARGUMENT, "%s is %d, but %s is %d: ranks are 0 to %d", names->rank, found->rank,
                 names->size, found->size, found->size - 1);
        return CONTRADICTORY;
    }
    if (names->local_rank != NULL && (number_of(names->local_rank, 0, INT32_MAX - 1, &found->local_rank) != TUTTI_OK ||
                                      number_of(names->local_size, 1, INT32_MAX, &found->local_size) != TUTTI_OK))
        return CONTRADICTORY;
    if (found->local_size > found->size || (found->local_size > 0 && found->local_rank >= found->local_size)) {
        tu_error(TUTTI_ERROR_ARGUMENT, "%s is %d and %s is %d, which does not fit %s, %d", names->local_rank,
                 found->local_rank, names->local_size, found->local_size, names->size, found->size);
        return CONTRADICTORY;
    }
    return COMPLETE;
}

static void take(tu_launch *launch, const names *names, const ranks *found) {
    launch->launcher = names->launcher;
    launch->rank = found->rank;
    launch->size = found->size;
}

/* MASTER_ADDR and MASTER_PORT as an address that rank 0 serves. */
static verdict read_master(const names *names, bool required, tu_launch *launch) {
    const char *host = text_of("MASTER_ADDR");
    int port;
    if (number_of("MASTER_PORT", 1, 65535, &port) != TUTTI_OK)
        return CONTRADICTORY;
    if (host == NULL || port < 0) {
        if (!required && host == NULL && port < 0)
            return ABSENT;
        const char *missing = host == NULL ? "MASTER_ADDR" : "MASTER_PORT";
        tu_error(TUTTI_ERROR_ARGUMENT,
                 "the environment of %s is incomplete: %s is not set, so its ranks do not know where to meet (or set "
                 "TUTTI_STORE)",
                 names->launcher, missing);
        return INCOMPLETE;
    }
    bool six = strchr(host, ':') != NULL && host[0] != '[';
    snprintf(launch->url, sizeof launch->url, six ? "tcp://[%s]:%d" : "tcp://%s:%d", host, port);
    launch->rank_0_hosts = true;
    return COMPLETE;
}

/* ---- the launchers ---- */

static verdict find_tutti(const tu_settings *settings, tu_launch *launch) {
    static const names names = { TU_LAUNCHER_TUTTI, "TUTTI_RANK", "TUTTI_SIZE", "TUTTI_LOCAL_RANK",
                                 "TUTTI_LOCAL_SIZE" };
    ranks found;
    verdict verdict = read_ranks(&names, &found);
    if (verdict != COMPLETE)
        return verdict;
    take(launch, &names, &found);
    if (found.size > 1 && tu_settings_text(settings, TU_SETTING_STORE)[0] == 0)
        return incomplete(&names, "TUTTI_STORE", "TUTTI_RANK");
    if (found.size > 1 && tu_settings_text(settings, TU_SETTING_NEWS_FD)[0] != 0)
        launch->news = (int)tu_settings_number(settings, TU_SETTING_NEWS_FD);
    return COMPLETE;
}

static verdict find_torchrun(const tu_settings *settings, tu_launch *launch) {
    static const names names = { "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE" };
    ranks found;
    verdict verdict = read_ranks(&names, &found);
    if (verdict != COMPLETE)
        return verdict;
    take(launch, &names, &found);
    const char *run = text_of("TORCHELASTIC_RUN_ID"), *restart = text_of("TORCHELASTIC_RESTART_COUNT");
    if (run != NULL || restart != NULL)
        snprintf(launch->prefix, sizeof launch->prefix, "%.100s/%.20s", run != NULL ? run : "none",
                 restart != NULL ? restart : "0");
    if (found.size == 1 || tu_settings_text(settings, TU_SETTING_STORE)[0] != 0)
        return COMPLETE;
    verdict = read_master(&names, true, launch);
    const char *agent = text_of("TORCHELASTIC_USE_AGENT_STORE");
    if (agent != NULL && strcasecmp(agent, "true") == 0)
        launch->rank_0_hosts = false;
    return verdict;
}

/* Where the ranks of an MPI launcher meet: on one host a socket named after the job, which `job` names or is NULL. */
static verdict find_meeting(const tu_settings *settings, const names *names, const ranks *found, bool one_host,
                            const char *job, const char *job_variable, tu_launch *launch) {
    take(launch, names, found);
    if (found->size == 1 || tu_settings_text(settings, TU_SETTING_STORE)[0] != 0)
        return COMPLETE;
    if (!one_host)
        return read_master(names, true, launch);
    if (job == NULL) {
        verdict verdict = read_master(names, false, launch);
        if (verdict != ABSENT)
            return verdict;
        return incomplete(names, job_variable, names->rank);
    }
    /* The whole job name may be long; a socket's name holds 107 bytes. */
    int used = snprintf(launch->url, sizeof launch->url, "unix:@tutti-%u-", (unsigned)geteuid());
    char clean[48];
    size_t length = strlen(job);
    const char *from = length < sizeof clean ? job : job + length - sizeof clean + 1;
    snprintf(clean, sizeof clean, "%s", from);
    for (char *c = clean; *c != 0; c++)
        if (!isalnum((unsigned char)*c) && strchr("-._", *c) == NULL)
            *c = '_';
    snprintf(launch->url + used, sizeof launch->url - (size_t)used, "%s", clean);
    launch->rank_0_hosts = true;
    launch->per_opening = true;
    return COMPLETE;
}

/* A launcher that tells how many of its ranks are on this host. */
static verdict find_mpi(const tu_settings *settings, const names *names, const char *job, const char *job_variable,
                        tu_launch *launch) {
    ranks found;
    verdict verdict = read_ranks(names, &found);
    bool one_host = verdict == COMPLETE && (found.local_size < 0 || found.local_size == found.size);
    return verdict == COMPLETE ? find_meeting(settings, names, &found, one_host, job, job_variable, launch) : verdict;
}

static verdict find_open_mpi(const tu_settings *settings, tu_launch *launch) {
    static const names names = { "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                 "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE" };
    return find_mpi(settings, &names, text_of("PMIX_NAMESPACE"), "PMIX_NAMESPACE", launch);
}

/* The process behind PMI_FD is the same for all ranks of a host; the protocol on it stays untouched for a later
 * MPI_Init. Where there is none, the address in PMI_PORT is. */
static const char *hydra_job(char text[48]) {
    int fd;
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    if (number_of("PMI_FD", 0, INT32_MAX, &fd) != TUTTI_OK)
        return NULL;
    if (fd < 0)
        return text_of("PMI_PORT");
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0 || peer.pid <= 0)
        return NULL;
    snprintf(text, 48, "hydra-%d", (int)peer.pid);
    return text;
}

static verdict find_hydra(const tu_settings *settings, tu_launch *launch) {
    static const names names = { "Hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS" };
    char job[48];
    return find_mpi(settings, &names, text_of(names.rank) != NULL ? hydra_job(job) : NULL, "PMI_FD", launch);
}

static verdict find_slurm(const tu_settings *settings, tu_launch *launch) {
    /* A batch script has SLURM_PROCID too, but only a step of srun has its number of tasks. */
    static const names names = { "Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", NULL, NULL };
    if (text_of(names.size) == NULL)
        return ABSENT;
    ranks found;
    verdict verdict = read_ranks(&names, &found);
    if (verdict != COMPLETE)
        return verdict;
    int nodes;
    if (number_of("SLURM_STEP_NUM_NODES", 1, INT32_MAX, &nodes) != TUTTI_OK)
        return CONTRADICTORY;
    const char *job = text_of("SLURM_JOB_ID"), *step = text_of("SLURM_STEP_ID");
    char name[48];
    snprintf(name, sizeof name, "slurm-%.20s.%.20s", job != NULL ? job : "", step != NULL ? step : "");
    bool named = job != NULL && step != NULL;
    return find_meeting(settings, &names, &found, nodes <= 1, named ? name : NULL,
                        job == NULL ? "SLURM_JOB_ID" : "SLURM_STEP_ID", launch);
}

static tutti_status find_in_environment(const tu_settings *settings, tu_log *log, tu_launch *launch) {
    static verdict (*const finders[])(const tu_settings *, tu_launch *) = { find_tutti, find_torchrun, find_open_mpi,
                                                                            find_hydra, find_slurm };
    tutti_error_copy first;
    bool failed = false;
    for (size_t i = 0; i < sizeof finders / sizeof finders[0]; i++) {
        tu_launch candidate = { .news = -1 };
        switch (finders[i](settings, &candidate)) {
        case ABSENT:
            break;
        case CONTRADICTORY:
            return TUTTI_ERROR_ARGUMENT;
        case INCOMPLETE:
            if (!failed)
                tu_error_save(&first);
            failed = true;
            break;
        case COMPLETE:
            if (failed)
                TU_LOG(TUTTI_LOG_INFO, log, "world", "passed over: %s", first.message);
            *launch = candidate;
            if (launch->size > 1 && launch->url[0] == 0)
                snprintf(launch->url, sizeof launch->url, "%s", tu_settings_text(settings, TU_SETTING_STORE));
            return TUTTI_OK;
        }
    }
    if (failed)
        return tu_error_restore(&first);
    *launch = (tu_launch){ .launcher = "alone", .rank = 0, .size = 1, .news = -1 };
    return TUTTI_OK;
}

/* ---- options first ---- */

static tutti_status check_options(const tutti_world_options *options) {
    if (options->store != NULL && options->store_url != NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_world_options has both a store and a store_url; give one");
    if (options->rank_count < 0)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tutti_world_options.rank_count is %d; it must be positive, or 0 for the environment's",
                        options->rank_count);
    if (options->store != NULL && options->rank_count == 0)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tutti_world_options has a store, but rank_count is 0; with a store, rank and rank_count are "
                        "required");
    if (options->rank_count == 0 && options->rank != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tutti_world_options has rank %d, but rank_count is 0; give both or neither", options->rank);
    if (options->rank_count > 0 && (options->rank < 0 || options->rank >= options->rank_count))
        return tu_error(TUTTI_ERROR_RANGE, "tutti_world_options.rank is %d; with rank_count %d it must be 0 to %d",
                        options->rank, options->rank_count, options->rank_count - 1);
    return TUTTI_OK;
}

static tutti_status find_spawned(tu_launch *launch) {
    const tu_spawn_record *spawn = tu_spawn_current();
    *launch =
        (tu_launch){ .launcher = "spawn", .rank = spawn->rank, .size = spawn->size, .store = spawn->store, .news = -1 };
    snprintf(launch->url, sizeof launch->url, "%s", spawn->url);
    return TUTTI_OK;
}

/* What PyTorch's programs write: "env://" is the launch environment; "file:///path?rank=0&world_size=2", and the same
 * behind tcp://, says who this is. Fills rank and rank_count, and gives the address without its query. */
static tutti_status take_url(tutti_world_options *options, char url[192]) {
    if (options->store_url == NULL)
        return TUTTI_OK;
    const char *whole = options->store_url, *query = strchr(whole, '?');
    size_t length = query != NULL ? (size_t)(query - whole) : strlen(whole);
    if (length >= 192)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_world_options.store_url is too long: \"%s\"", whole);
    memcpy(url, whole, length);
    url[length] = 0;
    while (query != NULL) {
        char item[64];
        const char *begin = query + 1;
        query = strchr(begin, '&');
        snprintf(item, sizeof item, "%.*s", (int)(query != NULL ? query - begin : (ptrdiff_t)strlen(begin)), begin);
        int64_t number;
        bool rank = strncmp(item, "rank=", 5) == 0, size = strncmp(item, "world_size=", 11) == 0;
        if ((!rank && !size) || tu_parse_integer(item + (rank ? 5 : 11), &number) != TUTTI_OK || number < 0 ||
            number > INT_MAX)
            return tu_error(
                TUTTI_ERROR_ARGUMENT,
                "tutti_world_options.store_url \"%s\": \"%s\" is not understood; rank=N and world_size=N are", whole,
                item);
        *(rank ? &options->rank : &options->rank_count) = (int)number;
    }
    options->store_url = strcmp(url, "env://") == 0 ? NULL : url;
    return TUTTI_OK;
}

tutti_status tu_launch_find(const tutti_world_options *given, const tu_settings *settings, tu_log *log,
                            tu_launch *launch) {
    char url[192];
    tutti_world_options copy = *given, *options = &copy;
    tutti_status status = take_url(options, url);
    if (status == TUTTI_OK)
        status = check_options(options);
    if (status != TUTTI_OK)
        return status;
    if (options->rank_count > 0) {
        *launch = (tu_launch){ .launcher = "options",
                               .rank = options->rank,
                               .size = options->rank_count,
                               .store = options->store,
                               .news = -1 };
        if (options->store == NULL && options->store_url == NULL)
            snprintf(launch->url, sizeof launch->url, "%s", tu_settings_text(settings, TU_SETTING_STORE));
        if (launch->size > 1 && options->store == NULL && options->store_url == NULL && launch->url[0] == 0)
            return tu_error(
                TUTTI_ERROR_ARGUMENT,
                "tutti_world_options has rank_count %d but no store and no store_url, and TUTTI_STORE is not "
                "set: the ranks do not know where to meet",
                launch->size);
    } else if (tu_spawn_current() != NULL) {
        status = find_spawned(launch);
    } else {
        status = find_in_environment(settings, log, launch);
    }
    if (status != TUTTI_OK)
        return status;
    if (options->store_url != NULL) {
        launch->store = NULL;
        launch->rank_0_hosts = strncmp(options->store_url, "file:", 5) != 0;
        launch->per_opening = false;
        if ((size_t)snprintf(launch->url, sizeof launch->url, "%s", options->store_url) >= sizeof launch->url)
            return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_world_options.store_url is too long: \"%s\"",
                            options->store_url);
    }
    return TUTTI_OK;
}
