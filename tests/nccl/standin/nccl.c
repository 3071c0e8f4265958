/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for NCCL, as a library libnccl.so.2, whose ranks are threads of one process. Windows map the memory of all
 * ranks by the driver's virtual memory management, as NCCL does for GPUs that reach each other: with the driver, or
 * with its stand-in. Collectives compute on the host, so they need the driver's stand-in.
 *
 * standin_nccl_set(what, value) makes it behave as NCCL may:
 *     "version"   what ncclGetVersion says
 *     "lsa"       1: all ranks are one domain; 0: each is one of its own
 *     "window"    1: windows are real; 0: success and a null window; 2: a window for this rank alone;
 *                 3: one in which every address is this rank's own
 *     "stuck"     1: collectives stay in the stream until an abort (standin_cuda_hold)
 *     "inside"    1: the next collective stays inside of its call until an abort or a revocation
 *                 2: until it is stopped on this rank; then it says that all went well, as one just through
 *     "init"      0: a communicator is never ready
 *     "split"     0: one that is split from another is not there before the other is aborted
 *     "error"     what ncclCommGetAsyncError tells once a communicator is there
 *
 * standin_nccl_fail_call(n) lets the n-th call of the calling thread fail, but for those that give something back.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/cuda/driver.h"
#include "base/float16.h"
#include "library.h"

#define EXPORT __attribute__((visibility("default")))
#define RANKS 8
#define OPERATIONS 64
#define STRIDE ((size_t)1 << 32)
#define FACTOR ((ncclRedOp_t)5) /* the operator that a factor was made for: one at a time */

/* The functions that the backend looks for, with its own declarations. */
#define X(since, name, result, parameters) EXPORT result name parameters;
TU_NCCL_FUNCTIONS(X)
#undef X

static _Atomic int version_told = 22809, lsa = 1, window_kind = 1, stuck, inside, init_ready = 1, split_ready = 1,
                   error_told;
static _Atomic int alive, windows, blocks; /* communicators, windows, blocks that exist */
static _Atomic int revoked;                /* communicators that were revoked */

EXPORT void standin_nccl_set(const char *what, int value);
EXPORT int standin_nccl_count(const char *what);

void standin_nccl_set(const char *what, int value) {
    _Atomic int *known = strcmp(what, "version") == 0  ? &version_told
                         : strcmp(what, "lsa") == 0    ? &lsa
                         : strcmp(what, "window") == 0 ? &window_kind
                         : strcmp(what, "stuck") == 0  ? &stuck
                         : strcmp(what, "inside") == 0 ? &inside
                         : strcmp(what, "init") == 0   ? &init_ready
                         : strcmp(what, "split") == 0  ? &split_ready
                                                       : &error_told;
    atomic_store(known, value);
}

int standin_nccl_count(const char *what) {
    return strcmp(what, "communicators") == 0 ? alive
           : strcmp(what, "windows") == 0     ? windows
           : strcmp(what, "revoked") == 0     ? revoked
                                              : blocks;
}

/* ---- calls that fail ---- */

#define CALLS 2048
static _Thread_local int calls_left, calls_made; /* until one fails; and so far, since standin_nccl_fail_call */
static _Thread_local bool counts_calls;
static _Thread_local const char *names[CALLS];
static _Thread_local int depth;    /* of groups */
static _Thread_local bool spoiled; /* a call of the group failed: its end does, and runs nothing */

EXPORT void standin_nccl_fail_call(int nth);
EXPORT int standin_nccl_calls_left(void);
EXPORT const char *standin_nccl_call_made(int nth);

void standin_nccl_fail_call(int nth) {
    calls_left = nth;
    calls_made = 0;
    counts_calls = nth > 0;
}

int standin_nccl_calls_left(void) {
    return calls_left;
}

const char *standin_nccl_call_made(int nth) {
    return nth <= calls_made ? names[nth - 1] : NULL;
}

