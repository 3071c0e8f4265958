/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensor parallel layers: column-wise and row-wise linear layers, embeddings cut by vocabulary, attention cut by heads,
 * and the cross-entropy of logits that nobody has whole. The cuts are Megatron-LM's.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <tutti/fused.h>

#include "nn/module.h"
#include "nn/optimizer.h"
#include "parallel/parallel.h"

/* ---- what all of them need ---- */

/* What a layer keeps. */
typedef struct layer {
    tutti_group *group; /* held */
    bool sequence, bias;
    int64_t first; /* of an embedding: this rank's first row */
} layer;

static void release_layer(void *user) {
    layer *kept = user;
    tutti_group_release(kept->group);
    free(kept);
}

static bool take_options(const char *who, const tt_tensor_parallel_options *options, tt_tensor_parallel_options *full) {
    *full = (tt_tensor_parallel_options){ .size = sizeof *full };
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (options != NULL &&
        tu_pending_take(tu_options_copy("tt_tensor_parallel_options", options, full, sizeof *full)) != TUTTI_OK)
        return false;
    full->dtype = full->dtype != 0 ? full->dtype : TUTTI_F32;
    if (full->group == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: options->group is NULL", who);
    else if (!tu_is_float(full->dtype))
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: tt_tensor_parallel_options.dtype is %s, and no float type", who,
                tutti_dtype_name(full->dtype));
    return tu_self()->pending == TUTTI_OK && tu_parallel_agree_random(who, full->group);
}

/* A size that is cut. */
static bool divides(const char *who, const char *what, int64_t size, const tt_tensor_parallel_options *options) {
    int ranks = tutti_group_size(options->group);
    if (size > 0 && size % ranks == 0)
        return true;
    tu_fail(TUTTI_ERROR_ARGUMENT, "%s: %s is %lld and must be divisible by the %d ranks of group \"%s\"", who, what,
            (long long)size, ranks, tutti_group_name(options->group));
    return false;
}

static tt_module *module_of(const tt_module_type *type, const tt_tensor_parallel_options *options, bool bias) {
    layer *kept = malloc(sizeof *kept);
    if (kept == NULL) {
        tu_pending_take(tu_error_memory("a module", sizeof *kept));
        return NULL;
    }
    *kept = (layer){ tutti_group_keep(options->group), options->sequence, bias, 0 };
    tt_module *module = tt_module_new(type, kept);
    if (module == NULL)
        release_layer(kept);
    return module;
}

static tt_module *checked(tt_module *module) {
    if (tu_self()->pending == TUTTI_OK)
        return module;
    tt_module_release(module);
    return NULL;
}

/* This rank's share of each of `parts` equal parts of x along dim. */
static tt_tensor *share_of(tt_tensor *x, int dim, int parts, tutti_group *group) {
    tt_tensor *pieces[3];
    int64_t part = tt_size(x, dim) / parts, share = part / tutti_group_size(group);
    for (int i = 0; i < parts; i++)
        pieces[i] = tt_narrow(x, dim, i * part + tutti_group_rank(group) * share, share);
    return parts == 1 ? tt_clone(pieces[0]) : tt_cat(tt_tensors_of((size_t)parts, pieces), dim);
}

/* Draws what tt_linear_module draws, and keeps a share: rows (dim 0) with their bias, or columns with all of it. */
static void draw_linear(tt_module *module, int64_t in, int64_t out, int dim, int parts,
                        const tt_tensor_parallel_options *options) {
    const layer *kept = tt_module_user(module);
    double bound = in > 0 ? 1 / sqrt((double)in) : 0;
    bool recording = tt_grad_mode(false);
    tt_scope scope = tt_scope_open();
    tt_tensor *weight = tt_uniform_(tt_empty(tt_shape(out, in), options->dtype, NULL), -bound, bound);
    tt_module_set_parameter(module, "weight", tt_parameter(share_of(weight, dim, parts, options->group), true));
    if (kept->bias) {
        tt_tensor *bias = tt_uniform_(tt_empty(tt_shape(out), options->dtype, NULL), -bound, bound);
        tt_module_set_parameter(module, "bias",
                                tt_parameter(dim == 0 ? share_of(bias, 0, parts, options->group) : bias, true));
    }
    tu_scope_leave(&scope);
    tt_grad_mode(recording);
}

/* The dimension along which a sequence is cut. */
static int length_dim(const char *who, const tt_tensor *x) {
    if (tu_pending_take(tu_tensor_check(who, "x", x)) != TUTTI_OK)
        return -1;
    if (x->ndim < 2)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: x is %s and must be (…, length, width)", who, tu_describe(x));
    return x->ndim - 2;
}

