/* SPDX-License-Identifier: Apache-2.0
 *
 * What errors, records and counters say of collectives across hosts with several ranks each: the call that the program
 * made, on the group that it knows, whichever part of it failed.
 */
#include <fcntl.h>
#include <tutti/collective.h>
#include <tutti/fault.h>
#include <tutti/memory.h>
#include <tutti/store.h>
#include <tutti/trace.h>

#include "memory/network.h"
#include "on_hosts.h"

#define LONGEST 100001

static float *in, *out;

static void make_buffers(void) {
    in = calloc(4 * LONGEST, sizeof *in);
    out = calloc(4 * LONGEST, sizeof *out);
    CHECK(in != NULL && out != NULL);
}

static void free_buffers(void) {
    free(in);
    free(out);
}

/* Ranks of the world backwards: those of a host have other numbers than in the world, and than among themselves. */
static tutti_group *backwards(tutti_world *world) {
    static const int ranks[] = { 3, 2, 1, 0 };
    tutti_group *group;
    CHECK_OK(tutti_group_new(world, ranks, 4,
                             TUTTI_OPTIONS(tutti_group_options, .name = "backwards", .keep_order = true), &group));
    return group;
}

/* A call that goes well on every rank. A group that ends ends for ranks that are still in an earlier call of it, too,
 * so nobody goes on before all have left it: they meet in another group, whose own end, by a death, concerns nobody
 * here. */
static void meet_well(tutti_world *world, tutti_group *group) {
    CHECK_OK(tutti_barrier(group, NULL));
    float one = 1, sum;
    tutti_status status = tutti_all_reduce(tutti_world_group(world), &one, &sum, 1, TUTTI_F32, TUTTI_SUM, NULL);
    CHECK(status == TUTTI_OK || status == TUTTI_ERROR_DEAD);
}

/* Whether the thread's error is about that call, and says nothing of what it was made of. */
static tutti_error_info told(tutti_group *group, const char *operation, uint64_t sequence) {
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    if (strcmp(info.operation, operation) != 0 || info.sequence != sequence || strstr(tutti_error_message(), "u8"))
        fprintf(stderr, "%s %d of %s: %s\n", info.operation, (int)info.sequence, info.group, tutti_error_message());
    CHECK(strcmp(info.group, tutti_group_name(group)) == 0);
    CHECK(strcmp(info.operation, operation) == 0);
    CHECK_EQ(info.sequence, sequence);
    CHECK_EQ(info.rank, tutti_group_rank(group));
    CHECK(strstr(tutti_error_message(), "u8") == NULL);
    CHECK(strstr(tutti_error_message(), tutti_group_name(group)) != NULL);
    return info;
}

static void check_says(const char *words) {
    if (strstr(tutti_error_message(), words) == NULL)
        fprintf(stderr, "\"%s\" is not in: %s\n", words, tutti_error_message());
    CHECK(strstr(tutti_error_message(), words) != NULL);
}

static bool is_at_fault(const tutti_error_info *info, int rank) {
    for (int i = 0; i < info->at_fault_count; i++)
        if (info->at_fault[i] == rank)
            return true;
    return false;
}

/* ---- calls that differ ---- */

typedef tutti_status one_call(tutti_group *group);

typedef struct pair {
    one_call *usual, *other;
    const char *operation, *usual_text, *other_text, *difference;
} pair;

#define CALL(name, ...)                            \
    static tutti_status name(tutti_group *group) { \
        return tutti_##__VA_ARGS__;                \
    }
