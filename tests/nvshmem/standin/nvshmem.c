/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for NVSHMEM's host library, as libnvshmem_host.so.3: processes of one machine, whose heaps are memory of
 * the driver's stand-in that the others open through /proc. As the real one does, it maps the others' heaps behind its
 * own, beginning with itself; nvshmem_malloc waits for all; what is not mapped has no pointer but can be put
 * to. STANDIN_NVSHMEM in the environment makes it ill: "old", "limited", "refuses" (no start), "refuses one" (on PE 1),
 * "hangs" (in nvshmem_malloc, on PE 1), "full" (no memory on PE 1), "small" (none to grow by), "no team" (on PE 1);
 * "dies starting", "dies opening", "dies growing", "dies teaming": PE 1 is killed in that call; "dies putting", "stops
 * putting": in the middle of the third put of a kernel; "late": puts and signals arrive late, in any order; "later": a
 * word after 50 ms, and bytes of the host after 150, unless somebody asks for quiet; "two hosts": each two processes
 * map each other alone.
 *
 * standin_nvshmem_fail_call(n) lets the n-th call of this process fail, of those that can.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "memory/backend.h"

#include "backend/nvshmem/library.h"

#define API __attribute__((visibility("default")))
#define HEAP ((size_t)64 << 20) /* of each */
#define MOST 16                 /* processes */

/* What all share: a file that the first of them makes. */
typedef struct shared {
    struct {
        _Atomic int pid;
        int descriptor; /* written before */
    } heaps[MOST];
    _Atomic uint32_t arrived[1024]; /* at each meeting of all; a meeting is used once */
    _Atomic uint64_t teams;         /* ids given out */
} shared;

/* What the unique id says. */
typedef struct address {
    int version;
    int pid, descriptor;
} address;

typedef CUresult get_proc_address(const char *symbol, void **function, int version, uint64_t flags, int *status);
static tu_cuda_driver driver;
static shared *common;
static char *heap; /* this process's, then the others' */
static size_t used;
static int me, all, meetings, status, teams = 5;

static bool is(const char *illness) {
    const char *what = getenv("STANDIN_NVSHMEM");
    return what != NULL && strcmp(what, illness) == 0;
}

static void die(const char *where) {
    if (is(where) && me == 1)
        raise(SIGKILL);
}

/* ---- calls that fail ---- */

#define CALLS 2048
static pthread_mutex_t call_lock = PTHREAD_MUTEX_INITIALIZER;
static int calls_left, calls_made; /* until one fails; and so far, since standin_nvshmem_fail_call: under the lock */
static bool counts_calls;
static const char *names[CALLS];

API void standin_nvshmem_fail_call(int nth);
void standin_nvshmem_fail_call(int nth) {
    pthread_mutex_lock(&call_lock);
    calls_left = nth;
    calls_made = 0;
    counts_calls = nth > 0;
    pthread_mutex_unlock(&call_lock);
}

API int standin_nvshmem_calls_left(void);
int standin_nvshmem_calls_left(void) {
    return calls_left;
}

API const char *standin_nvshmem_call_made(int nth);
const char *standin_nvshmem_call_made(int nth) {
    return nth <= calls_made ? names[nth - 1] : NULL;
}

static bool fails(const char *name) {
    pthread_mutex_lock(&call_lock);
    bool counts = counts_calls && calls_made < CALLS;
    if (counts)
        names[calls_made++] = name;
    bool failed = counts && calls_left > 0 && --calls_left == 0;
    pthread_mutex_unlock(&call_lock);
    return failed;
}

/* ---- starting ---- */

static void meet(void) {
    _Atomic uint32_t *arrived = &common->arrived[meetings++];
    atomic_fetch_add(arrived, 1);
    while (atomic_load(arrived) < (uint32_t)all)
        sched_yield();
}

/* What stands for `here`, an address of this process's heap, at another. */
API void *standin_address(const void *here, int pe);
void *standin_address(const void *here, int pe) {
    return heap + ((size_t)((pe - me + all) % all) * HEAP + (size_t)((const char *)here - heap));
}