/* A question that is asked again and again counts once: how often depends on the moment. */
static bool fails(const char *name) {
    if (!counts_calls || calls_made == CALLS || (calls_made > 0 && strcmp(names[calls_made - 1], name) == 0))
        return false;
    names[calls_made++] = name;
    bool failed = calls_left > 0 && --calls_left == 0;
    spoiled = spoiled || (failed && depth > 0);
    return failed;
}

/* ---- the driver ---- */

typedef CUresult get_proc_address(const char *symbol, void **function, int version, uint64_t flags, int *status);
static tu_cuda_driver driver;
static void (*hold)(int more);
static int (*give)(CUstream stream, void (*run)(void *), const void *argument, size_t bytes);
static void (*pause_calls)(int more);
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void load_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    get_proc_address *get = (get_proc_address *)(uintptr_t)dlsym(library, "cuGetProcAddress_v2");
#define X(required, name, since, parameters) get(#name, (void **)&driver.name, since > 11030 ? since : 11030, 0, NULL);
    TU_CUDA_FUNCTIONS(X)
#undef X
    *(void **)&hold = dlsym(library, "standin_cuda_hold"); /* the driver itself has neither */
    *(void **)&give = dlsym(library, "standin_cuda_give");
    *(void **)&pause_calls = dlsym(library, "standin_pause_calls");
}

/* In a function that calls the driver: whoever lets calls of it fail does not mean these. */
#define IN_DRIVER __attribute__((cleanup(leave_driver), unused)) int in_driver = enter_driver()

static int enter_driver(void) {
    pthread_once(&once, load_driver);
    if (pause_calls != NULL)
        pause_calls(1);
    return 0;
}

static void leave_driver(const int *in_driver) {
    (void)in_driver;
    if (pause_calls != NULL)
        pause_calls(-1);
}

/* ---- communicators ---- */

typedef struct operation {
    enum {
        SEND,
        RECEIVE,
        REDUCE,
        GATHER,
        BROADCAST
    } kind;
    const unsigned char *in;
    unsigned char *out;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int root;      /* of a reduction: -1 all, -2 each its part; of a message: the peer */
    double factor; /* of this rank's elements */
} operation;

/* What all ranks of a communicator share. */
typedef struct clique {
    char id[NCCL_UNIQUE_ID_BYTES];
    int size, joined, left, arrived;
    unsigned generation;
    bool aborted;
    const operation *lists[RANKS];
    int lengths[RANKS];
    void *addresses[RANKS];
    struct clique *next;
} clique;

struct ncclComm {
    clique *clique;
    int rank;
    bool holds, stopped;
    double factor;
    ncclComm_t late, *late_to; /* being split from this one, and where it goes */
    struct host_window *windows;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static clique *cliques;
static int ids;
static _Thread_local operation list[OPERATIONS];
static _Thread_local int listed;
static _Thread_local ncclComm_t list_comm;
static _Thread_local CUstream list_stream;

/* All ranks come; false: aborted. */
static bool meet(clique *all) {
    pthread_mutex_lock(&lock);
    unsigned generation = all->generation;
    if (++all->arrived == all->size) {
        all->arrived = 0;
        all->generation++;
        pthread_cond_broadcast(&changed);
    }
    while (all->generation == generation && !all->aborted)
        pthread_cond_wait(&changed, &lock);
    bool together = !all->aborted;
    pthread_mutex_unlock(&lock);
    return together;
}

ncclResult_t ncclGetVersion(int *version) {
    const char *told = getenv("STANDIN_NCCL_VERSION"); /* for programs that cannot set it */
    *version = told != NULL ? atoi(told) : version_told;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    if (fails(__func__))
        return ncclSystemError;
    pthread_mutex_lock(&lock);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "stand-in %d", ++ids);
    pthread_mutex_unlock(&lock);
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    return result == ncclSuccess ? "no error" : "an error of the stand-in";
}

const char *ncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return "";
}

