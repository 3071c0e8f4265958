/* SPDX-License-Identifier: Apache-2.0
 *
 * Entering NVSHMEM with all ranks of the world, and growing its heap.
 *
 * NVSHMEM waits for every process without a deadline. So the ranks first tell each other what they are and what they
 * have (another exchange, before this one, has shown that all can), and every call that waits for others is made on a
 * thread of its own. Meanwhile the ranks tell each other how far they are: that thread is left behind when one of them
 * fails or dies, or the deadline passes. What one rank can find out alone belongs to tu_nvshmem_begin: it fails before
 * anybody waits for it.
 *
 * A process can enter NVSHMEM once. The memory of the heap is made by all and could only be given back by all at once,
 * while a world is closed by each rank alone: so slabs stay with the process, and a later world of the same ranks uses
 * them again.
 */
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "inner.h"

/* What this process has of NVSHMEM, whatever worlds it has; under `process_lock`. One world uses it at a time. */
static pthread_mutex_t process_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    bool taken; /* by a world */
    bool lost;  /* a call did not come back */
    bool split; /* nvshmem_malloc went well on some ranks alone: what it would give next lies at different places */
    struct {
        void *base;
        size_t bytes;
    } slabs[TU_NVSHMEM_SLABS]; /* in the order in which all ranks made them */
    int slab_count;
    CUmodule module; /* the kernels with device functions: NVSHMEM keeps hold of it. NULL: not loaded yet */
} process;

/* ---- calls that may not come back ---- */

typedef struct visit {
    tu_nvshmem *nvshmem;
    void (*act)(tu_nvshmem *nvshmem, void *argument);
    CUcontext context;
    _Atomic int done;    /* 1: the thread is through. 2: nobody waits for it any more */
    char argument[1024]; /* a copy, since the caller may be gone */
} visit;

typedef tu_nvshmem_outcome outcome;

static void *visit_main(void *opaque) {
    visit *visit = opaque;
    CUcontext before;
    visit->nvshmem->cuda.driver.cuCtxPushCurrent(visit->context);
    visit->act(visit->nvshmem, visit->argument);
    visit->nvshmem->cuda.driver.cuCtxPopCurrent(&before);
    int none = 0;
    if (!atomic_compare_exchange_strong_explicit(&visit->done, &none, 1, memory_order_acq_rel, memory_order_acquire))
        free(visit); /* too late: the caller has left it to us */
    return NULL;
}

static tutti_status start(visit *visit) {
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, NULL, visit_main, visit);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0)
        return visit->nvshmem->cuda.host->error_system(error, "a thread for calls of NVSHMEM");
    pthread_setname_np(thread, "tutti-nvshmem");
    pthread_detach(thread);
    return TUTTI_OK;
}

/* How far a rank is in a call that all are in. */
typedef enum state {
    INSIDE,
    THROUGH,
    FAILED,
    EXPIRED /* its deadline has passed: nobody waits any longer */
} state;

typedef struct progress {
    int32_t state;
    int32_t status;  /* of one that failed … */
    char words[248]; /* … and why */
} progress;

/* Waits for the own call, but no longer than until then. */
static bool is_through(const visit *visit, int64_t until) {
    const tu_backend_host *host = visit->nvshmem->cuda.host;
    bool through;
    while (!(through = atomic_load_explicit(&visit->done, memory_order_acquire) != 0) && host->now() < until)
        nanosleep(&(struct timespec){ .tv_nsec = 500000 }, NULL);
    return through;
}

/* What this rank says in a round. */
static progress look(visit *visit, int64_t until, int64_t deadline, outcome *outcome) {
    const tu_backend_host *host = visit->nvshmem->cuda.host;
    progress mine = { .state = INSIDE };
    if (is_through(visit, until)) {
        tutti_status status = outcome != NULL ? outcome(visit->nvshmem, visit->argument) : TUTTI_OK;
        mine.state = status == TUTTI_OK ? THROUGH : FAILED;
        mine.status = (int32_t)status;
        if (status != TUTTI_OK)
            snprintf(mine.words, sizeof mine.words, "%s", host->error_message());
    } else if (host->now() > deadline) {
        mine.state = EXPIRED;
    }
    return mine;
}

