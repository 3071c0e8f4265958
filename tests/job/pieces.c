/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared memory of a job: pieces are aligned, zeroed, reserved and given back; mappings of peers' pieces stay valid for
 * as long as they are held; what does not fit is an error that names the limit.
 */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "job.h"

static bool all_zero(const void *memory, size_t bytes) {
    const unsigned char *at = memory;
    for (size_t i = 0; i < bytes; i++)
        if (at[i] != 0)
            return false;
    return true;
}

static void alone(job_body *body) {
    tu_job_options options = job_options(NULL, 0, 1);
    tu_job *job;
    CHECK_OK(tu_job_open(&options, &job));
    body(job);
    tu_job_close(job);
}

/* ---- one rank ---- */

static void check_alignments(tu_job *job) {
    tu_piece pieces[66];
    int count = 0;
    for (size_t alignment = 1; alignment <= (size_t)2 << 20; alignment *= 2)
        for (size_t bytes = 0; bytes <= 3000; bytes += 1500) {
            CHECK_OK(tu_piece_alloc(job, "a test", bytes, alignment, 0, &pieces[count]));
            CHECK_EQ((uintptr_t)pieces[count].address % alignment, 0);
            CHECK_EQ((uintptr_t)pieces[count].address % 64, 0);
            CHECK_EQ(pieces[count].bytes, bytes);
            CHECK(all_zero(pieces[count].address, bytes));
            memset(pieces[count].address, 0xff, bytes);
            count++;
        }
    for (int i = 0; i < count; i++)
        tu_piece_free(job, &pieces[i]);
    CHECK_STATUS(tu_piece_alloc(job, "a test", 8, 96, 0, &pieces[0]), TUTTI_ERROR_ARGUMENT);
}

TEST(pieces_are_aligned_and_zeroed) {
    alone(check_alignments);
}

/* Random sizes come and go; no two live pieces overlap, each starts zeroed, and memory is reused. */
static void check_churn(tu_job *job) {
    enum {
        LIVE = 200
    };
    tu_piece pieces[LIVE] = { 0 };
    unsigned random = 12345;
    for (int round = 0; round < 20000; round++) {
        random = random * 1103515245 + 12345;
        int at = (int)(random >> 8) % LIVE;
        if (pieces[at].segment != NULL) {
            for (size_t i = 0; i < pieces[at].bytes; i += 97)
                CHECK_EQ(((unsigned char *)pieces[at].address)[i], (unsigned char)(at + 1));
            tu_piece_free(job, &pieces[at]);
            CHECK(pieces[at].segment == NULL);
        } else {
            size_t bytes = (random >> 16) % (at % 10 == 0 ? 60000 : 3000);
            CHECK_OK(tu_piece_alloc(job, "a test", bytes, (size_t)64 << (at % 4), 0, &pieces[at]));
            CHECK(all_zero(pieces[at].address, bytes));
            memset(pieces[at].address, at + 1, bytes);
        }
    }
    CHECK(job_reserved(job) < 16 << 20); /* at most 200 live pieces of 9 KiB on average */
    for (int at = 0; at < LIVE; at++)
        tu_piece_free(job, &pieces[at]);
}

TEST(pieces_that_come_and_go_never_overlap_and_are_reused) {
    alone(check_churn);
}

static void check_large(tu_job *job) {
    tu_piece piece;
    int64_t before = job_reserved(job);
    for (int round = 0; round < 3; round++) {
        size_t bytes = ((size_t)20 << 20) + 12345;
        CHECK_OK(tu_piece_alloc(job, "a large block", bytes, 4096, -1, &piece));
        CHECK(all_zero(piece.address, bytes));
        memset(piece.address, 7, bytes);
        CHECK(job_reserved(job) >= before + (int64_t)bytes);
        struct stat status;
        CHECK_EQ(fstat(piece.segment->fd, &status), 0);
        CHECK_EQ(status.st_blocks * 512, status.st_size); /* every page is there */
        CHECK_EQ(ftruncate(piece.segment->fd, 4096), -1); /* and nobody can take it away */
        tu_piece_free(job, &piece);
        CHECK_EQ(job_reserved(job), before);
    }
}

TEST(a_large_piece_is_reserved_sealed_and_returned) {
    alone(check_large);
}

/* ---- limits ---- */

