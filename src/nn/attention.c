/* SPDX-License-Identifier: Apache-2.0
 *
 * The attention module: one linear layer makes queries, keys and values of all heads, another mixes the heads' results.
 */
#include <stdlib.h>

#include "nn/module.h"

/* (…, length, width) to (…, heads, length, depth), a view */
static tt_tensor *to_heads(tt_tensor *x, int64_t heads) {
    tt_dims shape = tu_sizes(x);
    if (shape.count < 1)
        return NULL;
    int64_t width = shape.at[--shape.count];
    shape.at[shape.count++] = heads;
    shape.at[shape.count++] = width / heads;
    return tt_transpose(tt_reshape(x, shape), -3, -2);
}

static int attention_forward(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs) {
    const tt_attention_options *options = tt_module_user(module);
    tt_tensor *x = inputs.count > 0 ? inputs.at[0] : NULL;
    if (tu_pending_take(tu_tensor_check("attention", "x", x)) != TUTTI_OK)
        return -1;
    if (tt_dim_count(x) < 2 || tt_dim_count(x) >= TT_MAX_DIMS) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "x is %s and must be (…, length, width), of at most %d dimensions",
                tu_describe(x), TT_MAX_DIMS - 1);
        return -1;
    }
    tt_tensor_list parts = tt_chunk(tt_module_call(tt_module_child(module, "qkv"), x), 3, -1);
    if (parts.count != 3)
        return -1;
    tt_tensor *heads[3];
    for (int i = 0; i < 3; i++)
        heads[i] = to_heads(parts.at[i], options->heads);
    if (options->rope_base != 0) {
        tt_tensor *position = tt_arange(0, (double)tu_size(parts.at[0], -2), 1, TUTTI_I64,
                                        TUTTI_OPTIONS(tt_options, .device = tt_device_of(x)));
        heads[0] = tt_rope(heads[0], position, options->rope_base);
        heads[1] = tt_rope(heads[1], position, options->rope_base);
    }
    tt_tensor *seen = tt_attention(heads[0], heads[1], heads[2], !options->sees_all, 0);
    tt_tensor *together = tt_reshape(tt_transpose(seen, -3, -2), tu_sizes(parts.at[0]));
    tt_tensor *mixed = tt_module_call(tt_module_child(module, "out"), together);
    outputs[0] = tt_module_call(tt_module_child(module, "dropout"), mixed);
    return 1;
}

bool tu_attention_options(int64_t width, const tt_attention_options *options, tt_attention_options *full) {
    *full = (tt_attention_options)TT_ATTENTION_OPTIONS_INIT;
    if (tu_self()->pending != TUTTI_OK ||
        tu_pending_take(tu_options_copy("tt_attention_options", options, full, sizeof *full)) != TUTTI_OK)
        return false;
    full->heads = full->heads != 0 ? full->heads : 1;
    full->dtype = full->dtype != 0 ? full->dtype : TUTTI_F32;
    if (full->heads <= 0 || width <= 0 || width % full->heads != 0)
        tu_fail(TUTTI_ERROR_ARGUMENT, "attention_module: %lld heads do not divide the width %lld",
                (long long)full->heads, (long long)width);
    else if (full->rope_base != 0 && width / full->heads % 2 != 0)
        tu_fail(TUTTI_ERROR_ARGUMENT,
                "attention_module: a head has %lld elements, and rope_base turns pairs of them: make it an even number",
                (long long)(width / full->heads));
    return tu_self()->pending == TUTTI_OK;
}

tt_module *tu_attention_of(const tt_attention_options *options, tt_module *qkv, tt_module *out) {
    static const tt_module_type type = { sizeof type, "Attention", attention_forward, free };
    tt_attention_options *kept = tu_self()->pending == TUTTI_OK ? malloc(sizeof *kept) : NULL;
    if (kept == NULL && tu_self()->pending == TUTTI_OK)
        tu_pending_take(tu_error_memory("a module", sizeof *kept));
    if (kept != NULL)
        *kept = *options;
    tt_module *module = kept != NULL ? tt_module_new(&type, kept) : NULL;
    if (module == NULL)
        free(kept);
    tt_module_add_child(module, "qkv", qkv); /* takes the reference also on failure */
    tt_module_add_child(module, "out", out);
    tt_module_add_child(module, "dropout", tt_dropout_module(options->dropout));
    if (tu_self()->pending == TUTTI_OK)
        return module;
    tt_module_release(module);
    return NULL;
}

tt_module *tt_attention_module(int64_t width, const tt_attention_options *options) {
    tt_attention_options full;
    if (!tu_attention_options(width, options, &full))
        return NULL;
    tt_module *qkv = tt_linear_module(width, 3 * width, full.bias, full.dtype);
    return tu_attention_of(&full, qkv, tt_linear_module(width, width, full.bias, full.dtype));
}