/* What all said: whether it is over, and how. */
static tutti_status judge(const tu_backend_host *host, const progress *all, int size, const char *what, bool *over) {
    bool expired = false, inside = false;
    for (int i = 0; i < size; i++) {
        if (all[i].state == FAILED) {
            tutti_status status = host->error((tutti_status)all[i].status, "%.247s", all[i].words);
            host->error_at_fault(i);
            *over = true;
            return status;
        }
        expired = expired || all[i].state == EXPIRED;
        inside = inside || all[i].state == INSIDE;
    }
    *over = expired || !inside;
    return !expired ? TUTTI_OK
                    : host->error(TUTTI_ERROR_TIMEOUT,
                                  "timeout: %s did not come back until the deadline: is a rank missing in NVSHMEM, or "
                                  "does its network not work (NVSHMEM_DEBUG=INFO, NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME)?",
                                  what);
}

#define FIRST_ROUND INT64_C(5000000) /* ns until the ranks tell each other first, then twice as long each time … */
#define LONGEST_ROUND INT64_C(160000000)
#define SLACK INT64_C(2000000000) /* … and how much later than the deadline they may be told that it has passed */

/* Rounds of exchanges, while the call is made on its own thread: so a rank that fails in it, or dies, is known to those
 * who would wait for it inside of NVSHMEM. */
static tutti_status await(visit *visit, tutti_group *group, int64_t deadline, const char *what, outcome *outcome,
                          progress *all) {
    const tu_backend_host *host = visit->nvshmem->cuda.host;
    tutti_status status = TUTTI_OK;
    bool over = false;
    for (int64_t round = FIRST_ROUND; status == TUTTI_OK && !over;
         round = round < LONGEST_ROUND ? 2 * round : LONGEST_ROUND) {
        progress mine = look(visit, host->now() + round, deadline, outcome);
        status = host->exchange(group, what, &mine, sizeof mine, -1, deadline + SLACK, all, NULL);
        if (status == TUTTI_OK)
            status = judge(host, all, host->group_size(group), what, &over);
    }
    return status;
}

/* Of a rank that has no memory for the call: in the first round, the others hear so. */
static tutti_status be_absent(const tu_nvshmem *nvshmem, tutti_group *group, int64_t deadline, const char *what) {
    const tu_backend_host *host = nvshmem->cuda.host;
    progress mine = { .state = FAILED, .status = TUTTI_ERROR_MEMORY };
    snprintf(mine.words, sizeof mine.words, "rank %d is out of memory for a call of NVSHMEM", nvshmem->rank);
    tutti_status status = host->exchange(group, what, &mine, sizeof mine, -1, deadline + SLACK, NULL, NULL);
    return status == TUTTI_OK ? host->error(TUTTI_ERROR_MEMORY, "%s", mine.words) : status;
}

/* Of a call that was never made. */
static tutti_status without_thread(const tu_nvshmem *nvshmem, const void *argument) {
    (void)argument;
    return nvshmem->cuda.host->error(TUTTI_ERROR_MEMORY, "rank %d has no thread for a call of NVSHMEM", nvshmem->rank);
}

tutti_status tu_nvshmem_enter(tu_nvshmem *nvshmem, tutti_group *group, int64_t deadline, const char *what,
                              void (*act)(tu_nvshmem *nvshmem, void *argument), outcome *outcome, void *argument,
                              size_t argument_bytes) {
    const tu_backend_host *host = nvshmem->cuda.host;
    if (nvshmem->lost)
        return host->error(TUTTI_ERROR_STATE,
                           "an earlier call of NVSHMEM did not come back: the process must end first");
    visit *visit = calloc(1, sizeof *visit);
    progress *all = calloc((size_t)host->group_size(group), sizeof *all);
    if (visit == NULL || all == NULL || argument_bytes > sizeof visit->argument) {
        free(visit);
        free(all);
        return be_absent(nvshmem, group, deadline, what);
    }
    visit->nvshmem = nvshmem;
    visit->act = act;
    visit->context = nvshmem->device->context;
    memcpy(visit->argument, argument, argument_bytes);
    if (start(visit) != TUTTI_OK) {
        outcome = without_thread;
        atomic_store_explicit(&visit->done, 1, memory_order_release);
    }
    tutti_status status = await(visit, group, deadline, what, outcome, all);
    free(all);
    int none = 0;
    if (status != TUTTI_OK &&
        atomic_compare_exchange_strong_explicit(&visit->done, &none, 2, memory_order_acq_rel, memory_order_acquire)) {
        nvshmem->lost = true;
        pthread_mutex_lock(&process_lock);
        process.lost = true;
        pthread_mutex_unlock(&process_lock);
        return status;
    }
    memcpy(argument, visit->argument, argument_bytes);
    free(visit);
    return status;
}