API void nvshmemx_vendor_get_version_info(int *major, int *minor, int *patch);
void nvshmemx_vendor_get_version_info(int *major, int *minor, int *patch) {
    *major = 3;
    *minor = is("old") ? 2 : 4;
    *patch = 5;
}

API int nvshmemx_init_status(void);
int nvshmemx_init_status(void) {
    return status;
}

API int nvshmemx_get_uniqueid(tu_nvshmem_id *id);
int nvshmemx_get_uniqueid(tu_nvshmem_id *id) {
    if (fails(__func__))
        return 11;
    address mine = { .version = id->version, .pid = (int)getpid() };
    mine.descriptor = memfd_create("standin", MFD_CLOEXEC);
    if (mine.descriptor < 0 || ftruncate(mine.descriptor, (off_t)sizeof(shared)) != 0)
        return 1;
    memcpy(id, &mine, sizeof mine);
    return 0;
}

API int nvshmemx_set_attr_uniqueid_args(int rank, int size, const tu_nvshmem_id *id, tu_nvshmem_init *init);
int nvshmemx_set_attr_uniqueid_args(int rank, int size, const tu_nvshmem_id *id, tu_nvshmem_init *init) {
    if (fails(__func__))
        return 11;
    init->args.id.id = (tu_nvshmem_id *)(uintptr_t)id;
    init->args.id.rank = rank;
    init->args.id.size = size;
    return size <= MOST ? 0 : 1;
}

static bool load_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    get_proc_address *get =
        library != NULL ? (get_proc_address *)(uintptr_t)dlsym(library, "cuGetProcAddress_v2") : NULL;
    if (get == NULL)
        return false;
#define X(required, name, since, parameters) get(#name, (void **)&driver.name, since > 11030 ? since : 11030, 0, NULL);
    TU_CUDA_FUNCTIONS(X)
#undef X
    return true;
}

static int open_of(int pid, int descriptor) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, descriptor);
    return open(path, O_RDWR | O_CLOEXEC);
}

/* This process's own heap, which the others may open. */
static bool make_heap(void) {
    CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR };
    CUmemGenericAllocationHandle handle;
    if (driver.cuMemCreate(&handle, HEAP, &prop, 0) != CUDA_SUCCESS ||
        driver.cuMemExportToShareableHandle(&common->heaps[me].descriptor, handle,
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) != CUDA_SUCCESS)
        return false;
    driver.cuMemRelease(handle);
    atomic_store(&common->heaps[me].pid, (int)getpid());
    return true;
}

/* Everybody's, one behind the other, beginning with this process. */
static bool map_heaps(void) {
    CUdeviceptr base;
    if (driver.cuMemAddressReserve(&base, (size_t)all * HEAP, HEAP, 0, 0) != CUDA_SUCCESS)
        return false;
    heap = (char *)(uintptr_t)base;
    for (int i = 0; i < all; i++) {
        int pe = (me + i) % all, pid;
        CUmemGenericAllocationHandle handle;
        while ((pid = atomic_load(&common->heaps[pe].pid)) == 0)
            sched_yield();
        int file = open_of(pid, common->heaps[pe].descriptor);
        if (file < 0 ||
            driver.cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)file,
                                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != CUDA_SUCCESS ||
            driver.cuMemMap(base + (CUdeviceptr)i * HEAP, HEAP, 0, handle, 0) != CUDA_SUCCESS)
            return false;
        driver.cuMemRelease(handle);
        close(file);
    }
    return true;
}

