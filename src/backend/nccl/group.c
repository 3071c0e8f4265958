/* SPDX-License-Identifier: Apache-2.0
 *
 * The communicator of a group on a device: made on first need by all members together, bounded, and ended with the
 * group.
 *
 * Before anybody enters NCCL an exchange shows that all are there, have the same version, and can: NCCL refuses two
 * ranks on one GPU of a host by a message in its own log, and hangs when versions differ. A rank that fails inside ends
 * the group, since the others wait there for it; a second exchange shows that all members have the communicator.
 */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "nccl.h"

#define RETIRE_NS INT64_C(1000000000) /* how long a communicator that is to end may take before it is aborted */
#define LOOK_NS INT64_C(20000000)     /* between two looks at the liveness of the members */
#define CAUSE_NS INT64_C(500000000)   /* how long a rank waits for the reason of an error that NCCL reports */
/* How long a call of NCCL is looked at without sleeping: in its non-blocking mode each one is done by a thread that
 * NCCL starts for it, which takes about 100 us; whoever sleeps meanwhile wakes up as much later again. */
#define PATIENCE_NS INT64_C(1000000)

/* ---- errors, waiting ---- */

tutti_status tu_nccl_error(const tu_nccl_group *on, ncclResult_t result, const char *what) {
    const tu_nccl_library *library = &on->nccl->library;
    const char *more = library->ncclGetLastError(on->comm);
    return on->nccl->cuda.host->error(
        result == ncclInvalidArgument || result == ncclInvalidUsage ? TUTTI_ERROR_UNSUPPORTED : TUTTI_ERROR_BACKEND,
        "%s of group %s: NCCL says \"%s\"%s%s; NCCL_DEBUG=WARN tells more", what, on->name,
        library->ncclGetErrorString(result), more != NULL && more[0] != 0 ? ", last: " : "", more != NULL ? more : "");
}

/* Takes the communicator away from everybody, the watcher too. */
static ncclComm_t take_comm(tu_nccl_group *on) {
    pthread_mutex_lock(&on->stop_lock);
    ncclComm_t comm = on->comm;
    on->comm = NULL;
    pthread_mutex_unlock(&on->stop_lock);
    return comm;
}

/* One of the program's is stopped and never freed; one of ours is freed, stopped or not. */
static ncclResult_t end_one(const tu_nccl_group *on, ncclComm_t comm) {
    const tu_nccl_library *library = &on->nccl->library;
    if (!on->brought)
        return library->ncclCommAbort(comm);
    return on->revoked ? ncclSuccess : library->ncclCommRevoke(comm, 0);
}

/* Stops it without freeing it: what its windows map stays. It can be, where windows can be mapped. */
static ncclResult_t stop_one(tu_nccl_group *on, ncclComm_t comm) {
    on->doomed = comm;
    return on->revoked ? ncclSuccess : on->nccl->library.ncclCommRevoke(comm, 0);
}

void tu_nccl_abort(tu_nccl_group *on) {
    tu_nccl *nccl = on->nccl;
    ncclComm_t comm = take_comm(on);
    bool stays = comm != NULL && on->windows > 0 && !on->brought;
    on->aborted = true;
    if ((comm == NULL && on->parent == NULL) || tu_cuda_enter(&nccl->cuda, on->device) != TUTTI_OK)
        return;
    ncclResult_t result = ncclSuccess;
    if (comm != NULL)
        result = stays ? stop_one(on, comm) : end_one(on, comm);
    if (on->parent != NULL && on->doomed == NULL) {
        (void)nccl->library.ncclCommAbort(on->parent);
        on->parent = NULL;
    }
    if (result != ncclSuccess && result != ncclInProgress)
        nccl->cuda.host->log(nccl->cuda.world, TUTTI_LOG_WARN, "nccl", "the communicator of group %s did not end: %s",
                             on->name, nccl->library.ncclGetErrorString(result));
    tu_cuda_leave(&nccl->cuda);
}