/* ---- the environment ---- */

static void map_variable(const tu_nvshmem *nvshmem, const char *from, const char *to, const char *with) {
    const char *value = getenv(from);
    if (value == NULL || value[0] == 0 || getenv(to) != NULL)
        return;
    const tu_backend_host *host = nvshmem->cuda.host;
    if (value[0] == '^') { /* NVSHMEM knows no list of what not to use */
        host->log(nvshmem->cuda.world, TUTTI_LOG_WARN, "nvshmem", "%s=%s cannot be told to NVSHMEM: set %s yourself",
                  from, value, to);
        return;
    }
    value += value[0] == '=';
    setenv(to, value, 0);
    if (with != NULL)
        setenv(with, "1", 0);
    host->log(nvshmem->cuda.world, TUTTI_LOG_INFO, "nvshmem", "%s=%s, from %s", to, value, from);
}

/* Whoever has told NCCL about the network need not tell NVSHMEM. It reads the environment, and nothing else. */
static void map_environment(const tu_nvshmem *nvshmem) {
    map_variable(nvshmem, "NCCL_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", NULL);
    map_variable(nvshmem, "NCCL_IB_HCA", "NVSHMEM_HCA_LIST", "NVSHMEM_ENABLE_NIC_PE_MAPPING");
    map_variable(nvshmem, "NCCL_IB_GID_INDEX", "NVSHMEM_IB_GID_INDEX", NULL);
}

/* ---- who is there ---- */

typedef struct presence {
    int32_t status; /* of NVSHMEM in this process */
    int32_t pe, pe_count;
    int32_t version;
    int32_t kept;           /* slabs that this process has from an earlier world */
    int32_t lost;           /* a call did not come back */
    int32_t without_memory; /* for what the others say */
    uint64_t heap;
    tu_nvshmem_id id; /* rank 0's */
    int32_t id_result;
} presence;

static tutti_status differ(const tu_backend_host *host, tutti_status status, int rank) {
    host->error_at_fault(rank);
    return status;
}

static tutti_status compare(const tu_nvshmem *nvshmem, const presence *all) {
    const tu_backend_host *host = nvshmem->cuda.host;
    const presence *first = &all[0];
    bool entered = first->status >= TU_NVSHMEM_INITIALISED;
    for (int i = 0; i < nvshmem->size; i++) {
        const presence *one = &all[i];
        if (one->without_memory != 0)
            return differ(host, host->error(TUTTI_ERROR_MEMORY, "rank %d is out of memory for NVSHMEM", i), i);
        if (one->lost != 0)
            return differ(host,
                          host->error(TUTTI_ERROR_STATE,
                                      "an earlier call of NVSHMEM did not come back on rank %d: the process must end "
                                      "first",
                                      i),
                          i);
        if (one->heap != first->heap)
            return differ(host,
                          host->error(TUTTI_ERROR_MISMATCH,
                                      "TUTTI_NVSHMEM_HEAP is %llu bytes on rank 0 and %llu on rank "
                                      "%d",
                                      (unsigned long long)first->heap, (unsigned long long)one->heap, i),
                          i);
        if ((one->status >= TU_NVSHMEM_INITIALISED) != entered || one->kept != first->kept)
            return differ(host,
                          host->error(TUTTI_ERROR_STATE,
                                      "NVSHMEM is %s in rank 0's process and %s in rank %d's, with %d "
                                      "and %d slabs of earlier worlds: all must begin alike",
                                      entered ? "initialised" : "not initialised",
                                      one->status >= TU_NVSHMEM_INITIALISED ? "initialised" : "not initialised", i,
                                      first->kept, one->kept),
                          i);
        if (entered && one->pe_count != nvshmem->size)
            return differ(host,
                          host->error(TUTTI_ERROR_UNSUPPORTED,
                                      "rank %d's process was initialised as one of %d processes "
                                      "of NVSHMEM, but the world has %d ranks: they must be the "
                                      "same, since its heap is made by all",
                                      i, one->pe_count, nvshmem->size),
                          i);
    }
    return first->id_result == 0 || entered
               ? TUTTI_OK
               : host->error(TUTTI_ERROR_BACKEND,
                             "NVSHMEM gives rank 0 no unique id (nvshmemx_get_uniqueid: %d): does "
                             "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME name an interface?",
                             first->id_result);
}