static ncclResult_t join(ncclComm_t *comm, int size, const ncclUniqueId *id, int rank, const ncclConfig_t *config) {
    if (config->size != sizeof *config || config->magic != TU_NCCL_CONFIG_MAGIC)
        return ncclInvalidArgument;
    pthread_mutex_lock(&lock);
    clique *all = cliques;
    while (all != NULL && memcmp(all->id, id->internal, sizeof all->id) != 0)
        all = all->next;
    if (all == NULL) {
        all = calloc(1, sizeof *all);
        memcpy(all->id, id->internal, sizeof all->id);
        all->size = size;
        all->next = cliques;
        cliques = all;
    }
    all->joined++;
    pthread_mutex_unlock(&lock);
    *comm = calloc(1, sizeof **comm);
    **comm = (struct ncclComm){ .clique = all, .rank = rank };
    atomic_fetch_add(&alive, 1);
    return ncclInProgress;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    if (fails(__func__))
        return ncclSystemError;
    pthread_once(&once, load_driver);
    return config->blocking == 0 ? join(comm, size, &id, rank, config) : ncclInvalidArgument;
}

/* All ranks of the other communicator, in one of their own. */
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, ncclConfig_t *config) {
    if (fails(__func__))
        return ncclSystemError;
    ncclUniqueId id;
    if (color != 0 || key != comm->rank)
        return ncclInvalidArgument;
    memset(&id, 0, sizeof id);
    snprintf(id.internal, sizeof id.internal, "split of %.100s", comm->clique->id);
    if (split_ready)
        return join(made, comm->clique->size, &id, comm->rank, config);
    comm->late_to = made;
    *made = NULL;
    return join(&comm->late, comm->clique->size, &id, comm->rank, config);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    if (fails(__func__))
        return ncclSystemError;
    pthread_mutex_lock(&lock);
    bool ready = init_ready && comm->clique->joined == comm->clique->size && comm->late == NULL;
    pthread_mutex_unlock(&lock);
    *error = !ready ? ncclInProgress : (ncclResult_t)error_told;
    return ncclSuccess;
}

static void drop_windows(ncclComm_t comm);