API int nvshmemx_hostlib_init_attr(unsigned flags, tu_nvshmem_init *init);
int nvshmemx_hostlib_init_attr(unsigned flags, tu_nvshmem_init *init) {
    if (fails(__func__))
        return 11;
    address other;
    memcpy(&other, init->args.id.id, sizeof other);
    int file =
        flags == TU_NVSHMEM_BY_UNIQUE_ID && !is("refuses") && load_driver() ? open_of(other.pid, other.descriptor) : -1;
    if (file < 0)
        return 7;
    me = init->args.id.rank;
    all = init->args.id.size;
    common = mmap(NULL, sizeof *common, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    die("dies starting");
    if (is("refuses one") && me == 1)
        return 7; /* the others wait for it */
    if (common == MAP_FAILED || !make_heap() || !map_heaps())
        return 8;
    meet();
    status = is("limited") ? TU_NVSHMEM_LIMITED_SHARING : TU_NVSHMEM_FULL_SHARING;
    return 0;
}

API int nvshmem_my_pe(void);
int nvshmem_my_pe(void) {
    return me;
}

API int nvshmem_n_pes(void);
int nvshmem_n_pes(void) {
    return all;
}

API void *nvshmem_malloc(size_t bytes);
void *nvshmem_malloc(size_t bytes) {
    while (is("hangs") && me == 1)
        pause();
    die(used == 0 ? "dies opening" : "dies growing");
    meet();
    if (fails(__func__) || bytes > HEAP - used || (is("full") && me == 1) || (is("small") && me == 1 && used > 0))
        return NULL;
    used += bytes;
    return memset(heap + used - bytes, 0xa5, bytes); /* nobody promised zeros */
}

API void *nvshmem_ptr(const void *here, int pe);
void *nvshmem_ptr(const void *here, int pe) {
    bool apart = is("two hosts") && pe / 2 != me / 2;
    return fails(__func__) || apart ? NULL : standin_address(here, pe);
}

API void *nvshmemx_mc_ptr(int32_t team, const void *here);
void *nvshmemx_mc_ptr(int32_t team, const void *here) {
    (void)team, (void)here;
    return NULL;
}

API int nvshmemx_team_get_uniqueid(uint64_t *id);
int nvshmemx_team_get_uniqueid(uint64_t *id) {
    if (fails(__func__))
        return 11;
    *id = atomic_fetch_add(&common->teams, 1) + 1;
    return 0;
}

API int nvshmemx_team_init(int32_t *team, tu_nvshmem_team_config *config, long mask, int size, int rank);
int nvshmemx_team_init(int32_t *team, tu_nvshmem_team_config *config, long mask, int size, int rank) {
    if (fails(__func__))
        return 11;
    if (status == TU_NVSHMEM_LIMITED_SHARING)
        _exit(255); /* as the real one */
    die("dies teaming");
    if (is("no team") && me == 1)
        return 9;
    if (mask != TU_NVSHMEM_CONFIG_BY_ID || config->id == 0 || rank >= size)
        return 1;
    _Atomic uint32_t *arrived = &common->arrived[512 + config->id];
    atomic_fetch_add(arrived, 1);
    while (atomic_load(arrived) < (uint32_t)size)
        sched_yield();
    *team = ++teams;
    return 0;
}

API void nvshmem_team_destroy(int32_t team);
void nvshmem_team_destroy(int32_t team) {
    (void)team;
}

/* Of kernels: what a network sends and gets lies in the heap of this process, and of the other. */
static bool is_mine(const void *pointer, size_t bytes) {
    const char *begin = pointer;
    return begin >= heap && begin + bytes <= heap + HEAP;
}

/* Something on its way: bytes, and then a word. */
typedef struct letter {
    void *to;
    const void *from;
    size_t bytes;
    uint64_t *word, value; /* NULL: none */
    int pe;
    void *copy;  /* of bytes that are the sender's again, or NULL */
    int64_t due; /* ns */
} letter;

static void deliver(const letter *letter) {
    static int puts;
    if (letter->bytes > 0) {
        char *there = standin_address(letter->to, letter->pe);
        memcpy(there, letter->from, letter->bytes / 2);
        if (++puts > 2)
            die("dies putting");
        while (puts > 2 && is("stops putting") && me == 1)
            pause();
        memcpy(there + letter->bytes / 2, (const char *)letter->from + letter->bytes / 2,
               letter->bytes - letter->bytes / 2);
    }
    if (letter->word != NULL)
        __atomic_store_n((uint64_t *)standin_address(letter->word, letter->pe), letter->value, __ATOMIC_RELEASE);
    free(letter->copy);
}

/* A network that takes its time, and delivers in any order: the last letter first, as often as not. */
static pthread_mutex_t post_lock = PTHREAD_MUTEX_INITIALIZER;
static letter post[4096];
static size_t post_count; /* under the lock */
static bool delivering;   /* likewise */
static int asking;        /* for quiet; likewise */

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void *deliver_late(void *argument) {
    unsigned random = 1 + (unsigned)me;
    (void)argument;
    for (;;) {
        random = random * 1664525 + 1013904223;
        usleep(random >> 22);
        pthread_mutex_lock(&post_lock);
        if (post_count > 0) {
            size_t which = (random >> 16 & 1) != 0 ? post_count - 1 : (random >> 8) % post_count;
            letter next = post[which];
            if (asking > 0 || now() >= next.due) {
                post[which] = post[--post_count];
                deliver(&next);
            }
        }
        pthread_mutex_unlock(&post_lock);
    }
    return NULL;
}

static bool is_slow(void) {
    return is("late") || is("later");
}

static void send(letter letter) {
    pthread_t thread;
    if (!is_slow()) {
        deliver(&letter);
        return;
    }
    if (is("later"))
        letter.due = now() + (letter.word != NULL ? 50000000 : 150000000);
    pthread_mutex_lock(&post_lock);
    if (post_count == sizeof post / sizeof *post)
        abort();
    post[post_count++] = letter;
    if (!delivering && pthread_create(&thread, NULL, deliver_late, NULL) == 0)
        delivering = pthread_detach(thread) == 0;
    pthread_mutex_unlock(&post_lock);
}

API void standin_put(void *to, const void *from, size_t bytes, uint64_t *word, uint64_t value, int pe);
void standin_put(void *to, const void *from, size_t bytes, uint64_t *word, uint64_t value, int pe) {
    if ((bytes > 0 && (!is_mine(from, bytes) || !is_mine(to, bytes))) || !is_mine(word, sizeof *word))
        abort();
    send((letter){ to, from, bytes, word, value, pe, NULL, 0 });
}

API void standin_quiet(void);
void standin_quiet(void) {
    pthread_mutex_lock(&post_lock);
    asking++;
    while (post_count > 0) {
        pthread_mutex_unlock(&post_lock);
        sched_yield();
        pthread_mutex_lock(&post_lock);
    }
    asking--;
    pthread_mutex_unlock(&post_lock);
}

API void standin_get(void *to, const void *from, size_t bytes, int pe);
void standin_get(void *to, const void *from, size_t bytes, int pe) {
    if (!is_mine(from, bytes) || !is_mine(to, bytes))
        abort();
    memcpy(to, standin_address(from, pe), bytes);
}

API void nvshmemx_putmem_on_stream(void *to, const void *from, size_t bytes, int pe, CUstream stream);
void nvshmemx_putmem_on_stream(void *to, const void *from, size_t bytes, int pe, CUstream stream) {
    (void)stream;
    if (!is_mine(from, bytes))
        abort(); /* what a network sends must lie in the heap */
    if (!is_slow()) {
        memmove(standin_address(to, pe), from, bytes);
        return;
    }
    void *copy = malloc(bytes + 1);
    memcpy(copy, from, bytes); /* who has put may write there again */
    send((letter){ to, copy, bytes, NULL, 0, pe, copy, 0 });
}

API void nvshmemx_getmem_on_stream(void *to, const void *from, size_t bytes, int pe, CUstream stream);
void nvshmemx_getmem_on_stream(void *to, const void *from, size_t bytes, int pe, CUstream stream) {
    (void)stream;
    if (!is_mine(to, bytes))
        abort();
    memmove(to, standin_address(from, pe), bytes);
}

API void nvshmemx_quiet_on_stream(CUstream stream);
void nvshmemx_quiet_on_stream(CUstream stream) {
    (void)stream;
    standin_quiet();
}

API int nvshmemx_cumodule_init(CUmodule module);
int nvshmemx_cumodule_init(CUmodule module) {
    if (fails(__func__))
        return 11;
    return module == NULL;
}