/* In the device's context. */
static void bury(tu_nccl_group *on) {
    const tu_nccl_library *library = &on->nccl->library;
    if (on->doomed == NULL)
        return;
    (void)library->ncclCommAbort(on->doomed);
    if (on->parent != NULL)
        (void)library->ncclCommAbort(on->parent);
    on->doomed = on->parent = NULL;
}

void tu_nccl_window_gone(tu_nccl_group *on) {
    if (--on->windows == 0)
        bury(on);
}

void tu_nccl_stop(tu_nccl_group *on, int64_t until) {
    pthread_mutex_lock(&on->stop_lock);
    /* Pairs with tu_nccl_come_out: the call that was seen is stopped, or it is out and a later one is not touched. */
    if (on->comm != NULL && atomic_compare_exchange_strong_explicit(&on->inside_until, &until, 0, memory_order_acq_rel,
                                                                    memory_order_acquire)) {
        on->revoked = true;
        (void)on->nccl->library.ncclCommRevoke(on->comm, 0); /* the call comes back, and its thread aborts */
    }
    pthread_mutex_unlock(&on->stop_lock);
}

/* Whether another thread can stop a call on the communicator: those that may block can be. */
static bool can_be_stopped(const tu_nccl_group *on) {
    return on->parent != NULL || on->brought;
}

void tu_nccl_go_inside(tu_nccl_group *on, int64_t deadline) {
    if (can_be_stopped(on))
        atomic_store_explicit(&on->inside_until, deadline, memory_order_release); /* pairs with tu_nccl_stop */
}

ncclResult_t tu_nccl_come_out(tu_nccl_group *on, ncclResult_t result) {
    if (!can_be_stopped(on))
        return result;
    bool stopped = atomic_exchange_explicit(&on->inside_until, 0, memory_order_acq_rel) == 0; /* likewise */
    return stopped && (result == ncclSuccess || result == ncclInProgress) ? ncclRemoteError : result;
}

static bool has_ended(const tu_nccl_group *on) {
    const _Atomic uint64_t *state = on->nccl->cuda.host->group_state(on->group);
    return state != NULL && atomic_load_explicit(state, memory_order_acquire) != 0;
}

/* Why the group cannot wait any longer; TUTTI_OK: it can. */
static tutti_status look(const tu_nccl_group *on, int64_t deadline, int64_t *next_look, const char *what) {
    const tu_backend_host *host = on->nccl->cuda.host;
    int64_t now = host->now();
    if (now >= *next_look) {
        (void)host->group_look(on->group); /* a death ends the group */
        *next_look = now + LOOK_NS;
    }
    if (has_ended(on))
        return host->group_cause(on->group);
    if (now > deadline)
        return host->error(TUTTI_ERROR_TIMEOUT,
                           "%s of group %s: rank %d waited inside NCCL until the deadline; can all ranks reach each "
                           "other (NCCL_SOCKET_IFNAME)? NCCL_DEBUG=INFO tells more",
                           what, on->name, on->rank);
    return TUTTI_OK;
}

/* Of a call that came back with an error: another rank that stopped it, or died, is the reason, and is told instead.
 * That one's word may come a moment later than NCCL's. */
static tutti_status await_cause(const tu_nccl_group *on, int64_t deadline, const char *what) {
    const tu_backend_host *host = on->nccl->cuda.host;
    int64_t next_look = 0, until = host->now() + CAUSE_NS;
    tutti_status status = look(on, deadline, &next_look, what);
    while (status == TUTTI_OK && host->now() < until) {
        nanosleep(&(struct timespec){ .tv_nsec = 500000 }, NULL);
        status = look(on, INT64_MAX, &next_look, what);
    }
    return status;
}