/* One rank less; the last takes the rest with it. */
static void leave(ncclComm_t comm) {
    clique *all = comm->clique;
    drop_windows(comm);
    pthread_mutex_lock(&lock);
    bool last = ++all->left == all->joined;
    for (clique **link = &cliques; last && *link != NULL; link = &(*link)->next) {
        if (*link == all) {
            *link = all->next;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    if (last)
        free(all);
    free(comm);
    atomic_fetch_sub(&alive, 1);
}

static void stop(ncclComm_t comm) {
    pthread_mutex_lock(&lock);
    comm->clique->aborted = true;
    comm->stopped = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    if (comm->holds)
        hold(-1);
    comm->holds = false;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    stop(comm);
    if (comm->late != NULL) /* the thread that makes it ends first */
        *comm->late_to = comm->late;
    leave(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
    (void)flags;
    stop(comm);
    atomic_fetch_add(&revoked, 1);
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    (void)comm;
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    leave(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
    if (fails(__func__))
        return ncclSystemError;
    *count = comm->clique->size;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    if (fails(__func__))
        return ncclSystemError;
    *rank = comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
    (void)comm;
    *device = 0;
    return ncclSuccess;
}

/* ---- collectives ---- */

static size_t bytes_of(ncclDataType_t type) {
    static const size_t bytes[] = { 1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1 };
    return bytes[type];
}

static double get(const unsigned char *from, ncclDataType_t type, size_t index) {
    switch (type) {
    case ncclFloat64:
        return ((const double *)(const void *)from)[index];
    case ncclFloat32:
        return ((const float *)(const void *)from)[index];
    case ncclInt32:
        return ((const int32_t *)(const void *)from)[index];
    case ncclInt64:
        return (double)((const int64_t *)(const void *)from)[index];
    case ncclFloat16:
        return tu_f16_to_f32(((const uint16_t *)(const void *)from)[index]);
    case ncclBfloat16:
        return tu_bf16_to_f32(((const uint16_t *)(const void *)from)[index]);
    case ncclFloat8e4m3:
        return tu_e4m3_to_f32(from[index]);
    case ncclFloat8e5m2:
        return tu_e5m2_to_f32(from[index]);
    default:
        return from[index];
    }
}

static void put(unsigned char *to, ncclDataType_t type, size_t index, double value) {
    switch (type) {
    case ncclFloat64:
        ((double *)(void *)to)[index] = value;
        return;
    case ncclFloat32:
        ((float *)(void *)to)[index] = (float)value;
        return;
    case ncclInt32:
        ((int32_t *)(void *)to)[index] = (int32_t)value;
        return;
    case ncclInt64:
        ((int64_t *)(void *)to)[index] = (int64_t)value;
        return;
    case ncclFloat16:
        ((uint16_t *)(void *)to)[index] = tu_f32_to_f16((float)value);
        return;
    case ncclBfloat16:
        ((uint16_t *)(void *)to)[index] = tu_f32_to_bf16((float)value);
        return;
    case ncclFloat8e4m3:
        to[index] = tu_f32_to_e4m3((float)value);
        return;
    case ncclFloat8e5m2:
        to[index] = tu_f32_to_e5m2((float)value);
        return;
    default:
        to[index] = (unsigned char)value;
    }
}

static double combine(double sum, double value, ncclRedOp_t op) {
    switch (op) {
    case ncclProd:
        return sum * value;
    case ncclMax:
        return sum > value ? sum : value;
    case ncclMin:
        return sum < value ? sum : value;
    default:
        return sum + value;
    }
}

/* Operation `which` of all ranks, element by element, beginning with `first`. */
static void reduce(const clique *all, int which, size_t first, size_t count, unsigned char *to) {
    const operation *own = &all->lists[0][which];
    for (size_t i = 0; i < count; i++) {
        double sum = 0;
        for (int rank = 0; rank < all->size; rank++) {
            double value = get(all->lists[rank][which].in, own->type, first + i);
            if (own->op == FACTOR)
                value *= all->lists[rank][which].factor;
            sum = rank == 0 ? value : combine(sum, value, own->op);
        }
        put(to, own->type, i, own->op == ncclAvg ? sum / all->size : sum);
    }
}

/* The send of `peer` to `rank` that belongs to receive number `turn` from it. */
static const operation *matching(const clique *all, int peer, int rank, int turn) {
    for (int i = 0; i < all->lengths[peer]; i++) {
        const operation *one = &all->lists[peer][i];
        if (one->kind == SEND && one->root == rank && turn-- == 0)
            return one;
    }
    return NULL;
}

/* What this rank gets of operation `which`; NULL: nothing. */
static unsigned char *perform(const clique *all, int rank, int which, size_t *bytes) {
    const operation *own = &all->lists[rank][which];
    size_t size = (size_t)all->size, one = own->count * bytes_of(own->type);
    *bytes = own->kind == GATHER ? one * size : one;
    unsigned char *result = malloc(*bytes + 1);
    int turn = 0;
    switch (own->kind) {
    case RECEIVE:
        for (int i = 0; i < which; i++)
            turn += all->lists[rank][i].kind == RECEIVE && all->lists[rank][i].root == own->root;
        memcpy(result, matching(all, own->root, rank, turn)->in, one);
        return result;
    case REDUCE:
        if (own->root < 0 || own->root == rank)
            reduce(all, which, own->root == -2 ? (size_t)rank * own->count : 0, own->count, result);
        if (own->root < 0 || own->root == rank)
            return result;
        break;
    case GATHER:
        for (size_t i = 0; i < size; i++)
            memcpy(result + i * one, all->lists[i][which].in, one);
        return result;
    case BROADCAST:
        memcpy(result, all->lists[own->root][which].in, one);
        return result;
    default:
        break;
    }
    free(result);
    return NULL;
}

/* The list of all ranks, together. */
static ncclResult_t run(ncclComm_t comm) {
    clique *all = comm->clique;
    unsigned char *results[OPERATIONS];
    size_t bytes[OPERATIONS];
    all->lists[comm->rank] = list;
    all->lengths[comm->rank] = listed;
    bool together = meet(all);
    for (int i = 0; i < listed && together; i++)
        results[i] = perform(all, comm->rank, i, &bytes[i]);
    bool still = together && meet(all);
    for (int i = 0; i < listed && together; i++) {
        if (results[i] != NULL && still)
            memcpy(list[i].out, results[i], bytes[i]);
        free(results[i]);
    }
    still = still && meet(all);
    listed = 0;
    return still ? ncclSuccess : ncclInternalError;
}

/* A list that a graph keeps. */
typedef struct captured {
    ncclComm_t comm;
    int length;
    operation list[OPERATIONS];
} captured;

static void replay(void *argument) {
    const captured *one = argument;
    memcpy(list, one->list, (size_t)one->length * sizeof *list);
    listed = one->length;
    (void)run(one->comm);
}

/* Now, or when the graph is launched that captures the stream. */
static ncclResult_t run_in_stream(ncclComm_t comm) {
    captured one = { .comm = comm, .length = listed };
    memcpy(one.list, list, (size_t)listed * sizeof *list);
    if (give == NULL || !give(list_stream, replay, &one, sizeof one))
        return run(comm);
    listed = 0;
    return ncclSuccess;
}

/* Outside of a group an operation is a list of one. */
static ncclResult_t note(ncclComm_t comm, operation one, CUstream stream) {
    if (inside) {
        pthread_mutex_lock(&lock);
        while (inside == 2 ? !comm->stopped : !comm->clique->aborted)
            pthread_cond_wait(&changed, &lock);
        pthread_mutex_unlock(&lock);
        return inside == 2 ? ncclSuccess : ncclInternalError;
    }
    if (stuck) { /* it is in the stream, and stays there */
        if (!comm->holds)
            hold(1);
        comm->holds = true;
        return ncclSuccess;
    }
    if (listed == OPERATIONS)
        return ncclInternalError;
    one.factor = comm->factor;
    list[listed++] = one;
    list_comm = comm;
    list_stream = stream;
    return depth > 0 ? ncclSuccess : run_in_stream(comm);
}

ncclResult_t ncclGroupStart(void) {
    if (fails(__func__))
        return ncclSystemError;
    depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    (void)fails(__func__);
    if (--depth == 0 && spoiled) {
        listed = 0;
        spoiled = false;
        return ncclSystemError;
    }
    return depth == 0 && list_comm != NULL && !stuck ? run_in_stream(list_comm) : ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, struct CUstream_st *stream) {
    if (fails(__func__))
        return ncclSystemError;
    return note(comm, (operation){ REDUCE, in, out, count, type, op, -1 }, stream);
}

ncclResult_t ncclReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, struct CUstream_st *stream) {
    if (fails(__func__))
        return ncclSystemError;
    return note(comm, (operation){ REDUCE, in, out, count, type, op, root }, stream);
}

ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, struct CUstream_st *stream) {
    if (fails(__func__))
        return ncclSystemError;
    return note(comm, (operation){ REDUCE, in, out, count, type, op, -2 }, stream);
}

ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type, ncclComm_t comm,
                           struct CUstream_st *stream) {
    if (fails(__func__))
        return ncclSystemError;
    return note(comm, (operation){ GATHER, in, out, count, type, ncclSum, -1 }, stream);
}

ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           struct CUstream_st *stream) {
    if (fails(__func__))
        return ncclSystemError;
    return note(comm, (operation){ BROADCAST, in, out, count, type, ncclSum, root }, stream);
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      struct CUstream_st *stream) {
    if (fails(__func__))
        return ncclSystemError;
    return note(comm, (operation){ SEND, from, NULL, count, type, ncclSum, peer }, stream);
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      struct CUstream_st *stream) {
    if (fails(__func__))
        return ncclSystemError;
    return note(comm, (operation){ RECEIVE, NULL, to, count, type, ncclSum, peer }, stream);
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type, ncclScalarResidence_t where,
                                      ncclComm_t comm) {
    if (fails(__func__))
        return ncclSystemError;
    if (where != ncclScalarHostImmediate)
        return ncclInvalidArgument;
    comm->factor = get(scalar, type, 0);
    *op = FACTOR;
    return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
    (void)op;
    (void)comm;
    return ncclSuccess;
}

