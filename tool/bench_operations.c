/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti bench`: the operations that can be measured, one row of a table each.
 */
#include <ctype.h>
#include <string.h>

#include "bench.h"

/* ---- what they call ---- */

static tutti_status run_barrier(const bench_call *call) {
    return tutti_barrier(call->group, call->call);
}

static tutti_status run_all_reduce(const bench_call *call) {
    return tutti_all_reduce(call->group, call->in, call->out, call->count, call->dtype, call->reduction, call->call);
}

static tutti_status run_reduce(const bench_call *call) {
    return tutti_reduce(call->group, call->in, call->out, call->count, call->dtype, call->reduction, call->root,
                        call->call);
}

static tutti_status run_reduce_scatter(const bench_call *call) {
    return tutti_reduce_scatter(call->group, call->in, call->out, call->count, call->dtype, call->reduction,
                                call->call);
}

static tutti_status run_reduce_scatter_v(const bench_call *call) {
    return tutti_reduce_scatter_v(call->group, call->in, call->out, call->counts, call->dtype, call->reduction,
                                  call->call);
}

static tutti_status run_all_gather(const bench_call *call) {
    return tutti_all_gather(call->group, call->in, call->out, call->count, call->dtype, call->call);
}

static tutti_status run_all_gather_v(const bench_call *call) {
    return tutti_all_gather_v(call->group, call->in, call->out, call->counts, NULL, call->dtype, call->call);
}

static tutti_status run_broadcast(const bench_call *call) {
    return tutti_broadcast(call->group, call->in, call->out, call->count, call->dtype, call->root, call->call);
}

static tutti_status run_gather(const bench_call *call) {
    return tutti_gather(call->group, call->in, call->out, call->count, call->dtype, call->root, call->call);
}

static tutti_status run_scatter(const bench_call *call) {
    return tutti_scatter(call->group, call->in, call->out, call->count, call->dtype, call->root, call->call);
}

static tutti_status run_all_to_all(const bench_call *call) {
    return tutti_all_to_all(call->group, call->in, call->out, call->count, call->dtype, call->call);
}

static tutti_status run_all_to_all_v(const bench_call *call) {
    return tutti_all_to_all_v(call->group, call->in, call->counts, NULL, call->out, call->counts, NULL, call->dtype,
                              call->call);
}

static tutti_status run_permute(const bench_call *call) {
    return tutti_permute(call->group, call->in, call->out, call->count, call->dtype, call->to, call->call);
}

/* Ranks in pairs, 0 with 1, 2 with 3, …; with an odd number the last has no partner and does nothing. */
static int partner(const bench_call *call) {
    int other = call->rank ^ 1;
    return other < call->size ? other : -1;
}

static tutti_status run_send_recv(const bench_call *call) {
    int other = partner(call);
    if (other < 0)
        return TUTTI_OK;
    bool first = call->rank < other;
    tutti_status status = first ? tutti_send(call->group, call->in, call->count, call->dtype, other, 0, call->call)
                                : tutti_recv(call->group, call->out, call->count, call->dtype, other, 0, call->call);
    if (status != TUTTI_OK)
        return status;
    return first ? tutti_recv(call->group, call->out, call->count, call->dtype, other, 0, call->call)
                 : tutti_send(call->group, call->in, call->count, call->dtype, other, 0, call->call);
}

static tutti_status run_put(const bench_call *call) {
    return tutti_peers_put(call->out_peers, (call->rank + 1) % call->size, call->out_offset, call->in,
                           call->count * tutti_dtype_size(call->dtype), call->call);
}

static tutti_status run_get(const bench_call *call) {
    return tutti_peers_get(call->in_peers, (call->rank + 1) % call->size, call->in_offset, call->out,
                           call->count * tutti_dtype_size(call->dtype), call->call);
}

static tutti_status run_signal(const bench_call *call) {
    int other = partner(call);
    if (other < 0)
        return TUTTI_OK;
    bool first = call->rank < other;
    tutti_status status = first ? tutti_peers_signal(call->out_peers, other, 0, call->call)
                                : tutti_peers_wait_signal(call->out_peers, other, 0, call->call);
    if (status != TUTTI_OK)
        return status;
    return first ? tutti_peers_wait_signal(call->out_peers, other, 0, call->call)
                 : tutti_peers_signal(call->out_peers, other, 0, call->call);
}

static tutti_status run_signal_barrier(const bench_call *call) {
    return tutti_peers_barrier(call->out_peers, 0, call->call);
}

/* ---- what their output must be ---- */

static bool expect_reduced(int rank, int size, int root, int part, bench_source *source) {
    (void)rank, (void)size, (void)root;
    *source = (bench_source){ -1, part };
    return true;
}

static bool expect_reduced_at_root(int rank, int size, int root, int part, bench_source *source) {
    (void)size;
    *source = (bench_source){ -1, part };
    return rank == root;
}

static bool expect_own_part_reduced(int rank, int size, int root, int part, bench_source *source) {
    (void)size, (void)root, (void)part;
    *source = (bench_source){ -1, rank };
    return true;
}

static bool expect_gathered(int rank, int size, int root, int part, bench_source *source) {
    (void)rank, (void)size, (void)root;
    *source = (bench_source){ part, 0 };
    return true;
}

static bool expect_gathered_at_root(int rank, int size, int root, int part, bench_source *source) {
    (void)size;
    *source = (bench_source){ part, 0 };
    return rank == root;
}

static bool expect_roots(int rank, int size, int root, int part, bench_source *source) {
    (void)rank, (void)size, (void)part;
    *source = (bench_source){ root, 0 };
    return true;
}

static bool expect_part_of_root(int rank, int size, int root, int part, bench_source *source) {
    (void)size, (void)part;
    *source = (bench_source){ root, rank };
    return true;
}

static bool expect_exchanged(int rank, int size, int root, int part, bench_source *source) {
    (void)size, (void)root;
    *source = (bench_source){ part, rank };
    return true;
}

static bool expect_previous(int rank, int size, int root, int part, bench_source *source) {
    (void)root, (void)part;
    *source = (bench_source){ (rank + size - 1) % size, 0 };
    return true;
}

static bool expect_next(int rank, int size, int root, int part, bench_source *source) {
    (void)root, (void)part;
    *source = (bench_source){ (rank + 1) % size, 0 };
    return true;
}

static bool expect_partner(int rank, int size, int root, int part, bench_source *source) {
    (void)root, (void)part;
    *source = (bench_source){ rank ^ 1, 0 };
    return (rank ^ 1) < size;
}

/* ---- how much passes between ranks, as nccl-tests counts ---- */

static double once(int size) {
    (void)size;
    return 1;
}

static double all_but_own(int size) {
    return (double)(size - 1) / size;
}

static double twice_all_but_own(int size) {
    return 2 * all_but_own(size);
}

const bench_operation bench_operations[] = {
    { "all_reduce", "", BENCH_WHOLE, true, false, false, 1, 1, twice_all_but_own, run_all_reduce, expect_reduced },
    { "reduce", "", BENCH_WHOLE, true, true, false, 1, 1, once, run_reduce, expect_reduced_at_root },
    { "reduce_scatter", "reduce_scatter_block", BENCH_SCATTER, true, false, false, 1, 1, all_but_own,
      run_reduce_scatter, expect_own_part_reduced },
    { "reduce_scatter_v", "", BENCH_SCATTER, true, false, false, 1, 1, all_but_own, run_reduce_scatter_v,
      expect_own_part_reduced },
    { "all_gather", "", BENCH_GATHER, false, false, false, 1, 1, all_but_own, run_all_gather, expect_gathered },
    { "all_gather_v", "", BENCH_GATHER, false, false, false, 1, 1, all_but_own, run_all_gather_v, expect_gathered },
    { "broadcast", "bcast", BENCH_WHOLE, false, true, false, 1, 1, once, run_broadcast, expect_roots },
    { "gather", "", BENCH_GATHER, false, true, false, 1, 1, all_but_own, run_gather, expect_gathered_at_root },
    { "scatter", "", BENCH_SCATTER, false, true, false, 1, 1, all_but_own, run_scatter, expect_part_of_root },
    { "all_to_all", "", BENCH_EXCHANGE, false, false, false, 1, 1, all_but_own, run_all_to_all, expect_exchanged },
    { "all_to_all_v", "", BENCH_EXCHANGE, false, false, false, 1, 1, all_but_own, run_all_to_all_v, expect_exchanged },
    { "permute", "", BENCH_WHOLE, false, false, false, 1, 1, once, run_permute, expect_previous },
    { "send_recv", "latency", BENCH_WHOLE, false, false, false, 2, 2, once, run_send_recv, expect_partner },
    { "barrier", "", BENCH_NOTHING, false, false, false, 1, 1, NULL, run_barrier, NULL },
    { "put", "put_latency", BENCH_WHOLE, false, false, true, 1, 1, once, run_put, expect_previous },
    { "get", "get_latency", BENCH_WHOLE, false, false, true, 1, 1, once, run_get, expect_next },
    { "signal", "", BENCH_NOTHING, false, false, true, 2, 2, NULL, run_signal, NULL },
    { "signal_barrier", "peers_barrier", BENCH_NOTHING, false, false, true, 1, 1, NULL, run_signal_barrier, NULL },
};
const int bench_operation_count = sizeof bench_operations / sizeof bench_operations[0];

/* Lower case, without "_" and "-"; at most `room` - 1 letters. */
static void plain(const char *name, size_t length, char *text, size_t room) {
    size_t used = 0;
    for (size_t i = 0; i < length && used + 1 < room; i++) {
        if (name[i] != '_' && name[i] != '-')
            text[used++] = (char)tolower((unsigned char)name[i]);
    }
    text[used] = '\0';
}

static bool has_name(const char *wanted, const char *names) {
    char one[64];
    for (size_t length; *names != '\0'; names += length + (names[length] == ' ')) {
        length = strcspn(names, " ");
        plain(names, length, one, sizeof one);
        if (strcmp(one, wanted) == 0)
            return true;
    }
    return false;
}

const bench_operation *bench_operation_find(const char *name) {
    char wanted[64];
    plain(name, strlen(name), wanted, sizeof wanted);
    char *start = strncmp(wanted, "osu", 3) == 0 ? wanted + 3 : wanted;
    size_t length = strlen(start);
    if (length > 4 && strcmp(start + length - 4, "perf") == 0)
        start[length - 4] = '\0';
    for (int i = 0; i < bench_operation_count; i++) {
        if (has_name(start, bench_operations[i].name) || has_name(start, bench_operations[i].aliases))
            return &bench_operations[i];
    }
    return NULL;
}

/* ---- sizes ---- */

size_t bench_in_elements(const bench_operation *operation, size_t count, int size) {
    bool parts = operation->shape == BENCH_SCATTER || operation->shape == BENCH_EXCHANGE;
    return operation->shape == BENCH_NOTHING ? 0 : parts ? count * (size_t)size : count;
}

size_t bench_out_elements(const bench_operation *operation, size_t count, int size) {
    bool parts = operation->shape == BENCH_GATHER || operation->shape == BENCH_EXCHANGE;
    return operation->shape == BENCH_NOTHING ? 0 : parts ? count * (size_t)size : count;
}

static size_t parts_of_larger(const bench_operation *operation, int size) {
    return operation->shape == BENCH_WHOLE ? 1 : (size_t)size;
}

size_t bench_count(const bench_operation *operation, size_t bytes, tutti_dtype dtype, int size) {
    if (operation->shape == BENCH_NOTHING)
        return 0;
    size_t count = bytes / tutti_dtype_size(dtype) / parts_of_larger(operation, size);
    return count > 0 ? count : 1;
}

size_t bench_bytes(const bench_operation *operation, size_t count, tutti_dtype dtype, int size) {
    return operation->shape == BENCH_NOTHING ? 0 : count * tutti_dtype_size(dtype) * parts_of_larger(operation, size);
}