tutti_status tu_nccl_settle(tu_nccl_group *on, ncclResult_t result, int64_t deadline, const char *what) {
    const tu_backend_host *host = on->nccl->cuda.host;
    int64_t next_look = 0, patience = 0;
    tutti_status status = TUTTI_OK;
    if (result == ncclSuccess) /* some calls say so and go on in a thread of NCCL's: registering a window does */
        result = ncclInProgress;
    while (result == ncclInProgress && status == TUTTI_OK) {
        ncclResult_t asked = on->nccl->library.ncclCommGetAsyncError(on->comm, &result);
        if (asked != ncclSuccess)
            result = asked;
        if (result != ncclInProgress)
            break;
        status = look(on, deadline, &next_look, what);
        if (patience == 0)
            patience = host->now() + PATIENCE_NS;
        if (host->now() < patience)
            sched_yield();
        else
            nanosleep(&(struct timespec){ .tv_nsec = 50000 }, NULL);
    }
    bool by_another =
        result == ncclRemoteError || result == ncclInternalError; /* perhaps: others are this rank's own */
    if (status == TUTTI_OK && by_another && can_be_stopped(on))
        status = await_cause(on, deadline, what);
    if (status == TUTTI_OK && result != ncclSuccess)
        status = tu_nccl_error(on, result, what);
    if (status != TUTTI_OK)
        tu_nccl_abort(on);
    return status;
}

/* ---- what members tell each other ---- */

typedef struct introduction {
    int32_t status;  /* of this rank so far */
    int32_t version; /* of NCCL */
    int32_t brought;
    uint32_t shared; /* several ranks on one GPU are allowed */
    uint64_t host;   /* hash of what NCCL takes for a host's identity */
    CUuuid uuid;
    ncclUniqueId id; /* of rank 0 */
    char message[256];
} introduction;

static uint64_t hash(uint64_t value, const char *text) {
    for (; *text != 0; text++)
        value = (value ^ (unsigned char)*text) * UINT64_C(0x100000001b3);
    return value;
}

/* As NCCL does: NCCL_HOSTID, else the host's name and its boot. */
static uint64_t host_identity(void) {
    const char *given = getenv("NCCL_HOSTID");
    char name[256] = "", boot[64] = "";
    uint64_t value = UINT64_C(0xcbf29ce484222325);
    if (given != NULL && given[0] != 0)
        return hash(value, given);
    gethostname(name, sizeof name - 1);
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file != NULL) {
        if (fgets(boot, sizeof boot, file) == NULL)
            boot[0] = 0;
        fclose(file);
    }
    return hash(hash(value, name), boot);
}

static void introduce(const tu_nccl_group *on, tutti_status own, introduction *mine) {
    const char *shared = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    *mine = (introduction){ .status = (int32_t)own,
                            .version = on->nccl->library.version,
                            .brought = on->brought,
                            .shared = on->nccl->library.version >= TU_NCCL_VERSION(2, 30, 0) && shared != NULL &&
                                      shared[0] == '1',
                            .host = host_identity() };
    if (on->device != NULL)
        mine->uuid = on->device->uuid;
    if (own == TUTTI_OK && on->rank == 0 && !on->brought) {
        ncclResult_t result = on->nccl->library.ncclGetUniqueId(&mine->id);
        if (result != ncclSuccess)
            mine->status = (int32_t)tu_nccl_error(on, result, "the unique id");
    }
    if (mine->status != TUTTI_OK)
        snprintf(mine->message, sizeof mine->message, "%s", on->nccl->cuda.host->error_message());
}

/* The error of the first member that has one. */
static tutti_status agree(const tu_nccl_group *on, const introduction *all) {
    const tu_backend_host *host = on->nccl->cuda.host;
    for (int i = 0; i < on->size; i++) {
        if (all[i].status == TUTTI_OK)
            continue;
        tutti_status status = host->error((tutti_status)all[i].status, "group %s has no NCCL communicator: rank %d: %s",
                                          on->name, i, all[i].message);
        host->error_at_fault(i);
        return status;
    }
    return TUTTI_OK;
}