static tt_tensor *input_of(tt_tensor_list inputs) {
    return inputs.count > 0 ? inputs.at[0] : NULL;
}

/* ---- linear layers ---- */

static int column_forward(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs) {
    const layer *kept = tt_module_user(module);
    tt_tensor *x = input_of(inputs), *weight = tt_module_parameter(module, "weight");
    tt_tensor *bias = kept->bias ? tt_module_parameter(module, "bias") : NULL;
    if (!kept->sequence) {
        outputs[0] = tt_linear(tt_copy_to_group(x, kept->group), weight, bias);
        return 1;
    }
    int dim = length_dim("column_linear", x);
    tt_tensor_list products = tt_fused_all_gather_matmul(x, tt_tensors(tt_t(weight)), dim, kept->group, NULL);
    outputs[0] = products.count == 1 && bias != NULL ? tt_add(products.at[0], bias)
                 : products.count == 1               ? products.at[0]
                                                     : NULL;
    return 1;
}

static tt_module *column_of(const char *who, int64_t in, int64_t out, int parts, bool bias,
                            const tt_tensor_parallel_options *options) {
    static const tt_module_type type = { sizeof type, "ColumnLinear", column_forward, release_layer };
    if (!divides(who, "out", out / parts, options))
        return NULL;
    tt_module *module = module_of(&type, options, bias);
    if (module != NULL)
        draw_linear(module, in, out, 0, parts, options);
    return checked(module);
}

tt_module *tt_column_linear_module(int64_t in, int64_t out, bool bias, const tt_tensor_parallel_options *options) {
    tt_tensor_parallel_options full;
    return take_options("column_linear_module", options, &full)
               ? column_of("column_linear_module", in, out, 1, bias, &full)
               : NULL;
}

static int row_forward(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs) {
    const layer *kept = tt_module_user(module);
    tt_tensor *x = input_of(inputs), *weight = tt_module_parameter(module, "weight");
    tt_tensor *bias = kept->bias ? tt_module_parameter(module, "bias") : NULL;
    tt_tensor *sum = NULL;
    if (kept->sequence) {
        int dim = length_dim("row_linear", x);
        sum = tt_fused_matmul_reduce_scatter(x, tt_t(weight), TUTTI_SUM, dim, kept->group);
        bias = bias != NULL ? tt_copy_to_group(bias, kept->group)
                            : NULL; /* each rank's rows have a part in its gradient */
    } else {
        sum = tt_reduce_from_group(tt_linear(x, weight, NULL), kept->group);
    }
    outputs[0] = bias != NULL ? tt_add(sum, bias) : sum;
    return 1;
}

tt_module *tt_row_linear_module(int64_t in, int64_t out, bool bias, const tt_tensor_parallel_options *options) {
    static const tt_module_type type = { sizeof type, "RowLinear", row_forward, release_layer };
    tt_tensor_parallel_options full;
    if (!take_options("row_linear_module", options, &full) || !divides("row_linear_module", "in", in, &full))
        return NULL;
    tt_module *module = module_of(&type, &full, bias);
    if (module != NULL)
        draw_linear(module, in, out, 1, 1, &full);
    return checked(module);
}

/* ---- attention ---- */

tt_module *tt_heads_attention_module(int64_t width, const tt_attention_options *attention,
                                     const tt_tensor_parallel_options *options) {
    static const char who[] = "heads_attention_module";
    tt_tensor_parallel_options full;
    tt_attention_options heads;
    if (!take_options(who, options, &full) || !tu_attention_options(width, attention, &heads) ||
        !divides(who, "the number of heads", heads.heads, &full))
        return NULL;
    full.dtype = options->dtype != 0 ? full.dtype : heads.dtype;
    heads.heads /= tutti_group_size(full.group);
    tt_module *qkv = column_of(who, width, 3 * width, 3, heads.bias, &full);
    return tu_attention_of(&heads, qkv, tt_row_linear_module(width, width, heads.bias, &full));
}

/* ---- vocabularies ---- */

/* Which of `index` are in this rank's [first, first + count): a mask of those that another rank has, and the index
 * within. One that no rank has stays out of range, for the operator that reads by it to tell. */
static tt_tensor *locate(tt_tensor *index, int64_t first, int64_t count, int ranks, tt_tensor **elsewhere) {
    double from = -(double)first, end = (double)(count * ranks - first);
    tt_tensor *local = tt_add_scalar(tt_to(index, TUTTI_I64), from); /* smaller types would wrap */
    tt_tensor *other = tt_logical_or(tt_lt(local, tt_number(0)), tt_ge(local, tt_number((double)count)));
    tt_tensor *known = tt_logical_and(tt_ge(local, tt_number(from)), tt_lt(local, tt_number(end)));
    *elsewhere = tt_logical_and(other, known);
    return tt_masked_fill(local, *elsewhere, 0);
}