static void check_machine(tu_job *job) {
    tu_piece piece = { 0 };
    CHECK_STATUS(tu_piece_alloc(job, "a huge block", (size_t)1 << 45, 64, -1, &piece), TUTTI_ERROR_MEMORY);
    CHECK_MESSAGE("a huge block");
    CHECK_STATUS(tu_piece_alloc(job, "a huge block", SIZE_MAX - 100, 64, -1, &piece), TUTTI_ERROR_MEMORY);
    CHECK(piece.segment == NULL);
    CHECK_EQ(job_reserved(job), 0);
}

TEST(more_than_the_machine_has_is_an_error_at_allocation) {
    alone(check_machine);
}

static void check_limits(tu_job *job) {
    struct rlimit before, limit;
    tu_piece piece = { 0 };
    CHECK_EQ(getrlimit(RLIMIT_AS, &before), 0);
    limit = before;
    limit.rlim_cur = (rlim_t)64 << 20;
    if (!test_sanitized() && tu_robust_works()) { /* sanitizers and emulators need, or hide, address space */
        CHECK_EQ(setrlimit(RLIMIT_AS, &limit), 0);
        CHECK_STATUS(tu_piece_alloc(job, "a block", (size_t)128 << 20, 64, -1, &piece), TUTTI_ERROR_LIMIT);
        CHECK_EQ(setrlimit(RLIMIT_AS, &before), 0);
        CHECK_MESSAGE("RLIMIT_AS");
    }
    CHECK_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
    limit = before;
    limit.rlim_cur = (rlim_t)4 << 20;
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    CHECK_STATUS(tu_piece_alloc(job, "a block", (size_t)8 << 20, 64, -1, &piece), TUTTI_ERROR_LIMIT); /* not SIGXFSZ */
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    CHECK_MESSAGE("RLIMIT_FSIZE");
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    limit = before;
    limit.rlim_cur = 0;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    CHECK_STATUS(tu_piece_alloc(job, "a block", (size_t)8 << 20, 64, -1, &piece), TUTTI_ERROR_LIMIT);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    CHECK_MESSAGE("RLIMIT_NOFILE");
    CHECK_EQ(job_reserved(job), 0);
    CHECK_OK(tu_piece_alloc(job, "a block", (size_t)8 << 20, 64, -1, &piece));
    tu_piece_free(job, &piece);
}

TEST(a_limit_of_the_process_is_named) {
    alone(check_limits);
}

static void limits_alone(void) {
    alone(check_limits);
}

TEST(a_limit_of_the_process_is_named_to_an_ordinary_user_too) {
    test_as_ordinary_user(limits_alone);
}

static void check_map_count(tu_job *job) {
    enum {
        MOST = 70000
    };
    tu_piece piece = { 0 };
    void **maps = calloc(MOST, sizeof *maps);
    int count = 0;
    for (; count < MOST; count++) { /* neighbours with different protection are never merged */
        maps[count] = mmap(NULL, 4096, count % 2 != 0 ? PROT_READ : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (maps[count] == MAP_FAILED)
            break;
    }
    if (count < MOST) {
        CHECK_STATUS(tu_piece_alloc(job, "a block", (size_t)8 << 20, 64, -1, &piece), TUTTI_ERROR_LIMIT);
        CHECK_MESSAGE("vm.max_map_count");
    }
    for (int i = 0; i < count; i++)
        munmap(maps[i], 4096);
    bool reached = count < MOST;
    free(maps);
    if (!reached)
        SKIP("this machine allows more than %d mappings", MOST);
}

TEST(too_many_mappings_name_the_kernels_limit) {
    if (test_sanitized() || !tu_robust_works())
        SKIP("sanitizers and emulators have mappings of their own");
    alone(check_map_count);
}

/* Writes a text into a file of a cgroup; false when that is not possible here. */
static bool write_text(const char *folder, const char *file, const char *text) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, file);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool written = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    close(fd);
    return written;
}

static void check_cgroup(tu_job *job) {
    tu_piece piece = { 0 };
    CHECK_STATUS(tu_piece_alloc(job, "a block", (size_t)200 << 20, 64, -1, &piece), TUTTI_ERROR_LIMIT);
    CHECK_MESSAGE("cgroup");
    CHECK_MESSAGE("tutti-test");
    CHECK_OK(tu_piece_alloc(job, "a block", (size_t)8 << 20, 64, -1, &piece));
    tu_piece_free(job, &piece);
}

