/* SPDX-License-Identifier: Apache-2.0
 *
 * Lists of tensors, element by element, and the data movement of sharded training: all of it copies and views.
 */
#include <tutti/autograd.h>

#include "tensor/operators.h"

static bool same_count(const char *who, size_t first, size_t second) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (first != second)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: lists of %zu and %zu tensors", who, first, second);
    return first == second;
}

bool tt_foreach_copy_(tt_tensor_list to, tt_tensor_list from) {
    if (!same_count("foreach_copy_", to.count, from.count))
        return false;
    for (size_t i = 0; i < to.count; i++)
        tt_copy_(to.at[i], from.at[i]);
    return tu_self()->pending == TUTTI_OK;
}

bool tt_foreach_add_(tt_tensor_list a, tt_tensor_list b, double factor) {
    if (!same_count("foreach_add_", a.count, b.count))
        return false;
    for (size_t i = 0; i < a.count; i++)
        tt_add_scaled_(a.at[i], b.at[i], factor);
    return tu_self()->pending == TUTTI_OK;
}

bool tt_foreach_mul_scalar_(tt_tensor_list a, double number) {
    for (size_t i = 0; i < a.count; i++)
        tt_mul_scalar_(a.at[i], number);
    return tu_self()->pending == TUTTI_OK;
}

bool tt_foreach_addcdiv_(tt_tensor_list x, tt_tensor_list a, tt_tensor_list b, double factor) {
    if (!same_count("foreach_addcdiv_", x.count, a.count) || !same_count("foreach_addcdiv_", x.count, b.count))
        return false;
    for (size_t i = 0; i < x.count; i++)
        tt_addcdiv_(x.at[i], a.at[i], b.at[i], factor);
    return tu_self()->pending == TUTTI_OK;
}

tt_tensor_list tt_foreach_norm(tt_tensor_list a) {
    tt_tensor_list none = { 0, tu_nothing };
    if (tu_self()->pending != TUTTI_OK)
        return none;
    tt_tensor **norms = tu_scope_memory((a.count + 1) * sizeof *norms);
    for (size_t i = 0; norms != NULL && i < a.count; i++)
        norms[i] = tt_norm(a.at[i]);
    return tu_self()->pending == TUTTI_OK ? tt_tensors_of(a.count, norms) : none;
}

/* ---- sharding ---- */

static bool live_list(const char *who, tt_tensor_list list) {
    for (size_t i = 0; i < list.count; i++)
        if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check(who, "list", list.at[i])) != TUTTI_OK)
            return false;
    return tu_self()->pending == TUTTI_OK;
}

tt_tensor *tt_all_gather_copy_in(tt_tensor_list inputs, tt_tensor *out, int rank, int ranks) {
    int64_t total = 0, at = 0;
    if (!live_list("all_gather_copy_in", inputs) ||
        tu_pending_take(tu_tensor_check("all_gather_copy_in", "out", out)) != TUTTI_OK)
        return NULL;
    for (size_t i = 0; i < inputs.count; i++)
        total += inputs.at[i]->numel;
    if (ranks < 1 || rank < 0 || rank >= ranks || out->ndim != 1 || out->numel != total * ranks) {
        tu_fail(TUTTI_ERROR_ARGUMENT,
                "all_gather_copy_in: out is %s, but rank %d of %d with %lld elements each needs [%lld]",
                tu_describe(out), rank, ranks, (long long)total, (long long)total * ranks);
        return NULL;
    }
    tt_tensor *slice = tt_narrow(out, 0, rank * total, total);
    for (size_t i = 0; i < inputs.count; i++) {
        tt_tensor *x = inputs.at[i];
        tt_copy_(tt_view(tt_narrow(slice, 0, at, x->numel), tu_sizes(x)), x);
        at += x->numel;
    }
    return tu_self()->pending == TUTTI_OK ? slice : NULL;
}