static tutti_status compare_two(const tu_nccl_group *on, const introduction *all, int i, int j) {
    const tu_backend_host *host = on->nccl->cuda.host;
    if (all[i].version != all[j].version)
        return host->error(TUTTI_ERROR_MISMATCH,
                           "group %s: rank %d has NCCL %d.%d.%d and rank %d has %d.%d.%d: all ranks must load the same",
                           on->name, i, all[i].version / 10000, all[i].version / 100 % 100, all[i].version % 100, j,
                           all[j].version / 10000, all[j].version / 100 % 100, all[j].version % 100);
    if (all[i].brought != all[j].brought)
        return host->error(TUTTI_ERROR_MISMATCH,
                           "group %s: rank %d brings a communicator and rank %d does not: all ranks do, or none",
                           on->name, all[i].brought ? i : j, all[i].brought ? j : i);
    if (!all[i].brought && !(all[i].shared && all[j].shared) && all[i].host == all[j].host &&
        memcmp(&all[i].uuid, &all[j].uuid, sizeof all[i].uuid) == 0)
        return host->error(TUTTI_ERROR_UNSUPPORTED,
                           "group %s: ranks %d and %d are on one GPU, and NCCL wants a GPU for each rank of a host; "
                           "use the cuda backend there. For tests a different NCCL_HOSTID per rank helps, or from NCCL "
                           "2.30 on NCCL_MULTI_RANK_GPU_ENABLE=1",
                           on->name, i, j);
    return TUTTI_OK;
}

static tutti_status compare(const tu_nccl_group *on, const introduction *all) {
    for (int i = 0; i < on->size; i++) {
        for (int j = 0; j < i; j++) {
            tutti_status status = compare_two(on, all, i, j);
            if (status == TUTTI_OK)
                continue;
            on->nccl->cuda.host->error_at_fault(i);
            return status;
        }
    }
    return TUTTI_OK;
}

/* ---- making ---- */

/* All members together. The split is the non-blocking communicator's business, and so comes back. A thread of NCCL's
 * writes the new one, at the latest while the first is aborted. */
static tutti_status split_blocking(tu_nccl_group *on, ncclConfig_t config, int64_t deadline) {
    ncclComm_t made = NULL;
    config.blocking = 1;
    ncclResult_t result = on->nccl->library.ncclCommSplit(on->comm, 0, on->rank, &made, &config);
    tutti_status status = tu_nccl_settle(on, result, deadline, "making the communicator");
    made = __atomic_load_n(&made, __ATOMIC_ACQUIRE); /* pairs with the release of NCCL's thread */
    if (status != TUTTI_OK) {
        if (made != NULL)
            (void)on->nccl->library.ncclCommAbort(made);
        return status;
    }
    on->parent = on->comm;
    on->comm = made;
    return made != NULL ? tu_nccl_settle(on, ncclInProgress, deadline, "making the communicator")
                        : tu_nccl_error(on, ncclInternalError, "making the communicator");
}

static tutti_status enter_nccl(tu_nccl_group *on, const ncclUniqueId *id, int64_t deadline) {
    tu_nccl *nccl = on->nccl;
    ncclConfig_t config = { .size = sizeof config,
                            .magic = TU_NCCL_CONFIG_MAGIC,
                            .version = TU_NCCL_OLDEST,
                            .blocking = 0,
                            .cgaClusterSize = NCCL_CONFIG_UNDEF_INT,
                            .minCTAs = NCCL_CONFIG_UNDEF_INT,
                            .maxCTAs = NCCL_CONFIG_UNDEF_INT,
                            .splitShare = NCCL_CONFIG_UNDEF_INT,
                            .trafficClass = NCCL_CONFIG_UNDEF_INT,
                            .commName = on->name,
                            .collnetEnable = NCCL_CONFIG_UNDEF_INT,
                            .CTAPolicy = NCCL_CONFIG_UNDEF_INT,
                            .shrinkShare = NCCL_CONFIG_UNDEF_INT,
                            .nvlsCTAs = NCCL_CONFIG_UNDEF_INT };
    tutti_status status = tu_cuda_enter(&nccl->cuda, on->device);
    if (status != TUTTI_OK)
        return status;
    ncclResult_t result = nccl->library.ncclCommInitRankConfig(&on->comm, on->size, *id, on->rank, &config);
    if (on->comm == NULL && (result == ncclSuccess || result == ncclInProgress))
        result = ncclInternalError;
    status = tu_nccl_settle(on, result, deadline, "making the communicator");
    if (status == TUTTI_OK && nccl->library.ncclCommRevoke != NULL)
        status = split_blocking(on, config, deadline);
    tu_cuda_leave(&nccl->cuda);
    return status;
}