/* ---- memory and windows ---- */

typedef struct block {
    void *address;
    size_t bytes;
    struct block *next;
} block;
static block *all_blocks; /* under lock */

static size_t rounded(size_t bytes) {
    CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR };
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    size_t granularity = 1;
    driver.cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    return (bytes + granularity - 1) / granularity * granularity;
}

static CUresult map_at(CUdeviceptr address, size_t bytes, CUmemGenericAllocationHandle handle) {
    CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, 0 }, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    CUresult result = driver.cuMemMap(address, bytes, 0, handle, 0);
    return result == CUDA_SUCCESS ? driver.cuMemSetAccess(address, bytes, &access, 1) : result;
}

ncclResult_t ncclMemAlloc(void **address, size_t bytes) {
    if (fails(__func__))
        return ncclSystemError;
    IN_DRIVER;
    CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR };
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    bytes = rounded(bytes);
    if (driver.cuMemCreate(&handle, bytes, &prop, 0) != CUDA_SUCCESS ||
        driver.cuMemAddressReserve(&at, bytes, 0, 0, 0) != CUDA_SUCCESS || map_at(at, bytes, handle) != CUDA_SUCCESS)
        return ncclUnhandledCudaError;
    driver.cuMemRelease(handle);
    driver.cuMemsetD8Async(at, 0xa5, bytes, NULL); /* nobody promised zeros */
    driver.cuStreamSynchronize(NULL); /* before other streams, which do not wait for this one, write there */
    block *made = malloc(sizeof *made);
    pthread_mutex_lock(&lock);
    *made = (block){ (void *)(uintptr_t)at, bytes, all_blocks };
    all_blocks = made;
    pthread_mutex_unlock(&lock);
    atomic_fetch_add(&blocks, 1);
    *address = made->address;
    return ncclSuccess;
}

