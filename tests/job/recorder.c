/* SPDX-License-Identifier: Apache-2.0
 *
 * The flight recorder: what is written can be read, by anybody, while it is being written.
 */
#include "job/recorder.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../harness.h"
#include "base/clock.h"

static tu_recorder *new_recorder_of(uint32_t entries) {
    size_t bytes = (tu_recorder_bytes(entries) + 127) / 128 * 128;
    tu_recorder *recorder = malloc(sizeof *recorder);
    void *memory = aligned_alloc(128, bytes);
    CHECK(recorder != NULL && memory != NULL);
    *recorder = tu_recorder_at(memory, bytes);
    tu_recorder_init(recorder);
    return recorder;
}

static void end_recorder(tu_recorder *recorder) {
    free(recorder->memory);
    free(recorder);
}

static tu_recorder *new_recorder(void) {
    return new_recorder_of(TU_RECORDER_ENTRIES);
}

static tu_operation_info operation(tu_operation operation, uint64_t group_key, uint64_t sequence) {
    return (tu_operation_info){ .operation = (uint8_t)operation,
                                .group_key = group_key,
                                .sequence = sequence,
                                .count = 4096,
                                .dtype = TUTTI_F32,
                                .reduction = TUTTI_SUM,
                                .root = -1 };
}

TEST(a_running_operation_is_the_current_one_and_an_ended_one_the_last) {
    tu_recorder *recorder = new_recorder();
    tu_record_view view;
    CHECK(!tu_recorder_current(recorder, 0, &view));
    CHECK(!tu_recorder_last(recorder, 0, &view));
    tu_operation_info info = operation(TU_OPERATION_ALL_REDUCE, 7, 1);
    int64_t before = tu_clock_now();
    uint64_t ticket = tu_record_begin(recorder, &info);
    tu_record_waiting(recorder, ticket, 3);
    CHECK(tu_recorder_current(recorder, 7, &view));
    CHECK(view.running && view.waiting_for == 3 && view.info.sequence == 1 && view.info.count == 4096);
    CHECK(!tu_recorder_current(recorder, 8, &view));
    tu_record_waiting(recorder, ticket, -1);
    CHECK(tu_recorder_current(recorder, 0, &view) && view.waiting_for == -1);
    tu_record_algorithm(recorder, ticket, 5);
    tu_record_end(recorder, ticket, TUTTI_OK);
    CHECK(!tu_recorder_current(recorder, 0, &view));
    CHECK(tu_recorder_last(recorder, 7, &view));
    CHECK(!view.running && view.status == TUTTI_OK && view.info.algorithm == 5 && view.info.root == -1);
    /* The clock of the recorder may differ from the system's by what two readings are apart. */
    CHECK(view.created_ns > before - TU_MILLISECOND && view.ended_ns >= view.created_ns);
    CHECK(view.ended_ns < tu_clock_now() + TU_MILLISECOND);
    end_recorder(recorder);
}

TEST(what_was_over_at_once_is_recorded_whole_and_was_never_seen_running) {
    tu_recorder *recorder = new_recorder();
    tu_operation_info info = operation(TU_OPERATION_SEND, 7, 1);
    tu_record_view view;
    uint64_t began = tu_record_time(recorder);
    uint64_t waits = tu_record_begin_at(recorder, &info, began);
    info.sequence = 2;
    tu_record_past(recorder, &info, began, tu_record_time(recorder), 4096 * 4);
    CHECK(tu_recorder_current(recorder, 7, &view) && view.info.sequence == 1);
    CHECK(tu_recorder_last(recorder, 7, &view) && view.info.sequence == 2 && view.status == TUTTI_OK);
    CHECK(!view.running && view.waiting_for == -1 && view.ended_ns >= view.created_ns);
    CHECK(view.thread == (uint32_t)gettid());
    tu_record_end(recorder, waits, TUTTI_OK);
    tu_counters counters;
    tu_recorder_counters(recorder, TU_OPERATION_SEND, &counters);
    CHECK(counters.calls == 2 && counters.failures == 0 && counters.bytes == 2 * 4096 * 4);
    end_recorder(recorder);
}