bool tt_split_copy(tt_tensor *from, tt_tensor_list outs) {
    if (!live_list("split_copy", outs) || tu_pending_take(tu_tensor_check("split_copy", "from", from)) != TUTTI_OK)
        return false;
    int64_t rows = from->ndim == 2 ? from->sizes[0] : 0, at = 0, total = 0;
    for (size_t i = 0; i < outs.count; i++)
        total += rows > 0 ? outs.at[i]->numel / rows : 0;
    if (rows < 1 || total != from->sizes[1]) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "split_copy: the outputs have %lld elements per row, but from is %s",
                (long long)total, tu_describe(from));
        return false;
    }
    for (size_t i = 0; i < outs.count; i++) {
        int64_t width = outs.at[i]->numel / rows;
        tt_copy_(tt_view(outs.at[i], tt_shape(rows, width)), tt_narrow(from, 1, at, width));
        at += width;
    }
    return tu_self()->pending == TUTTI_OK;
}

tt_tensor *tt_chunk_cat(tt_tensor_list tensors, int parts, tt_tensor *out) {
    int64_t total = 0, at = 0;
    if (!live_list("chunk_cat", tensors) || tu_pending_take(tu_tensor_check("chunk_cat", "out", out)) != TUTTI_OK)
        return NULL;
    for (size_t i = 0; i < tensors.count && parts > 0; i++) {
        const tt_tensor *x = tensors.at[i];
        if (x->ndim == 0 || tu_promote_pair(x->dtype, out->dtype) != out->dtype) {
            tu_fail(TUTTI_ERROR_TYPE, "chunk_cat: %s cannot be cut, or does not fit into %s without loss",
                    tu_describe(x), tu_describe(out));
            return NULL;
        }
        total += (x->sizes[0] + parts - 1) / parts * (x->sizes[0] > 0 ? x->numel / x->sizes[0] : 0);
    }
    if (parts < 1 || out->ndim != 2 || out->sizes[0] != parts || out->sizes[1] != total) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "chunk_cat: out is %s and must be [%d, %lld]", tu_describe(out), parts,
                (long long)total);
        return NULL;
    }
    int64_t version = (int64_t)tu_version(out) + 1; /* this is one change, however many copies make it up */
    tt_zero_(out);
    for (size_t i = 0; i < tensors.count; i++) {
        tt_tensor *x = tensors.at[i];
        int64_t rows = (x->sizes[0] + parts - 1) / parts, row = x->sizes[0] > 0 ? x->numel / x->sizes[0] : 0;
        for (int part = 0; part < parts && row > 0; part++) {
            int64_t first = part * rows, count = x->sizes[0] - first < rows ? x->sizes[0] - first : rows;
            if (count <= 0)
                break;
            tt_tensor *place = tt_narrow(tt_select(out, 0, part), 0, at, count * row);
            tt_copy_(place, tt_reshape(tt_narrow(x, 0, first, count), tt_shape(count * row)));
        }
        at += rows * row;
    }
    tt_set_version(tt_tensors(out), 1, (int64_t[]){ version & UINT32_MAX });
    return tu_self()->pending == TUTTI_OK ? out : NULL;
}

/* ---- samples ---- */

static tt_tensor *detached(tu_sampler *sampler, tt_dims shape) {
    return tt_detach(sampler->make(sampler, TU_SAMPLE_NORMAL, shape, 0));
}

tt_tensor *tu_all_gather_copy_in_sample(tu_sampler *sampler) {
    tt_tensor *first = detached(sampler, tt_shape(sampler->size, 2)), *second = detached(sampler, tt_shape(3));
    tt_tensor *out = tt_zero_(tt_empty_like(detached(sampler, tt_shape(2 * (2 * sampler->size + 3)))));
    tt_all_gather_copy_in(tt_tensors(first, second), out, 1, 2);
    return out;
}

tt_tensor *tu_split_copy_sample(tu_sampler *sampler) {
    tt_tensor *from = detached(sampler, tt_shape(2, sampler->size + 3));
    tt_tensor *first = tt_zeros_like(detached(sampler, tt_shape(2, sampler->size)));
    tt_tensor *second = tt_zeros_like(detached(sampler, tt_shape(2, 3)));
    tt_split_copy(from, tt_tensors(first, second));
    return tt_cat(tt_tensors(first, second), 1);
}

tt_tensor *tu_chunk_cat_sample(tu_sampler *sampler) {
    tt_tensor *first = detached(sampler, tt_shape(3, 2)), *second = detached(sampler, tt_shape(sampler->size));
    tt_tensor *out = tt_empty_like(detached(sampler, tt_shape(2, 2 * 2 + (sampler->size + 1) / 2)));
    return tt_chunk_cat(tt_tensors(first, second), 2, out);
}