static int embedding_forward(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs) {
    const layer *kept = tt_module_user(module);
    tt_tensor *index = input_of(inputs), *weight = tt_module_parameter(module, "weight"), *elsewhere;
    tt_tensor *local =
        locate(index, kept->first, weight != NULL ? tt_size(weight, 0) : 0, tutti_group_size(kept->group), &elsewhere);
    tt_tensor *rows = tt_masked_fill(tt_embedding(weight, local), tt_unsqueeze(elsewhere, -1), 0);
    if (kept->sequence) {
        int dim = length_dim("vocabulary_embedding", rows);
        outputs[0] = tt_reduce_scatter(rows, TUTTI_SUM, dim, kept->group);
    } else {
        outputs[0] = tt_reduce_from_group(rows, kept->group);
    }
    return 1;
}

tt_module *tt_vocabulary_embedding_module(int64_t count, int64_t size, const tt_tensor_parallel_options *options) {
    static const tt_module_type type = { sizeof type, "VocabularyEmbedding", embedding_forward, release_layer };
    tt_tensor_parallel_options full;
    if (!take_options("vocabulary_embedding_module", options, &full) ||
        !divides("vocabulary_embedding_module", "count", count, &full))
        return NULL;
    tt_module *module = module_of(&type, &full, false);
    if (module != NULL) {
        layer *kept = tt_module_user(module);
        tt_scope scope = tt_scope_open();
        kept->first = count / tutti_group_size(full.group) * tutti_group_rank(full.group);
        tt_tensor *weight = tt_randn(tt_shape(count, size), full.dtype, NULL);
        tt_module_set_parameter(module, "weight", tt_parameter(share_of(weight, 0, 1, full.group), true));
        tu_scope_leave(&scope);
    }
    return checked(module);
}

/* ---- cross-entropy ---- */

/* The logit at the target, which one rank has. */
static tt_tensor *target_logits(tt_tensor *logits, tt_tensor *targets, tutti_group *group) {
    tt_tensor *elsewhere;
    int64_t count = tt_size(logits, 1);
    tt_tensor *local = locate(targets, count * tutti_group_rank(group), count, tutti_group_size(group), &elsewhere);
    tt_tensor *own = tt_squeeze(tt_gather_dim(logits, 1, tt_unsqueeze(local, 1)), 1);
    return tt_reduce_from_group(tt_masked_fill(own, elsewhere, 0), group);
}

tt_tensor *tt_vocabulary_cross_entropy(tt_tensor *logits, tt_tensor *targets, int64_t ignore, tutti_group *group) {
    static const char who[] = "vocabulary_cross_entropy";
    if (tu_self()->pending == TUTTI_OK && group == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: group is NULL", who);
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check(who, "logits", logits)) != TUTTI_OK ||
        tu_pending_take(tu_tensor_check(who, "targets", targets)) != TUTTI_OK)
        return NULL;
    if (logits->ndim != 2 || targets->ndim != 1 || logits->sizes[0] != targets->sizes[0] ||
        !tu_is_integer(targets->dtype)) {
        tu_fail(TUTTI_ERROR_ARGUMENT,
                "%s: logits is %s and targets is %s; they must be (n, classes / ranks) and n "
                "integers",
                who, tu_describe(logits), tu_describe(targets));
        return NULL;
    }
    tt_tensor *left_out = tt_eq(targets, tt_number((double)ignore));
    tt_tensor *most = tt_all_reduce(tt_amax(tt_detach(logits), tt_shape(1), true), TUTTI_MAX, group);
    tt_tensor *shifted = tt_sub(logits, most);
    tt_tensor *sum = tt_reduce_from_group(tt_sum_dims(tt_exp(shifted), tt_shape(1), false), group);
    tt_tensor *losses = tt_sub(tt_log(sum), target_logits(shifted, tt_masked_fill(targets, left_out, 0), group));
    tt_tensor *counted = tt_sum(tt_to(tt_logical_not(left_out), tt_dtype(losses)));
    return tt_div(tt_sum(tt_masked_fill(losses, left_out, 0)), counted);
}

/* ---- clipping ---- */

/* Parameters below a module: parts of tensor parallel layers, and those that every rank of their group has. */
typedef struct sorted {
    tt_tensor **parts, **wholes;
    size_t part_count, whole_count;
    tutti_group *group; /* of the parts; lent, or NULL */
    tu_map seen;        /* tensors: one may be in several slots */
    bool several;       /* there are several groups */
} sorted;