static void introduce(tu_nvshmem *nvshmem, presence *mine) {
    const tu_nvshmem_library *library = nvshmem->library;
    *mine = (presence){ .status = library->nvshmemx_init_status(), .version = library->version, .heap = nvshmem->heap };
    pthread_mutex_lock(&process_lock);
    mine->kept = process.slab_count;
    mine->lost = process.lost;
    pthread_mutex_unlock(&process_lock);
    if (mine->status >= TU_NVSHMEM_INITIALISED) {
        mine->pe = library->nvshmem_my_pe();
        mine->pe_count = library->nvshmem_n_pes();
    } else if (nvshmem->rank == 0) { /* one is enough: each opens a socket and starts a thread */
        mine->id.version = TU_NVSHMEM_VERSION(1, tu_nvshmem_id);
        mine->id_result = library->nvshmemx_get_uniqueid(&mine->id);
    }
}

/* ---- entering ---- */

typedef struct entering {
    tu_nvshmem_id id;
    int rank, size, result;
} entering;

static void init_library(tu_nvshmem *nvshmem, void *argument) {
    entering *entering = argument;
    tu_nvshmem_init init = { .version = TU_NVSHMEM_VERSION(1, tu_nvshmem_init) };
    init.args.version = TU_NVSHMEM_VERSION(1, init.args);
    init.args.id.version = TU_NVSHMEM_VERSION(1, tu_nvshmem_id_args);
    entering->result =
        nvshmem->library->nvshmemx_set_attr_uniqueid_args(entering->rank, entering->size, &entering->id, &init);
    if (entering->result == 0)
        entering->result = nvshmem->library->nvshmemx_hostlib_init_attr(TU_NVSHMEM_BY_UNIQUE_ID, &init);
}

static tutti_status entered(const tu_nvshmem *nvshmem, const void *argument) {
    const entering *entering = argument;
    return entering->result == 0
               ? TUTTI_OK
               : nvshmem->cuda.host->error(
                     TUTTI_ERROR_BACKEND,
                     "NVSHMEM does not start on rank %d (nvshmemx_hostlib_init_attr: %d): NVSHMEM_DEBUG=INFO says why; "
                     "without a network NVSHMEM_REMOTE_TRANSPORT=none helps",
                     entering->rank, entering->result);
}

static const char *status_text(int status) {
    return status == TU_NVSHMEM_LIMITED_SHARING
               ? "several processes share a GPU without enough of MPS: memory, puts and signals work, teams do not"
           : status == TU_NVSHMEM_FULL_SHARING ? "several processes share a GPU, under MPS"
                                               : "a GPU for each process";
}

/* All enter at once; each knows afterwards that all did, and which PE each is. */
static tutti_status enter_library(tu_nvshmem *nvshmem, tutti_group *group, int64_t deadline, presence *all) {
    const tu_backend_host *host = nvshmem->cuda.host;
    tutti_status status = TUTTI_OK;
    if (all[0].status < TU_NVSHMEM_INITIALISED) {
        entering entering = { .id = all[0].id, .rank = nvshmem->rank, .size = nvshmem->size };
        status = tu_nvshmem_enter(nvshmem, group, deadline, "the initialisation of NVSHMEM", init_library, entered,
                                  &entering, sizeof entering);
    }
    if (status != TUTTI_OK)
        return status;
    nvshmem->status = nvshmem->library->nvshmemx_init_status();
    int32_t mine = nvshmem->library->nvshmem_my_pe();
    status = host->exchange(group, "PEs of NVSHMEM", &mine, sizeof mine, -1, deadline, nvshmem->pes, NULL);
    host->log(nvshmem->cuda.world, TUTTI_LOG_INFO, "nvshmem", "NVSHMEM %d.%d.%d, PE %d of %d, status %d: %s",
              nvshmem->library->version / 10000, nvshmem->library->version / 100 % 100, nvshmem->library->version % 100,
              mine, nvshmem->size, nvshmem->status, status_text(nvshmem->status));
    return status;
}