/* What the group needs besides the communicator, on this rank. */
static tutti_status equip(tu_nccl_group *on) {
    tu_cuda *cuda = &on->nccl->cuda;
    tutti_status status = tu_cuda_device_open(cuda, on->device_index, &on->device, &on->device_index);
    if (status == TUTTI_OK)
        status = tu_cuda_enter(cuda, on->device);
    if (status != TUTTI_OK)
        return status;
    CUresult result = cuda->driver.cuMemHostAlloc((void **)&on->marks, sizeof *on->marks,
                                                  CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
    if (result == CUDA_SUCCESS) {
        memset(on->marks, 0, sizeof *on->marks);
        result = cuda->driver.cuMemHostGetDevicePointer(&on->marks_here, on->marks, 0);
    }
    if (result == CUDA_SUCCESS)
        result = cuda->driver.cuEventCreate(&on->last_event, CU_EVENT_DISABLE_TIMING);
    if (result == CUDA_SUCCESS)
        result = cuda->driver.cuMemAlloc(&on->scratch, TU_NCCL_SCRATCH);
    if (result == CUDA_SUCCESS)
        on->scratch_bytes = TU_NCCL_SCRATCH;
    tu_cuda_leave(cuda);
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(cuda, result, "preparing a group for NCCL");
}

/* What a blocking communicator waits for while it ends: on a thread of its own, so that it can be stopped. */
typedef struct ending {
    tu_nccl_group *on;
    ncclComm_t comm;
    ncclResult_t result;
    _Atomic bool over;
} ending;

static void *finalize(void *argument) {
    ending *ending = argument;
    tu_cuda *cuda = &ending->on->nccl->cuda;
    if (tu_cuda_enter(cuda, ending->on->device) == TUTTI_OK) {
        ending->result = ending->on->nccl->library.ncclCommFinalize(ending->comm);
        tu_cuda_leave(cuda);
    }
    atomic_store_explicit(&ending->over, true, memory_order_release); /* pairs with end_blocking */
    return NULL;
}

static void end_blocking(tu_nccl_group *on) {
    const tu_nccl_library *library = &on->nccl->library;
    const tu_backend_host *host = on->nccl->cuda.host;
    ending ending = { .on = on, .comm = on->comm, .result = ncclRemoteError };
    pthread_t thread;
    if (!has_ended(on) && pthread_create(&thread, NULL, finalize, &ending) == 0) {
        int64_t until = host->now() + RETIRE_NS;
        bool over = false;
        while (!(over = atomic_load_explicit(&ending.over, memory_order_acquire)) && host->now() < until)
            nanosleep(&(struct timespec){ .tv_nsec = 50000 }, NULL);
        if (!over)
            (void)library->ncclCommRevoke(on->comm, 0); /* then it comes back */
        pthread_join(thread, NULL);
    }
    if (ending.result == ncclSuccess) {
        (void)library->ncclCommDestroy(take_comm(on));
        (void)library->ncclCommAbort(on->parent); /* nothing has ever run on it */
        on->parent = NULL;
    } else {
        tu_nccl_abort(on);
    }
}

/* Ends the communicator; the others may have ended theirs, or still be at work. */
static void end_communicator(tu_nccl_group *on) {
    const tu_nccl_library *library = &on->nccl->library;
    const tu_backend_host *host = on->nccl->cuda.host;
    if (on->comm == NULL || on->brought)
        return;
    if (on->parent != NULL) {
        end_blocking(on);
        return;
    }
    ncclResult_t result = has_ended(on) ? ncclRemoteError : library->ncclCommFinalize(on->comm);
    int64_t until = host->now() + RETIRE_NS;
    while (result == ncclInProgress && host->now() < until) {
        if (library->ncclCommGetAsyncError(on->comm, &result) != ncclSuccess)
            result = ncclInternalError;
        nanosleep(&(struct timespec){ .tv_nsec = 50000 }, NULL);
    }
    if (result == ncclSuccess)
        result = library->ncclCommDestroy(on->comm);
    else
        tu_nccl_abort(on);
    on->comm = NULL;
}

static void free_group(tu_nccl_group *on) {
    tu_cuda *cuda = &on->nccl->cuda;
    if (on->device != NULL && tu_cuda_enter(cuda, on->device) == TUTTI_OK) {
        end_communicator(on);
        bury(on);
        if (on->last_event != NULL)
            cuda->driver.cuEventDestroy(on->last_event);
        if (on->scratch != 0)
            cuda->driver.cuMemFree(on->scratch);
        for (const tu_nccl_spent *spent = on->spent; spent != NULL; spent = spent->next)
            cuda->driver.cuMemFree(spent->memory);
        if (on->marks != NULL)
            cuda->driver.cuMemFreeHost(on->marks); /* waits for the device: nobody counts in it any more */
        tu_cuda_leave(cuda);
    }
    for (tu_nccl_spent *spent = on->spent, *next; spent != NULL; spent = next) {
        next = spent->next;
        free(spent);
    }
    pthread_mutex_destroy(&on->lock);
    pthread_mutex_destroy(&on->stop_lock);
    free(on);
}

static tutti_status out_of_memory(const tu_backend_host *host, const tutti_group *group) {
    return host->error(TUTTI_ERROR_MEMORY, "out of memory for the communicator of group %s", host->group_name(group));
}

/* Of a rank that has no memory for it at all: the others, who are in `build`, hear so. */
static tutti_status be_absent(const tu_nccl *nccl, tutti_group *group, int64_t deadline) {
    const tu_backend_host *host = nccl->cuda.host;
    introduction mine = { .status = (int32_t)out_of_memory(host, group) };
    snprintf(mine.message, sizeof mine.message, "%s", host->error_message());
    tutti_status status = host->exchange(group, "nccl", &mine, sizeof mine, -1, deadline, NULL, NULL);
    return status == TUTTI_OK ? out_of_memory(host, group) : status;
}

/* All members together. */
static tutti_status build(tu_nccl_group *on, int64_t deadline) {
    const tu_backend_host *host = on->nccl->cuda.host;
    introduction mine, *all = calloc((size_t)on->size, sizeof *all);
    introduce(on, all != NULL ? equip(on) : out_of_memory(host, on->group), &mine);
    tutti_status status = host->exchange(on->group, "nccl", &mine, sizeof mine, -1, deadline, all, NULL);
    if (status == TUTTI_OK)
        status = all != NULL ? agree(on, all) : out_of_memory(host, on->group);
    if (status == TUTTI_OK)
        status = compare(on, all);
    if (status == TUTTI_OK && !on->brought) {
        ncclUniqueId id = all[0].id;
        status = enter_nccl(on, &id, deadline);
        if (status != TUTTI_OK && !has_ended(on))
            host->group_end(on->group); /* the others wait for this rank inside of NCCL */
        if (status == TUTTI_OK) {
            unsigned char ready = 1;
            status = host->exchange(on->group, "nccl ready", &ready, sizeof ready, -1, deadline + RETIRE_NS, all, NULL);
        }
    }
    free(all);
    return status;
}

/* With lock held: the group's, made or being made; NULL: neither. */
static tu_nccl_group *find(const tu_nccl *nccl, const tutti_group *group) {
    tu_nccl_group *found = nccl->groups;
    while (found != NULL && found->group != group)
        found = found->next;
    return found;
}

static void take_out(tu_nccl *nccl, const tu_nccl_group *on) {
    tu_nccl_group **link = &nccl->groups;
    while (*link != on)
        link = &(*link)->next;
    *link = on->next;
}

/* One that nobody else touches before it is made. */
static tu_nccl_group *begin(tu_nccl *nccl, tutti_group *group, int device_index) {
    const tu_backend_host *host = nccl->cuda.host;
    tu_nccl_group *on = calloc(1, sizeof *on);
    if (on == NULL)
        return NULL;
    *on = (tu_nccl_group){ .nccl = nccl,
                           .group = group,
                           .rank = host->group_rank(group),
                           .size = host->group_size(group),
                           .device_index = device_index };
    snprintf(on->name, sizeof on->name, "%s", host->group_name(group));
    pthread_mutex_init(&on->lock, NULL);
    pthread_mutex_init(&on->stop_lock, NULL);
    for (const tu_nccl_brought *one = nccl->brought; one != NULL; one = one->next) {
        if (one->group == group) {
            on->comm = one->comm;
            on->brought = true;
        }
    }
    on->next = nccl->groups;
    nccl->groups = on;
    return on;
}

tu_nccl_group *tu_nccl_group_find(tu_nccl *nccl, const tutti_group *group) {
    pthread_mutex_lock(&nccl->lock);
    tu_nccl_group *found = find(nccl, group);
    if (found != NULL && !found->made)
        found = NULL;
    pthread_mutex_unlock(&nccl->lock);
    return found;
}

/* With lock held: until another thread of this rank has made the group's, or failed to. */
static void await_maker(tu_nccl *nccl, const tutti_group *group, int64_t deadline) {
    const tu_nccl_group *at;
    while ((at = find(nccl, group)) != NULL && !at->made && nccl->cuda.host->now() < deadline) {
        struct timespec soon;
        clock_gettime(CLOCK_MONOTONIC, &soon);
        soon.tv_nsec += 20000000;
        soon.tv_sec += soon.tv_nsec / 1000000000;
        soon.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&nccl->lock_change, &nccl->lock, &soon);
    }
}