TEST(a_failed_operation_is_not_the_last_one_that_ended_well) {
    tu_recorder *recorder = new_recorder();
    tu_operation_info info = operation(TU_OPERATION_BARRIER, 7, 1);
    tu_record_end(recorder, tu_record_begin(recorder, &info), TUTTI_OK);
    info.sequence = 2;
    tu_record_end(recorder, tu_record_begin(recorder, &info), TUTTI_ERROR_TIMEOUT);
    tu_record_view view;
    CHECK(tu_recorder_last(recorder, 7, &view) && view.info.sequence == 1);
    CHECK(tu_recorder_entry(recorder, 0, &view) && view.info.sequence == 2 && view.status == TUTTI_ERROR_TIMEOUT);
    CHECK(tu_recorder_entry(recorder, 1, &view) && view.info.sequence == 1);
    CHECK(!tu_recorder_entry(recorder, 2, &view));
    end_recorder(recorder);
}

TEST(the_ring_keeps_the_newest_entries_and_the_one_that_hangs) {
    tu_recorder *recorder = new_recorder();
    tu_operation_info hanging = operation(TU_OPERATION_RECV, 9, 1);
    uint64_t ticket = tu_record_begin(recorder, &hanging);
    tu_operation_info info = operation(TU_OPERATION_ALL_GATHER, 7, 0);
    for (info.sequence = 1; info.sequence <= 3 * TU_RECORDER_ENTRIES; info.sequence++)
        tu_record_end(recorder, tu_record_begin(recorder, &info), TUTTI_OK);
    tu_record_view view;
    CHECK(tu_recorder_current(recorder, 0, &view) && view.info.operation == TU_OPERATION_RECV);
    CHECK(tu_recorder_last(recorder, 0, &view) && view.info.sequence == 3 * TU_RECORDER_ENTRIES);
    tu_record_view *views = calloc(TU_RECORDER_ENTRIES, sizeof *views);
    size_t count = tu_recorder_snapshot(recorder, views, TU_RECORDER_ENTRIES);
    CHECK(count >= TU_RECORDER_ENTRIES - 1);
    for (size_t i = 1; i < count; i++)
        CHECK(views[i].id > views[i - 1].id && views[i].created_ns >= views[i - 1].created_ns);
    tu_record_end(recorder, ticket, TUTTI_OK);
    CHECK(!tu_recorder_current(recorder, 0, &view));
    free(views);
    end_recorder(recorder);
}

TEST(a_ring_is_as_long_as_it_is_asked_to_be) {
    CHECK_EQ(tu_recorder_round(0), TU_RECORDER_ENTRIES);
    CHECK_EQ(tu_recorder_round(1), TU_RECORDER_LEAST);
    CHECK_EQ(tu_recorder_round(64), 64);
    CHECK_EQ(tu_recorder_round(65), 128);
    CHECK_EQ(tu_recorder_round(INT64_MAX), TU_RECORDER_MOST);
    tu_recorder *recorder = new_recorder_of(64);
    CHECK_EQ(tu_recorder_entries(recorder), 64);
    tu_operation_info info = operation(TU_OPERATION_ALL_GATHER, 7, 0);
    for (info.sequence = 1; info.sequence <= 200; info.sequence++)
        tu_record_end(recorder, tu_record_begin(recorder, &info), TUTTI_OK);
    tu_record_view views[64];
    CHECK_EQ(tu_recorder_snapshot(recorder, views, 64), 64);
    CHECK_EQ(views[0].info.sequence, 137);
    CHECK_EQ(views[63].info.sequence, 200);
    CHECK_EQ(tu_recorder_snapshot(recorder, views, 10), 10);
    CHECK_EQ(views[0].info.sequence, 191);
    end_recorder(recorder);
}