/* ---- the heap ---- */

typedef struct reserving {
    size_t bytes;
    void *base;
} reserving;

static void reserve(tu_nvshmem *nvshmem, void *argument) {
    reserving *reserving = argument;
    reserving->base = nvshmem->library->nvshmem_malloc(reserving->bytes);
}

static tutti_status begin_slab(tu_nvshmem *nvshmem) {
    pthread_mutex_lock(&nvshmem->heap_lock);
    tutti_status status = tu_nvshmem_slab_begin(nvshmem);
    pthread_mutex_unlock(&nvshmem->heap_lock);
    return status;
}

static void add_slab(tu_nvshmem *nvshmem, void *base, size_t bytes) {
    pthread_mutex_lock(&nvshmem->heap_lock);
    tu_nvshmem_slab_add(nvshmem, base, bytes);
    pthread_mutex_unlock(&nvshmem->heap_lock);
}

/* What this rank can do before a new slab is made. */
static tutti_status begin_growth(tu_nvshmem *nvshmem) {
    pthread_mutex_lock(&process_lock);
    bool split = process.split;
    pthread_mutex_unlock(&process_lock);
    return !split
               ? begin_slab(nvshmem)
               : nvshmem->cuda.host->error(TUTTI_ERROR_STATE,
                                           "an earlier nvshmem_malloc gave memory to some ranks alone, and NVSHMEM's "
                                           "heaps are not alike since: the process must end first");
}

/* Whether all ranks have memory: they number slabs alike, so one that somebody lacks is used by nobody. */
static tutti_status compare_slabs(const tu_nvshmem *nvshmem, const unsigned char *made, size_t bytes) {
    const tu_backend_host *host = nvshmem->cuda.host;
    const unsigned char *lacking = memchr(made, 0, (size_t)nvshmem->size);
    if (lacking == NULL)
        return TUTTI_OK;
    int rank = (int)(lacking - made);
    pthread_mutex_lock(&process_lock);
    process.split = process.split || memchr(made, 1, (size_t)nvshmem->size) != NULL;
    pthread_mutex_unlock(&process_lock);
    tutti_status status =
        host->error(TUTTI_ERROR_MEMORY,
                    "NVSHMEM has no %zu bytes on rank %d: choose a smaller TUTTI_NVSHMEM_HEAP or growth, or allow "
                    "more by NVSHMEM_MAX_MEMORY_PER_GPU (NVSHMEM_SYMMETRIC_SIZE with NVSHMEM_DISABLE_CUDA_VMM)",
                    bytes, rank);
    host->error_at_fault(rank);
    return status;
}

/* A new slab, by all at once. `own`: how it went on this rank so far. */
static tutti_status reserve_slab(tu_nvshmem *nvshmem, tutti_group *group, size_t bytes, int64_t deadline,
                                 tutti_status own) {
    const tu_backend_host *host = nvshmem->cuda.host;
    reserving reserving = { .bytes = bytes };
    unsigned char mine, *made = calloc((size_t)nvshmem->size, 1);
    if (own == TUTTI_OK)
        own = made != NULL ? begin_growth(nvshmem) : host->error(TUTTI_ERROR_MEMORY, "out of memory for a new slab");
    tutti_status status = tu_cuda_agree(host, group, "before NVSHMEM's heap", deadline, own);
    if (status == TUTTI_OK)
        status =
            tu_nvshmem_enter(nvshmem, group, deadline, "nvshmem_malloc", reserve, NULL, &reserving, sizeof reserving);
    mine = reserving.base != NULL;
    if (status == TUTTI_OK)
        status = host->exchange(group, "NVSHMEM's heap", &mine, sizeof mine, -1, deadline, made, NULL);
    if (status == TUTTI_OK)
        status = compare_slabs(nvshmem, made, bytes);
    free(made);
    if (status != TUTTI_OK)
        return status;
    add_slab(nvshmem, reserving.base, bytes);
    pthread_mutex_lock(&process_lock);
    process.slabs[process.slab_count].base = reserving.base;
    process.slabs[process.slab_count++].bytes = bytes;
    pthread_mutex_unlock(&process_lock);
    return TUTTI_OK;
}