CALL(reduce_100, all_reduce(group, in, out, 100, TUTTI_F32, TUTTI_SUM, NULL))
CALL(reduce_200, all_reduce(group, in, out, 200, TUTTI_F32, TUTTI_SUM, NULL))
CALL(reduce_none, all_reduce(group, in, out, 0, TUTTI_F32, TUTTI_SUM, NULL))
CALL(reduce_long, all_reduce(group, in, out, LONGEST, TUTTI_F32, TUTTI_SUM, NULL))
CALL(reduce_longer, all_reduce(group, in, out, LONGEST - 1, TUTTI_F32, TUTTI_SUM, NULL))
CALL(reduce_integers, all_reduce(group, in, out, 100, TUTTI_I32, TUTTI_SUM, NULL))
CALL(reduce_largest, all_reduce(group, in, out, 100, TUTTI_F32, TUTTI_MAX, NULL))
CALL(gather_100, all_gather(group, in, out, 100, TUTTI_F32, NULL))
CALL(gather_bytes, all_gather(group, in, out, 400, TUTTI_I8, NULL))
CALL(from_1, broadcast(group, out, out, 100, TUTTI_F32, 1, NULL))
CALL(from_2, broadcast(group, out, out, 100, TUTTI_F32, 2, NULL))
CALL(deal_3, all_to_all(group, in, out, 3, TUTTI_F64, NULL))
CALL(deal_4, all_to_all(group, in, out, 4, TUTTI_F64, NULL))
CALL(meet, barrier(group, NULL))

static const pair pairs[] = {
    { reduce_100, reduce_200, "all_reduce", "all_reduce (f32 sum 100 elements", "all_reduce (f32 sum 200 elements",
      "count" },
    { reduce_100, reduce_long, "all_reduce", "all_reduce (f32 sum 100 elements", "all_reduce (f32 sum 100001 elements",
      "count" },
    { reduce_longer, reduce_long, "all_reduce", "all_reduce (f32 sum 100000 elements",
      "all_reduce (f32 sum 100001 elements", "count" },
    { reduce_long, reduce_100, "all_reduce", "all_reduce (f32 sum 100001 elements", "all_reduce (f32 sum 100 elements",
      "count" },
    { reduce_100, reduce_integers, "all_reduce", "all_reduce (f32 sum 100 elements", "all_reduce (i32 sum 100 elements",
      "dtype" },
    { reduce_100, reduce_largest, "all_reduce", "all_reduce (f32 sum 100 elements", "all_reduce (f32 max 100 elements",
      "reduction" },
    { gather_100, gather_bytes, "all_gather", "all_gather (f32 100 elements", "all_gather (i8 400 elements",
      "count, dtype" },
    { deal_3, deal_4, "all_to_all", "all_to_all (f64 3 elements", "all_to_all (f64 4 elements", "count" },
};
static const pair *chosen;
static bool odd[4]; /* by group rank */

static void calls_differ(tutti_world *world) {
    make_buffers();
    tutti_group *group = backwards(world);
    int rank = tutti_group_rank(group);
    meet_well(world, group);
    uint64_t next = tutti_group_sequence(group) + 1;
    CHECK_STATUS(odd[rank] ? chosen->other(group) : chosen->usual(group), TUTTI_ERROR_MISMATCH);
    tutti_error_info info = told(group, chosen->operation, next);
    check_says(chosen->usual_text);
    check_says(chosen->other_text);
    check_says(chosen->difference);
    CHECK_EQ(info.at_fault_count, 1);
    CHECK(info.at_fault[0] >= 0 && info.at_fault[0] < 4);
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_MISMATCH); /* the same cause for ever */
    told(group, chosen->operation, next);
    CHECK_OK(tutti_group_destroy(group));
    tutti_group_release(group);
    free_buffers();
}

static void with_odd(int first, int last, rank_body *body) {
    for (int rank = 0; rank < 4; rank++)
        odd[rank] = rank >= first && rank <= last;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        chosen = &pairs[i];
        on_hosts(two_and_two, 4, body);
    }
}

TEST(ranks_of_one_host_that_differ_are_told_with_what_they_called) {
    with_odd(3, 3, calls_differ);
    with_odd(0, 0, calls_differ);
}

TEST(hosts_that_differ_are_told_with_what_they_called) {
    with_odd(2, 3, calls_differ);
}