TEST(the_limit_of_a_cgroup_above_is_named) {
    static const struct {
        const char *top, *limit;
    } kinds[] = { { "/sys/fs/cgroup/memory", "memory.limit_in_bytes" }, { "/sys/fs/cgroup", "memory.max" } };
    char outer[128], inner[160], pid[32];
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    for (int kind = 0; kind < 2; kind++) {
        snprintf(outer, sizeof outer, "%s/tutti-test-%d", kinds[kind].top, (int)getpid());
        snprintf(inner, sizeof inner, "%s/inner", outer);
        if (mkdir(outer, 0755) != 0)
            continue;
        bool there = mkdir(inner, 0755) == 0 && write_text(outer, kinds[kind].limit, "104857600") &&
                     write_text(inner, "cgroup.procs", pid);
        if (there)
            alone(check_cgroup);
        if (there)
            CHECK(write_text(kinds[kind].top, "cgroup.procs", pid)); /* out again, so that it can be removed */
        rmdir(inner);
        CHECK_EQ(rmdir(outer), 0);
        if (there)
            return;
    }
    SKIP("no cgroup with a memory limit can be made here");
}

/* ---- several ranks ---- */

/* Gives everybody a piece of everybody. */
static void share(tu_job *job, uint64_t sequence, const tu_piece *piece, tu_mapping **mappings) {
    job_exchange space;
    CHECK_OK(tu_job_exchange(job, job_exchange_all(&space, job, 1, sequence, NULL, 0, piece), NULL, mappings));
}

static void release_all(tu_job *job, tu_mapping **mappings) {
    for (int i = 0; i < tu_job_size(job); i++)
        tu_mapping_release(mappings[i]);
}

JOB_TEST(peers_read_and_write_each_others_pieces, 4) {
    for (uint64_t sequence = 1; sequence <= 30; sequence++) {
        size_t bytes = sequence % 10 == 0 ? (size_t)3 << 20 : 100 * sequence;
        tu_mapping *mappings[4];
        tu_piece piece;
        CHECK_OK(tu_piece_alloc(job, "a test", bytes, 64, -1, &piece));
        share(job, 2 * sequence, &piece, mappings);
        CHECK(mappings[tu_job_rank(job)]->address == piece.address);
        for (int i = 0; i < 4; i++) {
            CHECK_EQ(mappings[i]->bytes, bytes);
            CHECK_EQ((uintptr_t)mappings[i]->address % 64, 0);
            CHECK_EQ(((char *)mappings[i]->address)[bytes - 1 - (size_t)tu_job_rank(job)], 0);
            ((char *)mappings[i]->address)[bytes - 1 - (size_t)tu_job_rank(job)] = (char)(10 + tu_job_rank(job));
        }
        job_meet(job, sequence);
        for (int i = 0; i < 4; i++)
            CHECK_EQ(((char *)piece.address)[bytes - 1 - (size_t)i], 10 + i);
        release_all(job, mappings);
        tu_piece_free(job, &piece);
    }
}

JOB_TEST(a_rank_may_give_no_piece, 3) {
    tu_mapping *mappings[3];
    tu_piece piece;
    CHECK_OK(tu_piece_alloc(job, "a test", 100, 64, -1, &piece));
    share(job, 1, tu_job_rank(job) == 1 ? &piece : NULL, mappings);
    CHECK(mappings[0] == NULL && mappings[1] != NULL && mappings[2] == NULL);
    release_all(job, mappings);
    tu_piece_free(job, &piece);
}

JOB_TEST(a_freed_piece_is_reused_only_when_no_peer_maps_it, 2) {
    tu_mapping *mappings[2];
    tu_piece piece, other;
    CHECK_OK(
        tu_piece_alloc(job, "a test", 150000, 64, -1, &piece)); /* the first chunk has room for just one of these */
    size_t offset = piece.offset;
    tu_segment *segment = piece.segment;
    memset(piece.address, 5, 150000);
    share(job, 1, &piece, mappings);
    tu_mapping_release(mappings[tu_job_rank(job)]);
    tu_piece_free(job, &piece);
    CHECK_OK(tu_piece_alloc(job, "a test", 150000, 64, -1, &other));
    CHECK(other.segment != segment || other.offset != offset); /* the peer still looks at it */
    job_meet(job, 1);
    CHECK_EQ(((char *)mappings[1 - tu_job_rank(job)]->address)[149999], 5);
    tu_mapping_release(mappings[1 - tu_job_rank(job)]);
    job_meet(job, 2);
    tu_piece_free(job, &other);
    bool reused = false;
    tu_piece many[8];
    for (int i = 0; i < 8; i++) {
        CHECK_OK(tu_piece_alloc(job, "a test", 150000, 64, -1, &many[i]));
        CHECK(all_zero(many[i].address, 150000));
        reused |= many[i].segment == segment && many[i].offset == offset;
    }
    CHECK(reused);
    for (int i = 0; i < 8; i++)
        tu_piece_free(job, &many[i]);
}