/* The slabs of an earlier world of this process, or a first one. */
static tutti_status find_slabs(tu_nvshmem *nvshmem, tutti_group *group, int kept, int64_t deadline) {
    size_t total = 0;
    tutti_status own = TUTTI_OK;
    for (int i = 0; i < kept; i++) {
        if (own == TUTTI_OK)
            own = begin_slab(nvshmem);
        if (own == TUTTI_OK)
            add_slab(nvshmem, process.slabs[i].base, process.slabs[i].bytes);
        total += process.slabs[i].bytes;
    }
    return total < nvshmem->heap ? reserve_slab(nvshmem, group, nvshmem->heap - total, deadline, own)
                                 : tu_cuda_agree(nvshmem->cuda.host, group, "NVSHMEM's heap", deadline, own);
}

tutti_status tu_nvshmem_grow(void *state, tutti_group *world, size_t bytes, int64_t deadline) {
    tu_nvshmem *nvshmem = state;
    const tu_backend_host *host = nvshmem->cuda.host;
    tutti_status own = TUTTI_OK;
    if (nvshmem->lost)
        own =
            host->error(TUTTI_ERROR_STATE, "an earlier call of NVSHMEM did not come back: the process must end first");
    else if (bytes > SIZE_MAX - 511)
        own = host->error(TUTTI_ERROR_MEMORY, "NVSHMEM's heap cannot grow by %zu bytes", bytes);
    return reserve_slab(nvshmem, world, (bytes + 511) / 512 * 512, deadline, own);
}

/* ---- kernels ---- */

static tutti_status load_kernels(tu_nvshmem *nvshmem) {
    static const char *const names[TU_NVSHMEM_KERNELS] = { [TU_NVSHMEM_SIGNAL] = "tutti_nvshmem_signal",
                                                           [TU_NVSHMEM_EXCHANGE] = "tutti_nvshmem_exchange",
                                                           [TU_NVSHMEM_PLAN] = "tutti_nvshmem_plan",
                                                           [TU_NVSHMEM_TAKE] = "tutti_nvshmem_take" };
    const tu_cuda_driver *driver = &nvshmem->cuda.driver;
    if (tu_nvshmem_has_image[0] == 0)
        return TUTTI_OK; /* peers that are not mapped will be refused */
    tutti_status status = tu_cuda_enter(&nvshmem->cuda, nvshmem->device);
    if (status != TUTTI_OK)
        return status;
    pthread_mutex_lock(&process_lock);
    CUmodule module = process.module;
    pthread_mutex_unlock(&process_lock);
    bool loaded = module != NULL;
    CUresult result = loaded ? CUDA_SUCCESS : driver->cuModuleLoadData(&module, tu_nvshmem_image);
    nvshmem->module = module;
    for (int i = 0; result == CUDA_SUCCESS && i < TU_NVSHMEM_KERNELS; i++) {
        result = driver->cuModuleGetFunction(&nvshmem->kernels[i], nvshmem->module, names[i]);
        if (result == CUDA_SUCCESS && driver->cuFuncLoad != NULL)
            result = driver->cuFuncLoad(nvshmem->kernels[i]);
    }
    int initialised = result == CUDA_SUCCESS && !loaded ? nvshmem->library->nvshmemx_cumodule_init(module) : 0;
    if (result == CUDA_SUCCESS && initialised == 0) {
        pthread_mutex_lock(&process_lock);
        process.module = module; /* for the next world of this process too */
        pthread_mutex_unlock(&process_lock);
    }
    if ((result != CUDA_SUCCESS || initialised != 0) && !loaded) {
        if (module != NULL)
            driver->cuModuleUnload(module); /* the next attempt loads it again */
        nvshmem->module = NULL;
    }
    tu_cuda_leave(&nvshmem->cuda);
    if (result != CUDA_SUCCESS)
        return tu_cuda_error(&nvshmem->cuda, result, "loading the kernels that use NVSHMEM");
    if (initialised != 0)
        return nvshmem->cuda.host->error(
            TUTTI_ERROR_BACKEND,
            "NVSHMEM refuses Tutti's kernels (nvshmemx_cumodule_init: %d): they were built "
            "with another version of its device library",
            initialised);
    return TUTTI_OK;
}