/* Operations that differ may be found by what each of two ranks has recorded, before they have met. */
static void operations_differ(tutti_world *world) {
    make_buffers();
    tutti_group *group = backwards(world);
    int rank = tutti_group_rank(group);
    meet_well(world, group);
    uint64_t next = tutti_group_sequence(group) + 1; /* who comes when the group has ended makes no call */
    CHECK_STATUS(odd[rank] ? meet(group) : reduce_100(group), TUTTI_ERROR_MISMATCH);
    check_says("barrier");
    check_says("all_reduce");
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    (void)told(group, strcmp(info.operation, "barrier") == 0 ? "barrier" : "all_reduce", next);
    tutti_group_release(group);
    free_buffers();
}

TEST(other_operations_on_one_host_are_told_with_what_was_called) {
    for (int rank = 0; rank < 4; rank += 3) {
        memset(odd, 0, sizeof odd);
        odd[rank] = true;
        on_hosts(two_and_two, 4, operations_differ);
    }
}

/* Who sends alone may be through before anybody looks; its next call fails. */
static void roots_differ(tutti_world *world) {
    make_buffers();
    tutti_group *group = backwards(world);
    meet_well(world, group);
    tutti_status status = odd[tutti_group_rank(group)] ? from_2(group) : from_1(group);
    if (status == TUTTI_OK)
        status = meet(group);
    CHECK_STATUS(status, TUTTI_ERROR_MISMATCH);
    check_says("broadcast (f32 100 elements, root ");
    tutti_group_release(group);
    free_buffers();
}

TEST(other_roots_on_one_host_are_told_with_what_was_called) {
    for (int rank = 0; rank < 4; rank++) {
        memset(odd, 0, sizeof odd);
        odd[rank] = true;
        on_hosts(two_and_two, 4, roots_differ);
    }
}

/* One that has nothing to do is through at once: what it calls next meets what the others called before. */
static void one_has_nothing(tutti_world *world) {
    make_buffers();
    tutti_group *group = backwards(world);
    int rank = tutti_group_rank(group);
    meet_well(world, group);
    tutti_status status = odd[rank] ? reduce_none(group) : reduce_100(group);
    if (status == TUTTI_OK)
        status = reduce_100(group);
    CHECK_STATUS(status, TUTTI_ERROR_MISMATCH);
    check_says("order");
    check_says("all_reduce (f32 sum 100 elements");
    tutti_group_release(group);
    free_buffers();
}

TEST(a_rank_that_is_a_call_ahead_is_told_by_the_order) {
    memset(odd, 0, sizeof odd);
    odd[3] = true;
    on_hosts(two_and_two, 4, one_has_nothing);
}

static void splits_differ(tutti_world *world) {
    make_buffers();
    tutti_group *group = backwards(world);
    int rank = tutti_group_rank(group);
    meet_well(world, group);
    size_t sends[4] = { 2, 2, 2, 2 }, expects[4] = { 2, 2, 2, 2 };
    if (rank == 2)
        sends[3] = 5;
    tutti_status status = tutti_all_to_all_v(group, in, sends, NULL, out, expects, NULL, TUTTI_F64, NULL);
    if (status == TUTTI_OK) /* who sends too much is told by who looks */
        status = tutti_barrier(group, NULL);
    CHECK_STATUS(status, TUTTI_ERROR_MISMATCH);
    tutti_error_info info = told(group, "all_to_all_v", 2);
    check_says("rank 2 sends 5 elements to rank 3, which expects 2 from it");
    CHECK(is_at_fault(&info, 2) || is_at_fault(&info, 3));
    tutti_group_release(group);
    free_buffers();
}

TEST(splits_that_differ_on_one_host_are_told_in_elements_and_ranks_of_the_group) {
    on_hosts(two_and_two, 4, splits_differ);
}

/* ---- collectives against what members agree on through the store ---- */

static bool set_up; /* whether a call went well before */

static tutti_status meet_for_memory(tutti_group *group, tutti_memory *memory) {
    tutti_peers *peers;
    return tutti_memory_rendezvous(memory, group, &peers);
}

static tutti_status split_in_two(tutti_group *group, tutti_memory *memory) {
    static const int first[] = { 0, 1 }, second[] = { 2, 3 };
    tutti_group *half;
    (void)memory;
    return tutti_group_split(group, (const int *const[]){ first, second }, (const int[]){ 2, 2 }, 2, NULL, &half);
}