/* The first thread of this rank that needs it makes it, with the other members; others wait for that one. */
static tutti_status make(tu_nccl *nccl, tutti_group *group, int device_index, int64_t deadline,
                         tu_nccl_group **result) {
    const tu_backend_host *host = nccl->cuda.host;
    pthread_mutex_lock(&nccl->lock);
    await_maker(nccl, group, deadline);
    tu_nccl_group *on = find(nccl, group);
    bool mine = on == NULL;
    if (mine)
        on = begin(nccl, group, device_index);
    bool made = on != NULL && on->made;
    pthread_mutex_unlock(&nccl->lock);
    *result = made ? on : NULL;
    if (on == NULL)
        return be_absent(nccl, group, deadline);
    if (made)
        return TUTTI_OK;
    if (!mine)
        return host->error(TUTTI_ERROR_TIMEOUT, "group %s: another thread of rank %d makes its NCCL communicator",
                           host->group_name(group), host->group_rank(group));
    tutti_status status = build(on, deadline);
    pthread_mutex_lock(&nccl->lock);
    on->made = status == TUTTI_OK;
    if (!on->made)
        take_out(nccl, on);
    pthread_cond_broadcast(&nccl->lock_change);
    pthread_mutex_unlock(&nccl->lock);
    if (status != TUTTI_OK) {
        if (on->brought && !has_ended(on))
            (void)take_comm(on); /* nothing ran on it: it is the program's as it was, and can be brought again */
        tu_nccl_abort(on);
        free_group(on);
        return status;
    }
    *result = on;
    host->log(nccl->cuda.world, TUTTI_LOG_INFO, "nccl", "group %s has a communicator of %d ranks%s", on->name, on->size,
              on->brought ? ", brought by the program" : "");
    tu_nccl_watch(nccl);
    return TUTTI_OK;
}