JOB_TEST(a_segment_is_mapped_once_by_each_peer, 3) {
    enum {
        COUNT = 100
    };
    tu_piece pieces[COUNT];
    tu_mapping *mappings[COUNT][3];
    for (int i = 0; i < COUNT; i++) {
        CHECK_OK(tu_piece_alloc(job, "a test", 1000, 64, -1, &pieces[i]));
        share(job, (uint64_t)i + 1, &pieces[i], mappings[i]);
    }
    /* Threads: the page and three heaps. Processes: the same, each seen by one rank. */
    job_meet(job, 1);
    CHECK_EQ(test_count_mappings(), 4);
    job_meet(job, 2);
    for (int i = 0; i < COUNT; i++) {
        release_all(job, mappings[i]);
        tu_piece_free(job, &pieces[i]);
    }
}

/* The mapping of a peer's piece outlives the peer's job, and one's own. */
static tu_mapping *outliving[2];

static void keep_one(tu_job *job) {
    tu_mapping *mappings[2];
    tu_piece piece;
    size_t bytes = tu_job_rank(job) == 0 ? 5000 : (size_t)3 << 20;
    CHECK_OK(tu_piece_alloc(job, "a test", bytes, 64, -1, &piece));
    memset(piece.address, 'A' + tu_job_rank(job), bytes);
    share(job, 1, &piece, mappings);
    job_meet(job, 1);
    tu_mapping_release(mappings[tu_job_rank(job)]);
    tu_piece_free(job, &piece);
    outliving[tu_job_rank(job)] = mappings[1 - tu_job_rank(job)];
}

TEST(a_mapping_outlives_the_job_as_threads) {
    job_threads(2, keep_one);
    for (int rank = 0; rank < 2; rank++) {
        CHECK_EQ(((char *)outliving[rank]->address)[4999], 'B' - rank);
        tu_mapping_release(outliving[rank]);
    }
}

static void give_one(tu_job *job) {
    keep_one(job);
    tu_mapping_release(outliving[tu_job_rank(job)]);
}

TEST(a_mapping_outlives_the_job_and_the_owner_as_processes) {
    job_place place;
    job_place_open(&place);
    pid_t peer = job_start_process(&place, 1, 2, give_one);
    tutti_store *store = job_place_enter(&place);
    job_run(store, 0, 2, keep_one);
    CHECK_EQ(job_wait_process(peer), 0);
    CHECK_EQ(((char *)outliving[0]->address)[((size_t)3 << 20) - 1], 'B');
    tu_mapping_release(outliving[0]);
    tutti_store_release(store);
    job_place_close(&place);
}

/* A rank that dies takes its holds on others' pieces with it. */
static void die_holding(tu_job *job) {
    tu_mapping *mappings[2];
    tu_piece piece, again;
    CHECK_OK(tu_piece_alloc(job, "a test", 100000, 64, -1, &piece));
    size_t offset = piece.offset;
    share(job, 1, &piece, mappings);
    if (tu_job_rank(job) == 1)
        raise(SIGKILL);
    release_all(job, mappings);
    while (tu_rank_probe(job, 1) != TU_RANK_DEAD)
        usleep(1000);
    tu_piece_free(job, &piece);
    CHECK_OK(tu_piece_alloc(job, "a test", 100000, 64, -1, &again));
    CHECK_EQ(again.offset, offset);
    tu_piece_free(job, &again);
}

TEST(a_dead_peers_holds_do_not_keep_memory) {
    job_place place;
    job_place_open(&place);
    pid_t first = job_start_process(&place, 0, 2, die_holding), second = job_start_process(&place, 1, 2, die_holding);
    CHECK_EQ(job_wait_process(first), 0);
    CHECK_EQ(WTERMSIG(job_wait_process(second)), SIGKILL);
    job_place_close(&place);
}

/* ---- descriptors ---- */

