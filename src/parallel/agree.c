/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks that begin together: they compare what they have, and take over what one of them has.
 */
#include "parallel/parallel.h"
#include "tensor/create.h"

#include <string.h>

#include <tutti/state.h>

static uint64_t mix(uint64_t hash, const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const unsigned char *)data)[i]) * 0x100000001B3u;
    return hash;
}

/* Of what must be the same on all ranks. */
static int64_t signature(const char *name, const tt_tensor *x, int cut) {
    uint64_t hash = mix(0xCBF29CE484222325u, name, strlen(name) + 1);
    hash = mix(hash, &x->dtype, sizeof x->dtype);
    hash = mix(hash, x->sizes, (size_t)x->ndim * sizeof *x->sizes);
    hash = mix(hash, &cut, sizeof cut);
    return (int64_t)hash;
}

/* One row of `count` numbers per rank; NULL with the error pending. */
static const int64_t *gather(const int64_t *own, size_t count, tutti_group *group) {
    size_t all = count * (size_t)tutti_group_size(group);
    int64_t *rows = tu_scope_memory((all + 1) * sizeof *rows);
    tt_tensor *mine = tt_from(own, tt_shape(count), TUTTI_I64, TU_OF_HOST);
    tt_tensor *gathered = tt_all_gather(mine, 0, group); /* also with an error pending, which the others must hear of */
    return rows != NULL && tt_read(gathered, rows, TUTTI_I64, all) ? rows : NULL;
}

static tutti_status compare_counts(const char *who, tt_named_list tensors, tutti_group *group) {
    int64_t own = (int64_t)tensors.count;
    const int64_t *counts = gather(&own, 1, group);
    for (int rank = 1; counts != NULL && rank < tutti_group_size(group); rank++)
        if (counts[rank] != counts[0])
            return tu_error(TUTTI_ERROR_MISMATCH, "%s: rank 0 has %lld parameters and rank %d has %lld", who,
                            (long long)counts[0], rank, (long long)counts[rank]);
    return tu_self()->pending;
}

static tutti_status compare_signatures(const char *who, tt_named_list tensors, const int *cuts, tutti_group *group) {
    int64_t *own = tu_scope_memory((tensors.count + 1) * sizeof *own);
    for (size_t i = 0; own != NULL && i < tensors.count; i++)
        own[i] = signature(tensors.names[i], tensors.at[i], cuts != NULL ? cuts[i] : 0);
    const int64_t *rows = gather(own, own != NULL ? tensors.count : 0, group);
    for (size_t i = 0; rows != NULL && i < tensors.count; i++)
        for (int rank = 1; rank < tutti_group_size(group); rank++)
            if (rows[(size_t)rank * tensors.count + i] != rows[i])
                return tu_error(
                    TUTTI_ERROR_MISMATCH,
                    "%s: parameter %zu has another name, shape or dtype%s on rank %d than on rank 0; here it "
                    "is \"%s\", %s %s",
                    who, i, cuts != NULL ? ", or is cut otherwise," : "", rank, tensors.names[i],
                    tutti_dtype_name(tensors.at[i]->dtype), tu_dims_text(tensors.at[i]->ndim, tensors.at[i]->sizes));
    return tu_self()->pending;
}

tutti_status tu_parallel_agree(const char *who, tt_named_list tensors, const int *cuts, tutti_group *group) {
    tt_scope scope = tt_scope_open();
    tutti_status status = compare_counts(who, tensors, group);
    if (status == TUTTI_OK && tensors.count > 0)
        status = compare_signatures(who, tensors, cuts, group);
    tu_pending_take(status);
    tu_scope_leave(&scope);
    return tu_self()->pending;
}

bool tu_parallel_agree_random(const char *who, tutti_group *group) {
    enum {
        NUMBERS = 3 /* of a state */
    };
    tt_scope scope = tt_scope_open();
    int64_t own[NUMBERS] = { 0 };
    tt_read(tt_random_state(), own, TUTTI_I64, NUMBERS);
    const int64_t *rows = gather(own, NUMBERS, group);
    for (int rank = 1; rows != NULL && rank < tutti_group_size(group) && tu_self()->pending == TUTTI_OK; rank++)
        if (memcmp(rows + NUMBERS * rank, rows, sizeof own) != 0)
            tu_fail(TUTTI_ERROR_MISMATCH,
                    "%s: the random generators of ranks 0 and %d are not in the same state, and would draw parts that "
                    "do not belong together; call tt_seed with the same numbers on all ranks before",
                    who, rank);
    tu_scope_leave(&scope);
    return tu_self()->pending == TUTTI_OK;
}

void tu_parallel_broadcast(tt_tensor_list tensors, int root, tutti_group *group) {
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    tt_tensor **dense = tu_scope_memory((tensors.count + 1) * sizeof *dense);
    for (size_t i = 0; dense != NULL && i < tensors.count; i++)
        dense[i] =
            tt_broadcast_(tt_contiguous(tensors.at[i]), root, group); /* all begin before the first is waited for */
    for (size_t i = 0; dense != NULL && i < tensors.count && tu_self()->pending == TUTTI_OK; i++)
        if (tt_wait(dense[i]) != NULL && !tt_same_storage(dense[i], tensors.at[i]))
            tt_copy_(tensors.at[i], dense[i]);
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
}

tutti_status tu_parallel_all(tutti_status status, const char *others, tutti_group *group) {
    tu_pending_copy error;
    tutti_error_copy own;
    tu_error_save(&own);
    tu_pending_save(&error); /* the others are told by the verdict, and the group goes on */
    bool good = status == TUTTI_OK && error.status == TUTTI_OK;
    tt_scope scope = tt_scope_open();
    bool all = tt_item(tt_all_reduce(tt_full(tt_shape(), good, TUTTI_I32, TU_OF_HOST), TUTTI_MIN, group)) > 0;
    tutti_status reached = tu_self()->pending;
    tu_scope_leave(&scope);
    if (error.status != TUTTI_OK) {
        tt_error_clear();
        tu_pending_restore(&error);
        return error.status;
    }
    if (status != TUTTI_OK) {
        tt_error_clear();
        return tu_error_restore(&own);
    }
    return reached != TUTTI_OK ? reached : all ? TUTTI_OK : tu_error(TUTTI_ERROR_STATE, "%s", others);
}