tutti_status tu_nccl_group_get(tu_nccl *nccl, tutti_group *group, int device_index, int64_t deadline,
                               tu_nccl_group **result) {
    *result = tu_nccl_group_find(nccl, group);
    tutti_status status = *result == NULL ? make(nccl, group, device_index, deadline, result) : TUTTI_OK;
    if (status != TUTTI_OK || device_index < 0 || device_index == (*result)->device_index)
        return status;
    return nccl->cuda.host->error(TUTTI_ERROR_ARGUMENT, "group %s uses NCCL on GPU %d of this rank, not on GPU %d",
                                  (*result)->name, (*result)->device_index, device_index);
}

/* ---- ending ---- */

static void forget_brought(tu_nccl *nccl, const tutti_group *group) {
    pthread_mutex_lock(&nccl->lock);
    for (tu_nccl_brought **link = &nccl->brought; *link != NULL;) {
        tu_nccl_brought *one = *link;
        if (group != NULL && one->group != group) {
            link = &one->next;
            continue;
        }
        *link = one->next;
        free(one);
    }
    pthread_mutex_unlock(&nccl->lock);
}

/* Takes the group out of the list; for NULL, the first one. The watcher looks at groups while it holds watch_lock. */
static tu_nccl_group *unlink_group(tu_nccl *nccl, const tutti_group *group) {
    pthread_mutex_lock(&nccl->watch_lock);
    pthread_mutex_lock(&nccl->lock);
    tu_nccl_group **link = &nccl->groups;
    while (*link != NULL && group != NULL && (*link)->group != group)
        link = &(*link)->next;
    tu_nccl_group *taken = *link;
    if (taken != NULL)
        *link = taken->next;
    pthread_mutex_unlock(&nccl->lock);
    pthread_mutex_unlock(&nccl->watch_lock);
    return taken;
}