static void lose_descriptor(tu_job *job) {
    tu_mapping *mappings[2] = { NULL, NULL };
    tu_piece piece;
    job_exchange space;
    CHECK_OK(tu_piece_alloc(job, "a test", 1000, 64, -1, &piece));
    struct rlimit before, none;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = before;
    int next = open("/dev/null", O_RDONLY | O_CLOEXEC); /* the lowest number that is free */
    close(next);
    none.rlim_cur = (rlim_t)next;
    tu_exchange *exchange = job_exchange_all(&space, job, 1, 1, NULL, 0, &piece);
    if (tu_job_rank(job) == 0) {
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
        CHECK_STATUS(tu_job_exchange(job, exchange, NULL, mappings), TUTTI_ERROR_LIMIT);
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
        CHECK_MESSAGE("RLIMIT_NOFILE");
        CHECK_MESSAGE("rank 1");
    } else {
        CHECK_OK(tu_job_exchange(job, exchange, NULL, mappings));
        release_all(job, mappings);
    }
    job_meet(job, 1);
    share(job, 2, &piece, mappings); /* now there is room: the descriptor is sent again */
    CHECK(mappings[0] != NULL && mappings[1] != NULL);
    release_all(job, mappings);
    tu_piece_free(job, &piece);
}

TEST(a_descriptor_lost_for_want_of_room_is_an_error_and_is_sent_again) {
    job_processes(2, lose_descriptor);
}