static struct {
    tutti_status (*call)(tutti_group *group, tutti_memory *memory);
    const char *name;
} agreement;

static void some_agree(tutti_world *world) {
    tutti_group *group = backwards(world);
    tutti_memory *memory;
    CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &memory));
    if (set_up)
        meet_well(world, group);
    CHECK_STATUS(odd[tutti_group_rank(group)] ? meet(group) : agreement.call(group, memory), TUTTI_ERROR_MISMATCH);
    check_says("the ranks disagree");
    check_says("barrier");
    check_says(agreement.name);
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_MISMATCH);
    tutti_memory_release(memory);
    tutti_group_release(group);
}

/* One rank and one host call a barrier, with and without a call before. */
static void with_some_in_a_barrier(void) {
    static const int ranges[][2] = { { 0, 0 }, { 3, 3 }, { 0, 1 }, { 2, 3 }, { 1, 3 } };
    for (size_t i = 0; i < 2 * sizeof ranges / sizeof *ranges; i++) {
        set_up = i % 2 != 0;
        for (int rank = 0; rank < 4; rank++)
            odd[rank] = rank >= ranges[i / 2][0] && rank <= ranges[i / 2][1];
        on_hosts(two_and_two, 4, some_agree);
    }
}

TEST(a_barrier_on_some_ranks_and_a_rendezvous_on_others_are_told_with_both_sides) {
    agreement.call = meet_for_memory;
    agreement.name = "rendezvous";
    with_some_in_a_barrier();
}

TEST(a_barrier_on_some_ranks_and_a_split_on_others_are_told_with_both_sides) {
    agreement.call = split_in_two;
    agreement.name = "group_split";
    with_some_in_a_barrier();
}

/* ---- deaths ---- */

static void one_is_killed(tutti_world *world) {
    make_buffers();
    tutti_group *group = backwards(world);
    if (set_up)
        meet_well(world, group);
    uint64_t next = tutti_group_sequence(group) + 1;
    if (tutti_group_rank(group) == 3) {
        if (!set_up)
            usleep(20000); /* so that some of the others wait already */
        kill(getpid(), SIGKILL);
    }
    CHECK_STATUS(reduce_100(group), TUTTI_ERROR_DEAD);
    tutti_error_info info = told(group, "all_reduce", next);
    CHECK(info.at_fault_count == 1 && info.at_fault[0] == 3);
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_DEAD);
    info = told(group, "all_reduce", next);
    CHECK(info.at_fault_count == 1 && info.at_fault[0] == 3);
    tutti_group_release(group);
    free_buffers();
}

TEST(a_death_is_told_by_the_call_and_the_rank_of_the_group) {
    set_up = true;
    on_hosts(two_and_two, 4, one_is_killed);
    set_up = false;
    on_hosts(two_and_two, 4, one_is_killed);
}

/* ---- deadlines ---- */

static void one_stays_away(tutti_world *world) {
    make_buffers();
    tutti_group *group = backwards(world);
    int rank = tutti_group_rank(group);
    if (set_up)
        meet_well(world, group);
    uint64_t next = tutti_group_sequence(group) + 1;
    tutti_status status = TUTTI_OK;
    if (rank == 3) /* of the host of rank 2 */
        while ((status = tutti_group_check(group)) == TUTTI_OK)
            usleep(1000);
    else
        status = tutti_all_reduce(
            group, in, out, 100, TUTTI_F32, TUTTI_SUM,
            TUTTI_OPTIONS(tutti_call, .timeout_ns = rank == 2 ? 300 * TU_MILLISECOND : 300 * TU_SECOND));
    CHECK_STATUS(status, TUTTI_ERROR_TIMEOUT);
    tutti_error_info info = told(group, "all_reduce", next);
    CHECK(info.at_fault_count == 1 && info.at_fault[0] == 3);
    check_says("waited 300 ms");
    check_says("Missing: rank 3 (world rank 0) (pid ");
    check_says(set_up ? "last completed barrier 1 here, now in no call of Tutti"
                      : "has completed nothing in this group, now in no call of Tutti");
    CHECK(strstr(tutti_error_message(), "ranks have come") == NULL); /* nobody here knows of other hosts */
    tutti_group_release(group);
    free_buffers();
}