ncclResult_t ncclMemFree(void *address) {
    IN_DRIVER;
    size_t bytes = 0;
    pthread_mutex_lock(&lock);
    for (block **link = &all_blocks; *link != NULL; link = &(*link)->next) {
        block *one = *link;
        if (one->address != address)
            continue;
        bytes = one->bytes;
        *link = one->next;
        free(one);
        break;
    }
    pthread_mutex_unlock(&lock);
    if (bytes == 0)
        return ncclInvalidArgument;
    driver.cuMemUnmap((CUdeviceptr)(uintptr_t)address, bytes);
    driver.cuMemAddressFree((CUdeviceptr)(uintptr_t)address, bytes);
    atomic_fetch_sub(&blocks, 1);
    return ncclSuccess;
}

/* What the host keeps of a window. */
typedef struct host_window {
    CUdeviceptr base, there; /* where the members are mapped, and where the device finds that */
    size_t bytes;
    int size, rank;
    bool mapped[RANKS];
    struct host_window *next; /* of the communicator */
} host_window;

static bool map_member(host_window *made, int rank, void *address) {
    CUmemGenericAllocationHandle handle;
    if (driver.cuMemRetainAllocationHandle(&handle, address) != CUDA_SUCCESS)
        return false;
    made->mapped[rank] = map_at(made->base + (CUdeviceptr)rank * STRIDE, made->bytes, handle) == CUDA_SUCCESS;
    driver.cuMemRelease(handle);
    return made->mapped[rank];
}

