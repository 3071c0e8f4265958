/* SPDX-License-Identifier: Apache-2.0
 *
 * Pool scopes: while one is open, the storages that its thread makes come from a pool of symmetric memory. A scope
 * counts and hashes what it gives out, so that the ranks of a group can find out at its end whether all have made the
 * same.
 */
#include <stdlib.h>

#include <tutti/symmetric.h>

#include "functional/registry.h"
#include "functional/symmetric.h"
#include "tensor/on_device.h"

/* What a scope gave out; the same words travel to the other ranks. */
typedef struct tally {
    uint64_t blocks, bytes, hash;
} tally;

typedef struct pool_scope {
    tu_source source;
    tutti_pool *pool;   /* kept */
    tutti_group *group; /* kept; NULL: nobody compares */
    tally given;
} pool_scope;

static tu_storage *make(tu_source *source, size_t bytes) {
    pool_scope *scope = (pool_scope *)source;
    tutti_memory *memory;
    if (tutti_pool_alloc(scope->pool, bytes, &memory) != TUTTI_OK)
        return NULL;
    scope->given.blocks++;
    scope->given.bytes += bytes;
    scope->given.hash = (scope->given.hash ^ bytes) * 0x9E3779B97F4A7C15u;
    scope->given.hash ^= scope->given.hash >> 29;
    return tu_symm_storage(memory, bytes);
}

static void end(tu_source *source) {
    pool_scope *scope = (pool_scope *)source;
    tutti_pool_release(scope->pool);
    tutti_group_release(scope->group);
    free(scope);
}

bool tt_symm_pool_begin(tutti_pool *pool, tutti_group *group) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_thread_register()) != TUTTI_OK)
        return false;
    if (pool == NULL || group == TUTTI_NON_GROUP_MEMBER) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "symm_pool_begin: %s",
                pool == NULL ? "argument pool is NULL" : "this rank is no member of the group");
        return false;
    }
    tu_device *found = NULL;
    if (tutti_pool_device(pool) != TUTTI_CPU &&
        tu_pending_take(tu_device_get(tutti_pool_device(pool), &found)) != TUTTI_OK)
        return false;
    pool_scope *scope = malloc(sizeof *scope);
    if (scope == NULL) {
        tu_pending_take(tu_error_memory("a pool scope", sizeof *scope));
        return false;
    }
    *scope = (pool_scope){ .source = { make, end, tu_self()->source, found != NULL ? found->number : TUTTI_CPU },
                           .pool = tutti_pool_keep(pool) };
    if (group != NULL)
        scope->group = tutti_group_keep(group);
    tu_self()->source = &scope->source;
    return true;
}

/* Every rank tells what it gave out. All see the same, and so all come to the same answer. */
static tutti_status compare(const pool_scope *scope) {
    int ranks = tutti_group_size(scope->group), mine = tutti_group_rank(scope->group);
    tally *all = malloc((size_t)ranks * sizeof *all);
    if (all == NULL)
        return tu_error_memory("what the ranks allocated", (size_t)ranks * sizeof *all);
    tutti_status status = tutti_all_gather(scope->group, &scope->given, all, 3, TUTTI_U64, NULL);
    for (int i = 1; i < ranks && status == TUTTI_OK; i++)
        if (all[i].blocks != all[0].blocks || all[i].bytes != all[0].bytes || all[i].hash != all[0].hash)
            status = tu_error(
                TUTTI_ERROR_MISMATCH,
                "symm_pool_end: rank 0 made %llu tensors of %llu bytes together in this pool scope and rank %d %llu of "
                "%llu%s; all ranks must make the same ones in the same order (this is rank %d)",
                (unsigned long long)all[0].blocks, (unsigned long long)all[0].bytes, i,
                (unsigned long long)all[i].blocks, (unsigned long long)all[i].bytes,
                all[i].blocks == all[0].blocks && all[i].bytes == all[0].bytes ? ", of other sizes or in another order"
                                                                               : "",
                mine);
    free(all);
    return status;
}

bool tt_symm_pool_end(void) {
    pool_scope *scope = (pool_scope *)tu_self()->source;
    if (scope == NULL) {
        tu_fail(TUTTI_ERROR_STATE, "symm_pool_end: no pool scope is open in this thread");
        return false;
    }
    tu_self()->source = scope->source.outer;
    if (scope->group != NULL && tu_self()->pending != TUTTI_OK)
        tu_flight_check("symm_pool_end", scope->group, false); /* tells the others why this rank does not come */
    else if (scope->group != NULL)
        tu_pending_take(compare(scope));
    end(&scope->source);
    return tu_self()->pending == TUTTI_OK;
}