TEST(a_deadline_is_told_by_the_call_and_what_the_late_rank_does_instead) {
    set_up = true;
    on_hosts(two_and_two, 4, one_stays_away);
    set_up = false;
    on_hosts(two_and_two, 4, one_stays_away);
}

/* ---- ranks that have left ---- */

static char lock_path[64];
static bool aborts;

/* Locks of a process end with it. */
static void lock_file(void) {
    int file = open(lock_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    struct flock all = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
    CHECK(file >= 0 && fcntl(file, F_SETLKW, &all) == 0);
}

/* World rank 1 is known to the others, but leaves before rank 0 has ever been connected to it. */
static void one_leaves(tutti_world *world) {
    static const int two[] = { 1, 2 }, all[] = { 1, 0, 2 };
    int rank = tutti_world_rank(world);
    tutti_group *pair, *group;
    tutti_store *store = tutti_world_store(world);
    make_buffers();
    CHECK_OK(
        tutti_group_new(world, all, 3, TUTTI_OPTIONS(tutti_group_options, .name = "all", .keep_order = true), &group));
    CHECK_OK(tutti_group_new(world, two, 2, NULL, &pair));
    if (rank == 1)
        lock_file();
    if (rank > 0)
        CHECK_OK(tutti_barrier(pair, NULL));
    if (rank == 1 && aborts)
        CHECK_OK(tutti_group_abort(group, "enough"));
    if (rank == 2)
        CHECK_OK(tutti_store_set(store, "locked", "", 1));
    if (rank == 0) {
        CHECK_OK(tutti_store_wait(store, (const char *[]){ "locked" }, 1, 60 * TU_SECOND));
        lock_file();
        CHECK_STATUS(reduce_100(group), aborts ? TUTTI_ERROR_ABORTED : TUTTI_ERROR_NETWORK);
        tutti_error_info info = told(group, aborts ? "group_abort" : "all_reduce", aborts ? 0 : 1);
        CHECK(info.at_fault_count == 1 && info.at_fault[0] == 0);
        check_says(aborts ? "aborted group all: enough" : "rank 1 of group all cannot reach rank 0 on ");
    }
    if (rank == 0)
        CHECK_OK(tutti_store_set(store, "done", "", 1));
    if (rank == 2)
        CHECK_OK(tutti_store_wait(store, (const char *[]){ "done" }, 1, 60 * TU_SECOND));
    tutti_group_release(pair);
    tutti_group_release(group);
    free_buffers();
}

TEST(a_rank_that_left_unseen_is_told_by_why_it_left_or_by_its_rank_of_the_group) {
    snprintf(lock_path, sizeof lock_path, "/tmp/tutti-test-hosts-errors-%d", (int)getpid());
    for (int i = 0; i < 2; i++) {
        aborts = i == 0;
        on_hosts(one_on_three, 3, one_leaves);
    }
    unlink(lock_path);
}

/* ---- records ---- */

static int damage;

/* What the store says of how rank 1 can be reached is not what rank 1 has left there. */
static void damage_record(tutti_store *store) {
    void *value;
    size_t bytes;
    uint32_t version;
    CHECK_OK(tutti_store_wait(store, (const char *[]){ "network/1" }, 1, 60 * TU_SECOND));
    CHECK_OK(tutti_store_get(store, damage == 3 ? "network/0" : "network/1", 60 * TU_SECOND, &value, &bytes));
    unsigned char *record = value;
    memcpy(&version, record + sizeof version, sizeof version);
    version++;
    if (damage == 0) /* of another version */
        memcpy(record + sizeof version, &version, sizeof version);
    else if (damage == 1)
        record[bytes - 1] ^= 1;
    else if (damage == 2)
        bytes--;
    CHECK_OK(tutti_store_set(store, "network/1", damage == 4 ? "" : value, damage == 4 ? 0 : bytes));
    free(value);
}

static void record_is_damaged(tutti_world *world) {
    make_buffers();
    tutti_group *group = tutti_world_group(world);
    tu_network_group *side;
    CHECK_OK(tu_network_group_get(group, &side)); /* which leaves the record */
    if (tutti_group_rank(group) == 0)
        damage_record(world->store);
    CHECK_STATUS(reduce_100(group), TUTTI_ERROR_PROTOCOL);
    tutti_error_info info = told(group, "all_reduce", 1);
    CHECK(info.at_fault_count == 1 && info.at_fault[0] == 1);
    check_says("rank 0 of group 0 cannot reach rank 1 on ");
    check_says(damage == 0 ? "install one version everywhere" : "that do not say how to reach it");
    free_buffers();
}

TEST(a_record_that_is_not_whole_is_refused_before_ucx_sees_it) {
    for (damage = 0; damage < 5; damage++)
        on_hosts(one_each, 2, record_is_damaged);
}

/* ---- aborts ---- */

static void one_gives_up(tutti_world *world) {
    make_buffers();
    tutti_group *group = backwards(world);
    meet_well(world, group);
    tutti_status status = TUTTI_ERROR_ABORTED;
    if (tutti_group_rank(group) == 3)
        CHECK_OK(tutti_group_abort(group, "enough"));
    else
        status = reduce_100(group);
    CHECK_STATUS(status, TUTTI_ERROR_ABORTED);
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_ABORTED);
    tutti_error_info info = told(group, "group_abort", 0);
    CHECK(info.at_fault_count == 1 && info.at_fault[0] == 3);
    check_says("rank 3 (world rank 0) aborted group backwards: enough");
    tutti_group_release(group);
    free_buffers();
}