void tu_nccl_forget(void *state, tutti_group *group) {
    tu_nccl_group *on = unlink_group(state, group);
    forget_brought(state, group);
    if (on != NULL)
        free_group(on);
    tu_cuda_forget(state, group);
}

void tu_nccl_groups_free(tu_nccl *nccl) {
    tu_nccl_group *on;
    while ((on = unlink_group(nccl, NULL)) != NULL)
        free_group(on);
    forget_brought(nccl, NULL);
}

/* ---- communicators of the program's ---- */

/* The group that has it; NULL: none. */
static const tutti_group *borrower(tu_nccl *nccl, const void *communicator) {
    pthread_mutex_lock(&nccl->lock);
    const tu_nccl_brought *one = nccl->brought;
    while (one != NULL && one->comm != communicator)
        one = one->next;
    const tutti_group *group = one != NULL ? one->group : NULL;
    pthread_mutex_unlock(&nccl->lock);
    return group;
}

tutti_status tu_nccl_bring(void *state, tutti_group *group, void *communicator) {
    tu_nccl *nccl = state;
    const tu_backend_host *host = nccl->cuda.host;
    const tu_nccl_library *library = &nccl->library;
    const char *name = host->group_name(group);
    int size = 0, rank = 0;
    if (library->ncclCommRevoke == NULL)
        return host->error(TUTTI_ERROR_UNSUPPORTED,
                           "group %s: a communicator of the program's needs NCCL 2.28 or newer, which can stop it "
                           "without freeing it (ncclCommRevoke)",
                           name);
    if (tu_nccl_group_find(nccl, group) != NULL)
        return host->error(TUTTI_ERROR_STATE, "group %s has used NCCL already: bring its communicator before", name);
    const tutti_group *other = borrower(nccl, communicator);
    if (other != NULL && other != group)
        return host->error(TUTTI_ERROR_ARGUMENT,
                           "group %s: the communicator is lent to group %s already: each group needs its own", name,
                           host->group_name(other));
    ncclResult_t result = library->ncclCommCount(communicator, &size);
    if (result == ncclSuccess)
        result = library->ncclCommUserRank(communicator, &rank);
    if (result != ncclSuccess)
        return host->error(TUTTI_ERROR_BACKEND, "group %s: this is no communicator that can be used: NCCL says \"%s\"",
                           name, library->ncclGetErrorString(result));
    if (size != host->group_size(group) || rank != host->group_rank(group))
        return host->error(TUTTI_ERROR_ARGUMENT,
                           "group %s: the communicator has %d ranks and this is its rank %d; the group has %d and this "
                           "is rank %d: both must agree",
                           name, size, rank, host->group_size(group), host->group_rank(group));
    tu_nccl_brought *one = calloc(1, sizeof *one);
    if (one == NULL)
        return host->error(TUTTI_ERROR_MEMORY, "out of memory for a communicator");
    forget_brought(nccl, group);
    *one = (tu_nccl_brought){ .group = group, .comm = communicator };
    pthread_mutex_lock(&nccl->lock);
    one->next = nccl->brought;
    nccl->brought = one;
    pthread_mutex_unlock(&nccl->lock);
    return TUTTI_OK;
}