TEST(counters_add_up_per_operation_and_algorithm) {
    tu_recorder *recorder = new_recorder();
    tu_operation_info info = operation(TU_OPERATION_ALL_REDUCE, 7, 1);
    info.algorithm = 2;
    tu_record_end(recorder, tu_record_begin(recorder, &info), TUTTI_OK);
    info.algorithm = 200; /* beyond the last: counted there */
    tu_record_end(recorder, tu_record_begin(recorder, &info), TUTTI_ERROR_DEAD);
    tu_counters counters;
    tu_recorder_counters(recorder, TU_OPERATION_ALL_REDUCE, &counters);
    CHECK_EQ(counters.calls, 2);
    CHECK_EQ(counters.failures, 1);
    CHECK_EQ(counters.bytes, 2 * 4096 * 4);
    CHECK_EQ(counters.by_algorithm[2], 1);
    CHECK_EQ(counters.by_algorithm[TU_COUNTER_ALGORITHMS - 1], 1);
    tu_recorder_counters(recorder, TU_OPERATION_BARRIER, &counters);
    CHECK_EQ(counters.calls, 0);
    end_recorder(recorder);
}

#define WRITERS 5
#define CALLS 4000

static void *write_many(void *argument) {
    tu_recorder *recorder = argument;
    for (uint64_t i = 1; i <= CALLS; i++) {
        tu_operation_info info = operation(TU_OPERATION_ALL_REDUCE, i, i);
        info.count = i;
        info.tag = (int32_t)i;
        uint64_t ticket = tu_record_begin(recorder, &info);
        tu_record_waiting(recorder, ticket, (int)(i % 8));
        tu_record_end(recorder, ticket, TUTTI_OK);
    }
    return NULL;
}

TEST(readers_never_see_a_mixture_of_two_entries) {
    tu_recorder *recorder = new_recorder();
    tu_record_view *views = calloc(TU_RECORDER_ENTRIES, sizeof *views);
    pthread_t writers[WRITERS];
    for (int i = 0; i < WRITERS; i++)
        CHECK(pthread_create(&writers[i], NULL, write_many, recorder) == 0);
    for (int round = 0; round < 50; round++) {
        size_t count = tu_recorder_snapshot(recorder, views, TU_RECORDER_ENTRIES);
        for (size_t i = 0; i < count; i++) {
            const tu_operation_info *info = &views[i].info;
            CHECK(info->count == info->sequence && info->group_key == info->sequence);
            CHECK((uint64_t)info->tag == info->sequence);
        }
    }
    for (int i = 0; i < WRITERS; i++)
        pthread_join(writers[i], NULL);
    tu_counters counters;
    tu_recorder_counters(recorder, TU_OPERATION_ALL_REDUCE, &counters);
    CHECK_EQ(counters.calls, WRITERS * CALLS);
    CHECK_EQ(counters.bytes, (uint64_t)WRITERS * CALLS * (CALLS + 1) / 2 * 4);
    free(views);
    end_recorder(recorder);
}

TEST(group_names_last_until_others_need_the_room_and_the_first_lasts_for_ever) {
    tu_recorder *recorder = new_recorder();
    int ranks[] = { 0, 1, 2, 5 };
    CHECK_EQ(tu_recorder_group(recorder, 100, "0", ranks, 4), 0);
    uint32_t tensor = tu_recorder_group(recorder, 101, "tensor", ranks + 2, 2);
    CHECK(strcmp(tu_recorder_group_name(recorder, tensor), "tensor") == 0);
    tu_recorder_group_view views[TU_RECORDER_GROUPS];
    CHECK_EQ(tu_recorder_groups(recorder, views), 2);
    CHECK(views[1].key == 101 && views[1].size == 2 && views[1].world_ranks[1] == 5);
    for (int i = 0; i < TU_RECORDER_GROUPS; i++)
        tu_recorder_group(recorder, (uint64_t)(200 + i), "later", ranks, 4);
    CHECK(strcmp(tu_recorder_group_name(recorder, 0), "0") == 0);
    CHECK(strcmp(tu_recorder_group_name(recorder, tensor), "?") == 0);
    CHECK(strcmp(tu_recorder_group_name(recorder, TU_RECORDER_GROUPS), "later") == 0);
    end_recorder(recorder);
}