static void free_window(host_window *made) {
    for (int i = 0; i < made->size; i++)
        if (made->mapped[i])
            driver.cuMemUnmap(made->base + (CUdeviceptr)i * STRIDE, made->bytes);
    driver.cuMemAddressFree(made->base, STRIDE * (size_t)made->size);
    free(made);
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *address, size_t bytes, ncclWindow_t *window, int flags) {
    if (fails(__func__))
        return ncclSystemError;
    IN_DRIVER;
    clique *all = comm->clique;
    if (((uintptr_t)address & (NCCL_WIN_REQUIRED_ALIGNMENT - 1)) != 0 || flags != NCCL_WIN_COLL_SYMMETRIC)
        return ncclInvalidArgument;
    all->addresses[comm->rank] = address;
    if (!meet(all))
        return ncclInternalError;
    host_window *made = calloc(1, sizeof *made);
    *made = (host_window){ .bytes = rounded(bytes), .size = all->size, .rank = comm->rank };
    bool good = driver.cuMemAddressReserve(&made->base, STRIDE * (size_t)all->size, 0, 0, 0) == CUDA_SUCCESS;
    for (int i = 0; i < all->size && good; i++)
        if (window_kind != 2 || i == comm->rank)
            good = window_kind == 0 || map_member(made, i, all->addresses[window_kind == 3 ? comm->rank : i]);
    good = meet(all) && good;
    if (!good || window_kind == 0) {
        free_window(made);
        *window = NULL;
        return good ? ncclSuccess : ncclUnhandledCudaError;
    }
    tu_nccl_window head = { .host = made,
                            .base = (char *)(uintptr_t)made->base,
                            .lsa_rank = comm->rank,
                            .world_rank = comm->rank,
                            .stride4G = 1 };
    CUdeviceptr there = 0;
    if (driver.cuMemAlloc(&there, sizeof head) != CUDA_SUCCESS ||
        driver.cuMemcpyHtoDAsync(there, &head, sizeof head, NULL) != CUDA_SUCCESS ||
        driver.cuStreamSynchronize(NULL) != CUDA_SUCCESS) {
        if (there != 0)
            driver.cuMemFree(there);
        free_window(made);
        return ncclUnhandledCudaError;
    }
    atomic_fetch_add(&windows, 1);
    made->there = there;
    made->next = comm->windows;
    comm->windows = made;
    *window = (ncclWindow_t)(uintptr_t)there;
    return ncclSuccess;
}

static void drop_window(host_window *made) {
    IN_DRIVER;
    driver.cuMemFree(made->there);
    free_window(made);
    atomic_fetch_sub(&windows, 1);
}

static void drop_windows(ncclComm_t comm) {
    while (comm->windows != NULL) {
        host_window *made = comm->windows;
        comm->windows = made->next;
        drop_window(made);
    }
}

static tu_nccl_window read_window(ncclWindow_t window) {
    IN_DRIVER;
    tu_nccl_window head;
    driver.cuMemcpyDtoHAsync(&head, (CUdeviceptr)(uintptr_t)window, sizeof head, NULL);
    driver.cuStreamSynchronize(NULL);
    return head;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
    host_window **link = &comm->windows;
    while (*link != NULL && (*link)->there != (CUdeviceptr)(uintptr_t)window)
        link = &(*link)->next;
    host_window *made = *link;
    if (made == NULL)
        return ncclInvalidArgument;
    *link = made->next;
    drop_window(made);
    return ncclSuccess;
}

tu_nccl_team ncclTeamLsa(ncclComm_t comm) {
    return lsa ? (tu_nccl_team){ comm->clique->size, comm->rank, 1 } : (tu_nccl_team){ 1, 0, 1 };
}

ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void **pointer) {
    if (fails(__func__))
        return ncclSystemError;
    tu_nccl_window head = read_window(window);
    const host_window *made = head.host;
    *pointer = made->mapped[peer] ? head.base + STRIDE * (size_t)peer + offset : NULL;
    return ncclSuccess;
}

ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t window, size_t offset, void **pointer) {
    if (fails(__func__))
        return ncclSystemError;
    (void)window;
    (void)offset;
    *pointer = NULL;
    return ncclInvalidUsage;
}