/* ---- all of it ---- */

/* One world of a process at a time has it; ranks that are threads have a world each. */
static tutti_status take_process(tu_nvshmem *nvshmem) {
    pthread_mutex_lock(&process_lock);
    bool lost = process.lost;
    nvshmem->holds = !process.taken && !lost;
    process.taken = true;
    pthread_mutex_unlock(&process_lock);
    if (nvshmem->holds)
        return TUTTI_OK;
    return nvshmem->cuda.host->error(
        lost ? TUTTI_ERROR_STATE : TUTTI_ERROR_UNSUPPORTED, "%s",
        lost ? "an earlier call of NVSHMEM did not come back: the process must end first"
             : "another world of this process has NVSHMEM: it takes one process for each rank, and one world at a time "
               "(ranks cannot be threads)");
}

tutti_status tu_nvshmem_begin(tu_nvshmem *nvshmem) {
    const tu_backend_host *host = nvshmem->cuda.host;
    tutti_world *world = nvshmem->cuda.world;
    int64_t heap = host->setting_number(world, "TUTTI_NVSHMEM_HEAP");
    int64_t teams = host->setting_number(world, "TUTTI_NVSHMEM_TEAMS");
    if (heap <= 0)
        return host->error(TUTTI_ERROR_ARGUMENT, "TUTTI_NVSHMEM_HEAP is %s: there is no heap of that size",
                           host->setting(world, "TUTTI_NVSHMEM_HEAP"));
    nvshmem->heap = (size_t)heap;
    nvshmem->mapping = host->setting_number(world, "TUTTI_NVSHMEM_MAP") != 0;
    nvshmem->team_limit = teams < INT_MAX ? (int)teams : INT_MAX;
    tutti_status status = tu_cuda_device_open(&nvshmem->cuda, -1, &nvshmem->device, &nvshmem->device_index);
    return status == TUTTI_OK ? take_process(nvshmem) : status;
}

void tu_nvshmem_end(tu_nvshmem *nvshmem) {
    free(nvshmem->pes);
    tu_nvshmem_awaited_free(nvshmem);
    tu_nvshmem_teams_free(nvshmem);
    tu_nvshmem_slabs_free(nvshmem);
    if (!nvshmem->holds)
        return;
    pthread_mutex_lock(&process_lock);
    process.taken = false;
    pthread_mutex_unlock(&process_lock);
}

static tutti_status join_all(tu_nvshmem *nvshmem, tutti_group *world, int64_t deadline, presence *all,
                             bool has_memory) {
    const tu_backend_host *host = nvshmem->cuda.host;
    presence mine;
    map_environment(nvshmem);
    introduce(nvshmem, &mine);
    mine.without_memory = !has_memory;
    tutti_status status = host->exchange(world, "before NVSHMEM", &mine, sizeof mine, -1, deadline, all, NULL);
    if (status == TUTTI_OK && !has_memory)
        status = host->error(TUTTI_ERROR_MEMORY, "out of memory for NVSHMEM with %d ranks", nvshmem->size);
    if (status == TUTTI_OK)
        status = compare(nvshmem, all);
    if (status == TUTTI_OK)
        status = enter_library(nvshmem, world, deadline, all);
    if (status == TUTTI_OK)
        status = find_slabs(nvshmem, world, all[0].kept, deadline);
    if (status == TUTTI_OK)
        tu_nvshmem_find_domain(nvshmem);
    return status == TUTTI_OK ? load_kernels(nvshmem) : status;
}

tutti_status tu_nvshmem_join(void *state, tutti_group *world, int64_t deadline) {
    tu_nvshmem *nvshmem = state;
    const tu_backend_host *host = nvshmem->cuda.host;
    nvshmem->rank = host->group_rank(world);
    nvshmem->size = host->group_size(world);
    tu_nvshmem_slabs_free(nvshmem); /* of an attempt that failed */
    free(nvshmem->pes);
    nvshmem->pes = calloc((size_t)nvshmem->size, sizeof *nvshmem->pes);
    presence *all = calloc((size_t)nvshmem->size, sizeof *all);
    tutti_status status = join_all(nvshmem, world, deadline, all, nvshmem->pes != NULL && all != NULL);
    free(all);
    return status;
}