static int make_memfd(size_t bytes, unsigned seals) {
    int fd = memfd_create("tutti-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0);
    CHECK_EQ(ftruncate(fd, (off_t)bytes), 0);
    CHECK_EQ(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

static void check_descriptors(tu_job *job) {
    tu_segment *segment;
    tu_piece_wire wire = { .id = 99, .segment_bytes = 8192, .bytes = 10 };
    CHECK_STATUS(tu_segment_import(job, 0, &wire, make_memfd(8192, 0), &segment), TUTTI_ERROR_PROTOCOL);
    CHECK_MESSAGE("not sealed");
    CHECK_STATUS(tu_segment_import(job, 0, &wire, make_memfd(4096, TU_PAGE_SEALS), &segment), TUTTI_ERROR_PROTOCOL);
    CHECK_MESSAGE("bytes");
    CHECK_STATUS(tu_segment_import(job, 0, &wire, make_memfd(8192, TU_PAGE_SEALS), &segment), TUTTI_ERROR_PROTOCOL);
    CHECK_MESSAGE("not marked");
    CHECK_STATUS(tu_segment_import(job, 0, &wire, open("/dev/null", O_RDWR | O_CLOEXEC), &segment),
                 TUTTI_ERROR_PROTOCOL);
    CHECK_MESSAGE("not shared memory");
    tu_piece piece;
    tu_mapping *mapping;
    CHECK_OK(tu_piece_alloc(job, "a test", 100, 64, -1, &piece));
    tu_piece_describe(&piece, &wire);
    wire.bytes = piece.segment->bytes;
    CHECK_STATUS(tu_mapping_make(job, piece.segment, &wire, 0, false, &mapping), TUTTI_ERROR_PROTOCOL);
    wire.bytes = 100;
    wire.offset = UINT64_MAX - 63;
    CHECK_STATUS(tu_mapping_make(job, piece.segment, &wire, 0, false, &mapping), TUTTI_ERROR_PROTOCOL);
    tu_piece_free(job, &piece);
}

TEST(descriptors_that_are_not_what_they_claim_are_refused) {
    alone(check_descriptors);
}

/* Garbage on an established connection is dropped, descriptors and all, and the job goes on. */
static void send_garbage(tu_job *job) {
    if (tu_job_rank(job) == 1) {
        CHECK_EQ(send(job->peers[0].fd, "garbage", 7, MSG_NOSIGNAL), 7);
        tu_wire wire = { .magic = TU_WIRE_MAGIC, .kind = 77, .sender = 1 };
        CHECK_EQ(send(job->peers[0].fd, &wire, sizeof wire, MSG_NOSIGNAL), sizeof wire);
        wire.kind = TU_WIRE_EXCHANGE;
        wire.sender = 0; /* somebody else's name */
        CHECK_EQ(send(job->peers[0].fd, &wire, sizeof wire, MSG_NOSIGNAL), sizeof wire);
        wire.sender = 1;
        wire.bytes = 4000; /* more than there is */
        CHECK_EQ(send(job->peers[0].fd, &wire, sizeof wire, MSG_NOSIGNAL), sizeof wire);
        int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
        CHECK_EQ(tu_wire_send_page(job->peers[0].fd, 1, fd), 0);
        close(fd);
    }
    job_meet(job, 1);
}

TEST(garbage_from_a_peer_is_dropped) {
    setenv("TUTTI_LOG", "warn", 1);
    job_processes(2, send_garbage);
}

/* ---- failures ---- */

static tutti_status open_and_alloc(void *argument) {
    (void)argument;
    tu_job_options options = job_options(NULL, 0, 1);
    tu_job *job;
    tu_piece small, large;
    tutti_status status = tu_job_open(&options, &job);
    if (status != TUTTI_OK)
        return status;
    status = tu_piece_alloc(job, "small", 100000, 64, -1, &small);
    if (status == TUTTI_OK) {
        status = tu_piece_alloc(job, "large", (size_t)3 << 20, (size_t)2 << 20, -1, &large);
        if (status == TUTTI_OK)
            tu_piece_free(job, &large);
        tu_piece_free(job, &small);
    }
    tu_job_close(job);
    return status;
}

TEST(any_call_may_fail_during_allocation) {
    test_fail_each(NULL, open_and_alloc, NULL);
}

/* ---- memory goes back ---- */

static int64_t memory_of_heaps(void) {
    int64_t blocks = 0;
    for (int fd = 0; fd < 1024; fd++) {
        char path[64], target[128];
        struct stat status;
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(path, target, sizeof target - 1);
        if (length <= 0)
            continue;
        target[length] = 0;
        if (strstr(target, "tutti-heap-") != NULL && fstat(fd, &status) == 0)
            blocks += status.st_blocks;
    }
    return blocks * 512;
}

static void check_memory_goes_back(tu_job *job) {
    enum {
        COUNT = 4000
    };
    tu_piece *pieces = calloc(COUNT, sizeof *pieces);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < COUNT; i++) {
            CHECK_OK(tu_piece_alloc(job, "a test", 8000, 64, 0, &pieces[i]));
            CHECK(all_zero(pieces[i].address, 8000));
            memset(pieces[i].address, 0xff, 8000);
        }
        CHECK(memory_of_heaps() >= INT64_C(8000) * COUNT);
        int64_t reserved = atomic_load(&job->slot->reserved);
        CHECK(reserved >= INT64_C(8000) * COUNT);
        for (int i = 0; i < COUNT; i++)
            tu_piece_free(job, &pieces[i]);
        CHECK(memory_of_heaps() < INT64_C(8000) * COUNT / 2); /* one chunk stays for the next */
        CHECK(atomic_load(&job->slot->reserved) < reserved / 2);
    }
    free(pieces);
}

TEST(the_memory_of_small_pieces_goes_back_when_they_are_freed) {
    alone(check_memory_goes_back);
}

/* ---- ulimit -f ---- */

static void lower_file_size(void) {
    struct rlimit limit = { .rlim_cur = 4096, .rlim_max = RLIM_INFINITY };
    CHECK_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = 4096;
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    tu_job_options options = job_options(NULL, 0, 1);
    tu_job *job;
    CHECK_STATUS(tu_job_open(&options, &job), TUTTI_ERROR_LIMIT);
    CHECK_MESSAGE("ulimit -f");
}

TEST(a_limit_on_the_size_of_files_is_an_error_and_no_signal) {
    lower_file_size();
}

/* ---- a long queue at the ledger ---- */

static void *ask_the_ledger(void *argument) {
    tu_piece piece;
    CHECK_OK(tu_piece_alloc(argument, "a test", (size_t)4 << 20, 4096, 0, &piece));
    tu_piece_free(argument, &piece);
    return NULL;
}

/* Others have the lock for twelve seconds, longer than anybody waits for one holder, but leave it all the time. */
static void check_queue(tu_job *job) {
    pthread_t asker;
    CHECK_EQ(pthread_mutex_lock(&job->page->ledger), 0);
    CHECK_EQ(pthread_create(&asker, NULL, ask_the_ledger, job), 0);
    for (int64_t begin = tu_clock_now(); tu_clock_now() - begin < 12 * TU_SECOND;) {
        atomic_fetch_add(&job->page->ledger_turns, 1);
        usleep(50000);
    }
    CHECK_EQ(pthread_mutex_unlock(&job->page->ledger), 0);
    CHECK_EQ(pthread_join(asker, NULL), 0);
}

TEST(a_long_queue_at_the_ledger_is_no_error_while_it_moves) {
    alone(check_queue);
}