/* A row-wise layer has its bias whole. */
static bool is_part(const tt_module *module, const tu_module_slot *slot) {
    return (module->type.forward == column_forward || module->type.forward == embedding_forward ||
            module->type.forward == row_forward) &&
           !(module->type.forward == row_forward && strcmp(slot->name, "bias") == 0);
}

static void sort_slot(sorted *all, const tt_module *module, const tu_module_slot *slot) {
    if (slot->buffer || slot->tensor == NULL || tu_map_get(&all->seen, slot->tensor) != NULL)
        return;
    tu_pending_take(tu_map_set(&all->seen, slot->tensor, slot->tensor));
    if (!is_part(module, slot)) {
        all->wholes[all->whole_count++] = slot->tensor;
        return;
    }
    tutti_group *group = ((const layer *)module->user)->group;
    all->several = all->several || (all->group != NULL && all->group != group);
    all->group = group;
    all->parts[all->part_count++] = slot->tensor;
}

static void sort_parameters(sorted *all, const tt_module *module) {
    for (int i = 0; i < module->slot_count && tu_self()->pending == TUTTI_OK; i++)
        sort_slot(all, module, &module->slots[i]);
    for (int i = 0; i < module->child_count; i++)
        sort_parameters(all, module->children[i].module);
}

static tt_tensor *clip_sorted(const sorted *all, double limit, tutti_group *shards, const tt_clip_options *options) {
    tt_tensor_list parts = tt_tensors_of(all->part_count, all->parts);
    tt_tensor_list wholes = tt_tensors_of(all->whole_count, all->wholes);
    tt_tensor *powers = NULL;
    double p = options->p;
    if (all->group != NULL) /* also with an error pending, which the other ranks must hear of */
        powers = tu_powers_of_all(tu_grad_powers(parts, p), p, all->group);
    if (all->whole_count > 0 || all->group == NULL) {
        tt_tensor *others = tu_grad_powers(wholes, p);
        powers = powers != NULL ? tu_powers_of_both(powers, others, p) : others;
    }
    if (shards != NULL)
        powers = tu_powers_of_all(powers, p, shards);
    tt_tensor *norm = tu_norm_of(powers, options);
    tu_grad_scale(parts, norm, limit);
    tu_grad_scale(wholes, norm, limit);
    return norm;
}

tt_tensor *tt_module_clip_grad_norm_by(tt_module *module, double limit, tutti_group *shards,
                                       const tt_clip_options *options) {
    static const char who[] = "module_clip_grad_norm";
    tt_clip_options full;
    if (tu_self()->pending == TUTTI_OK && module == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: module is NULL", who);
    tu_settle_clip(who, limit, options, &full);
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    size_t most = tt_module_parameters(module).count + 1;
    sorted all = { .parts = tu_scope_memory(most * sizeof(tt_tensor *)),
                   .wholes = tu_scope_memory(most * sizeof(tt_tensor *)) };
    if (tu_self()->pending == TUTTI_OK)
        sort_parameters(&all, module);
    if (all.several)
        tu_fail(TUTTI_ERROR_UNSUPPORTED, "%s: the module has layers that are cut over other groups", who);
    tt_tensor *norm = clip_sorted(&all, limit, shards, &full);
    tu_map_free(&all.seen);
    tt_scope_return(norm);
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
    return tu_self()->pending == TUTTI_OK ? norm : NULL;
}

tt_tensor *tt_module_clip_grad_norm(tt_module *module, double limit, tutti_group *shards) {
    return tt_module_clip_grad_norm_by(module, limit, shards, NULL);
}

/* ---- parameters that every rank has ---- */

static tt_tensor *sum_over_group(const tt_hook_context *context, tt_tensor *grad) {
    return tt_all_reduce(grad, TUTTI_SUM, context->user);
}

static void release_group(void *group) {
    tutti_group_release(group);
}

bool tt_sum_gradients(tt_module *module, tutti_group *group) {
    if (tu_self()->pending == TUTTI_OK && group == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "sum_gradients: group is NULL");
    tt_scope scope = tt_scope_open();
    tt_named_list parameters = tt_module_parameters(module);
    for (size_t i = 0; i < parameters.count && tu_self()->pending == TUTTI_OK; i++) {
        tt_hook *hook = NULL;
        if (!tt_requires_grad(parameters.at[i]) ||
            !tt_hook_tensor(parameters.at[i], sum_over_group, group, NULL, &hook))
            continue;
        tutti_group_keep(group);
        hook->release = release_group;
        tt_hook_release(&hook);
    }
    tu_scope_leave(&scope);
    return tu_self()->pending == TUTTI_OK;
}