TEST(the_text_of_an_operation_says_what_a_person_needs) {
    tu_recorder *recorder = new_recorder();
    int ranks[] = { 0, 1 };
    tu_operation_info info = operation(TU_OPERATION_ALL_REDUCE, 100, 17);
    info.group_index = tu_recorder_group(recorder, 100, "0", ranks, 2);
    tu_record_view view = { .info = info };
    char text[200];
    tu_record_text(recorder, &view, text, sizeof text);
    CHECK(strcmp(text, "all_reduce 17 of group 0 (f32 sum, 4096 elements)") == 0);
    view.info = (tu_operation_info){ .operation = TU_OPERATION_BARRIER, .sequence = 3, .root = -1 };
    tu_record_text(recorder, &view, text, sizeof text);
    CHECK(strcmp(text, "barrier 3 of group 0") == 0);
    view.info = (tu_operation_info){
        .operation = TU_OPERATION_SEND, .sequence = 4, .root = 1, .tag = 9, .dtype = TUTTI_U8, .count = 1
    };
    tu_record_text(recorder, &view, text, sizeof text);
    CHECK(strcmp(text, "send 4 of group 0 (u8, 1 element, to rank 1, tag 9)") == 0);
    end_recorder(recorder);
}

TEST(every_operation_is_found_by_its_name) {
    for (int i = 1; i < TU_OPERATION_COUNT; i++)
        CHECK_EQ(tu_operation_find(tu_operation_name((tu_operation)i)), i);
    CHECK_EQ(tu_operation_find("no_such_thing"), TU_OPERATION_NONE);
    CHECK(strcmp(tu_operation_name((tu_operation)250), "?") == 0);
}

/* Everything that a rank does with recorders, its own and others', after a peer has written `garbage` over it. */
static void use(tu_recorder *recorder, size_t bytes, int garbage) {
    tu_operation_info info = operation(TU_OPERATION_ALL_GATHER, 7, 3);
    static tu_record_view views[64];
    static tu_recorder_group_view groups[TU_RECORDER_GROUPS];
    tu_record_view view;
    char text[256];
    int ranks[2] = { 0, 1 };
    memset(recorder->memory, garbage, bytes);
    for (int i = 0; i < 100; i++) {
        uint64_t ticket = tu_record_begin(recorder, &info);
        tu_record_algorithm(recorder, ticket, 1);
        tu_record_waiting(recorder, ticket, 1);
        tu_record_end(recorder, ticket, TUTTI_OK);
    }
    memset(recorder->memory, garbage, bytes);
    if (tu_recorder_current(recorder, 0, &view) || tu_recorder_last(recorder, 0, &view) ||
        tu_recorder_entry(recorder, 3, &view))
        tu_record_text(recorder, &view, text, sizeof text);
    CHECK(tu_recorder_snapshot(recorder, views, 64) <= 64);
    CHECK(tu_recorder_entries(recorder) <= 64);
    tu_counters counters;
    tu_recorder_counters(recorder, TU_OPERATION_ALL_GATHER, &counters);
    tu_recorder_group(recorder, 7, "name", ranks, 2);
    memset(recorder->memory, garbage, bytes);
    CHECK(tu_recorder_groups(recorder, groups) <= TU_RECORDER_GROUPS);
}

TEST(garbage_in_a_recorder_leads_nobody_outside_of_it) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = (tu_recorder_bytes(64) + page - 1) / page * page;
    char *whole = mmap(NULL, bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(whole != MAP_FAILED);
    CHECK_EQ(mprotect(whole + page, bytes, PROT_READ | PROT_WRITE), 0);
    tu_recorder recorder = tu_recorder_at(whole + page, bytes);
    tu_recorder_init(&recorder);
    CHECK_EQ(tu_recorder_entries(&recorder), 64);
    for (int garbage = 0; garbage < 256; garbage += test_sanitized() ? 51 : 3)
        use(&recorder, bytes, garbage);
    munmap(whole, bytes + 2 * page);
}