TEST(an_abort_is_told_by_the_rank_of_the_group) {
    on_hosts(two_and_two, 4, one_gives_up);
}

/* ---- records ---- */

static uint64_t calls_of(tutti_world *world, const char *operation) {
    tutti_counters counters = TUTTI_COUNTERS_INIT;
    CHECK_OK(tutti_trace_counters(world, operation, &counters));
    return counters.calls;
}

static void count_calls(tutti_world *world) {
    make_buffers();
    tutti_group *group = backwards(world);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(reduce_100(group));
        CHECK_OK(reduce_long(group));
        CHECK_OK(from_1(group));
        CHECK_OK(deal_3(group));
        CHECK_OK(meet(group));
    }
    CHECK_EQ(calls_of(world, "all_reduce"), 6);
    CHECK_EQ(calls_of(world, "broadcast"), 3);
    CHECK_EQ(calls_of(world, "all_to_all"), 3);
    CHECK_EQ(calls_of(world, "barrier"), 3);
    CHECK_EQ(calls_of(world, "all_gather_v"), 0);
    CHECK_EQ(calls_of(world, "all_to_all_v"), 0);
    CHECK_EQ(tutti_group_sequence(group), 15);
    CHECK_EQ(tutti_group_completed(group), 15);
    char *text;
    CHECK_OK(tutti_trace_text(world, &text));
    CHECK(strstr(text, "all_reduce") != NULL && strstr(text, "all_gather_v") == NULL);
    tutti_free(text);
    tutti_group_release(group);
    free_buffers();
}

TEST(records_and_counters_have_the_calls_alone) {
    on_hosts(two_and_two, 4, count_calls);
}

/* A fault is asked for at a call that the program makes. */
static void inject(tutti_world *world) {
    make_buffers();
    tutti_group *group = backwards(world);
    CHECK_OK(tutti_fault_inject(world, "rank=0,op=barrier,at=1,do=fail"));
    meet_well(world, group);
    CHECK_STATUS(meet(group), TUTTI_ERROR_FAULT);
    (void)told(group, "barrier", 2);
    tutti_group_release(group);
    free_buffers();
}

TEST(faults_count_the_calls_of_the_program) {
    on_hosts(two_and_two, 4, inject);
}
