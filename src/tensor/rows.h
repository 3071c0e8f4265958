/* SPDX-License-Identifier: Apache-2.0
 *
 * The words of a row in operators.def, and what a row is turned into.
 *
 *     OPERATOR(PLAIN, narrow, "views", "a part of one dimension",
 *              (TENSOR(x), INT(dim), INT64(start), INT64(length)),
 *              (FLAG(TU_VIEW), SHAPE(tu_narrow_shape), GRADIENT(tu_narrow_gradient),
 *               SAMPLE(tt_narrow(NORMAL(SIZE, 5), 1, 1, 3))))
 *
 *     POINTWISE(BOTH, mul, "arithmetic", "a * b", (TENSOR(a), TENSOR(b)), ALL, a * b,
 *               (DERIVATIVE(0, TU_INPUT(1), tt_mul(GRAD, tu_conjugate(INPUT(1)))),
 *                DERIVATIVE(1, TU_INPUT(0), tt_mul(GRAD, tu_conjugate(INPUT(0)))),
 *                SAMPLE(tt_mul(NORMAL(SIZE, 3), POSITIVE(3)))))
 *
 * The form, first word of a row, says which functions the row defines:
 *
 *     PLAIN         tt_name, as <tutti/ops.h> or another public header declares it
 *     BOTH          tt_name and tt_name_, which writes its first tensor
 *     IN_PLACE      tt_name_ alone
 *     LIST          tt_name on a list of tensors
 *     BY_HAND       tu_name, on which a hand-written tt_name stands; BY_HAND_BOTH also tu_name_
 *     OWN           tu_name, under a hand-written function with other arguments, which the word PROTOTYPE shows
 *                   and DIFFERS explains: each name that only one of the two has, but for options, stands there;
 *                   OWN_IN_PLACE tu_name_, OWN_BOTH the two
 *     EACH          tu_name on a list, which gives a result for each of it; the public function is hand-written;
 *                   OWN_EACH has a PROTOTYPE; EACH_BOTH also tu_name_, which writes them all
 *     PRIVATE       tu_name; there is no public function; PRIVATE_EACH the same on a list
 *     MANY          tu_name, which returns bool and gives all its results through a last pointer; no public function
 *     EFFECT        the same, under a hand-written public function that the word PROTOTYPE shows
 *     EFFECT_LIST   the same on a list of tensors, without results
 *     COMPOSITE     nothing: a hand-written tt_name is made of other operators; COMPOSITE_OWN has a PROTOTYPE
 *
 * Arguments stand in the order of the C function. Attributes are members of tu_name_attributes, which calls carry:
 * `const tu_narrow_attributes *attributes = call->attributes;` and then attributes->dim. DEVICE(device) is the device
 * in a public function's tt_options. Some words are one attribute under several C types: BYTES is a size_t and BITS a
 * uint64_t, both kept as int64_t; INTS is a list of int64_t and SHORT_INTS one of int, whose length follows from the
 * other arguments, or stands before it: COUNTED_INTS(version_count, versions). DEVICE_BY_VALUE is a device that the
 * function takes itself.
 *
 * Properties: SHAPE is the shape rule, which is pure: it reads no data and writes nothing but results. CPU and CUDA
 * are the kernels for those devices, EVERYWHERE one for all; where a row has none for a device, a call there is an
 * error. DERIVATIVE(input, saves, formula) is the gradient of one input, where one formula is enough; GRADIENT names a
 * function else, and SAVES(input, saves) what it needs; SAVES_FROM(first, saves) speaks of all further inputs of a
 * list. In formulas GRAD is the gradient of the first result, INPUT(i) and RESULT(i) what was saved, `attributes` the
 * call's. RESULTS(results, saved) tells how many results the caller sees (else one), and how many more are kept for the
 * gradient. SAMPLE is a call for the table test, SAMPLER a function that makes one where an expression is not enough.
 *
 * Not every public function is a row. tt_foreach_… and tt_batch_p2p are loops over rows on lists, and a recorder sees
 * each part; docs/architecture.md tells why.
 */
#ifndef TU_TENSOR_ROWS_H
#define TU_TENSOR_ROWS_H

#include "tensor/operator.h"
#include "tensor/words.h"

/* ---- properties: the same ---- */

/* (initializer, flags, results, saved, declaration, gradient, whether there is one, sample) */
#define SHAPE(function) (.shape = function, , , , tu_shape_rule function;, , , )
#define CPU(function) (.kernels[TU_ON_CPU] = function, , , , tu_device_kernel function;, , , )
#define EVERYWHERE(function) (.kernels[0 ... TU_DEVICE_KINDS - 1] = function, , , , tu_device_kernel function;, , , )
#define CUDA(function) (.kernels[TU_ON_CUDA] = function, , , , tu_device_kernel function;, , , )
#define GRADIENT(function) (, , , , tu_gradient_formula function;, function(gradient);, | 1, )
#define DERIVATIVE(input, needed, formula) \
    (.saves[input] = (needed), , , , , if (gradient->needs[input]) gradient->results[input] = formula;, | 1, )
#define SAVES(input, needed) (.saves[input] = (needed), , , , , , , )
#define SAVES_FROM(first, needed) (.saves[first... TU_INPUTS - 1] = (needed), , , , , , , )
#define FLAG(flag) (, | (flag), , , , , , )
#define RESULTS(count, more) (, , -1 + (count), +(more), , , , )
#define DTYPES(text) (.dtypes = text, , , , , , , )
#define PROTOTYPE(text) (.prototype = text, , , , , , , )
#define DIFFERS(text) (.differs = text, , , , , , , )
#define DETAIL(pointer) (.detail = pointer, , , , , , , )
#define SAMPLE(call) (, , , , , , , call)
#define SAMPLER(function) (, , , , tu_sample_call function;, , , function(sampler))

#define TU_SET(context, word) TU_SET_OF word
#define TU_SET_OF(set, ...) TU_ITEM(set)
#define TU_FLAG(context, word) TU_FLAG_OF word
#define TU_FLAG_OF(set, flag, ...) flag
#define TU_RESULTS(context, word) TU_RESULTS_OF word
#define TU_RESULTS_OF(set, flag, results, ...) results
#define TU_SAVED(context, word) TU_SAVED_OF word
#define TU_SAVED_OF(set, flag, results, saved, ...) saved
#define TU_DECLARE(context, word) TU_DECLARE_OF word
#define TU_DECLARE_OF(set, flag, results, saved, declaration, ...) declaration
#define TU_FORMULA(context, word) TU_FORMULA_OF word
#define TU_FORMULA_OF(set, flag, results, saved, declaration, formula, ...) formula
#define TU_HAS_FORMULA(context, word) TU_HAS_FORMULA_OF word
#define TU_HAS_FORMULA_OF(set, flag, results, saved, declaration, formula, there, ...) there
#define TU_SAMPLE(context, word) TU_SAMPLE_OF word
#define TU_SAMPLE_OF(set, flag, results, saved, declaration, formula, there, sample) sample

/* In formulas and samples: */
#define GRAD gradient->grads[0]
#define INPUT(i) tu_saved(gradient, TU_INPUT(i))
#define RESULT(i) tu_saved(gradient, TU_OUTPUT(i))
#define SIZE sampler->size
#define SAMPLE_DEVICE tt_device_of(NORMAL(SIZE))
#define NORMAL(...) sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(__VA_ARGS__), 0)
#define POSITIVE(...) sampler->make(sampler, TU_SAMPLE_POSITIVE, tt_shape(__VA_ARGS__), 0)
#define INDEX(limit, ...) sampler->make(sampler, TU_SAMPLE_INDEX, tt_shape(__VA_ARGS__), limit)
#define MASK(...) sampler->make(sampler, TU_SAMPLE_BOOL, tt_shape(__VA_ARGS__), 0)

/* ---- what a row declares: its attributes, its private functions ---- */

#define TU_ROW_TYPES(form, name, arguments, properties)                                       \
    typedef struct tu_##name##_attributes {                                                   \
        TU_EACH(TU_MEMBER, , TU_NOTHING, arguments)                                           \
    } tu_##name##_attributes;                                                                 \
    typedef struct tu_##name##_inputs { /* only for its offsets: the places of the tensors */ \
        TU_EACH(TU_PLACE, , TU_NOTHING, arguments)                                            \
    } tu_##name##_inputs;                                                                     \
    extern const tu_operator tu_operator_##name;                                              \
    TU_EACH(TU_DECLARE, , TU_NOTHING, properties)                                             \
    TU_PRIVATE_##form(name, arguments)
#define TU_PRIVATE_PLAIN(name, arguments)
#define TU_PRIVATE_BOTH(name, arguments)
#define TU_PRIVATE_IN_PLACE(name, arguments)
#define TU_PRIVATE_LIST(name, arguments)
#define TU_PRIVATE_COMPOSITE(name, arguments)
#define TU_PRIVATE_COMPOSITE_OWN(name, arguments)
#define TU_PRIVATE_BY_HAND(name, arguments) tt_tensor *tu_##name(TU_PARAMETERS(arguments));
#define TU_PRIVATE_BY_HAND_BOTH(name, arguments)    \
    tt_tensor *tu_##name(TU_PARAMETERS(arguments)); \
    tt_tensor *tu_##name##_(TU_PARAMETERS(arguments));
#define TU_PRIVATE_OWN(name, arguments) tt_tensor *tu_##name(TU_PARAMETERS(arguments));
#define TU_PRIVATE_OWN_IN_PLACE(name, arguments) tt_tensor *tu_##name##_(TU_PARAMETERS(arguments));
#define TU_PRIVATE_OWN_BOTH(name, arguments) TU_PRIVATE_BY_HAND_BOTH(name, arguments)
#define TU_PRIVATE_EACH(name, arguments) tt_tensor_list tu_##name(TU_PARAMETERS(arguments));
#define TU_PRIVATE_OWN_EACH(name, arguments) TU_PRIVATE_EACH(name, arguments)
#define TU_PRIVATE_EACH_BOTH(name, arguments)           \
    tt_tensor_list tu_##name(TU_PARAMETERS(arguments)); \
    tt_tensor_list tu_##name##_(TU_PARAMETERS(arguments));
#define TU_PRIVATE_PRIVATE_EACH(name, arguments) TU_PRIVATE_EACH(name, arguments)
#define TU_PRIVATE_PRIVATE(name, arguments) tt_tensor *tu_##name(TU_PARAMETERS(arguments));
#define TU_PRIVATE_MANY(name, arguments) bool tu_##name(TU_PARAMETERS(arguments), tt_tensor **results);
#define TU_PRIVATE_EFFECT(name, arguments) bool tu_##name(TU_PARAMETERS(arguments), tt_tensor **results);
#define TU_PRIVATE_EFFECT_LIST(name, arguments) bool tu_##name(TU_PARAMETERS(arguments));

/* ---- what a row defines: its entry in the table, its functions ---- */

#define TU_ROW(form, identifier, family_name, text, arguments_, properties, ...)                                      \
    static void identifier##_gradient(tu_gradient *gradient) {                                                        \
        const tu_##identifier##_attributes *attributes = gradient->attributes;                                        \
        (void)attributes;                                                                                             \
        TU_EACH(TU_FORMULA, , TU_NOTHING, properties)                                                                 \
    }                                                                                                                 \
    static tt_tensor *identifier##_sample(tu_sampler *sampler) {                                                      \
        return TU_EACH(TU_SAMPLE, , TU_NOTHING, properties);                                                          \
    }                                                                                                                 \
    static const tu_argument identifier##_arguments[] = { TU_EACH(TU_DESCRIBE, identifier, TU_NOTHING, arguments_) }; \
    const tu_operator tu_operator_##identifier = {                                                                    \
        .name = #identifier,                                                                                          \
        .family = family_name,                                                                                        \
        .summary = text,                                                                                              \
        .flags = (TU_FLAGS_##form)TU_EACH(TU_FLAG, , TU_NOTHING, properties),                                         \
        .argument_count = sizeof identifier##_arguments / sizeof identifier##_arguments[0],                           \
        .arguments = identifier##_arguments,                                                                          \
        .attribute_bytes = sizeof(tu_##identifier##_attributes),                                                      \
        .optional = 0 TU_EACH(TU_OPTIONAL_BIT, identifier, TU_NOTHING, arguments_),                                   \
        .written = 0 TU_EACH(TU_WRITTEN_BIT, identifier, TU_NOTHING, arguments_),                                     \
        .results = 1 TU_EACH(TU_RESULTS, , TU_NOTHING, properties),                                                   \
        .saved = 0 TU_EACH(TU_SAVED, , TU_NOTHING, properties),                                                       \
        .gradient = (0 TU_EACH(TU_HAS_FORMULA, , TU_NOTHING, properties)) != 0 ? identifier##_gradient : NULL,        \
        .sample = identifier##_sample,                                                                                \
        TU_PROTOTYPE_##form(identifier, arguments_) TU_EACH(TU_SET, , TU_NOTHING, properties) __VA_ARGS__             \
    };                                                                                                                \
    static const tu_operator *const identifier##_entry __attribute__((used, section("tu_operators"))) =               \
        &tu_operator_##identifier;                                                                                    \
    TU_FUNCTIONS_##form(identifier, arguments_)

#define TU_FLAGS_PLAIN 0
#define TU_FLAGS_BOTH TU_HAS_IN_PLACE
#define TU_FLAGS_IN_PLACE TU_HAS_IN_PLACE
#define TU_FLAGS_LIST 0
#define TU_FLAGS_BY_HAND 0
#define TU_FLAGS_BY_HAND_BOTH TU_HAS_IN_PLACE
#define TU_FLAGS_OWN 0
#define TU_FLAGS_OWN_IN_PLACE TU_HAS_IN_PLACE
#define TU_FLAGS_OWN_BOTH TU_HAS_IN_PLACE
#define TU_FLAGS_EACH TU_EACH_INPUT
#define TU_FLAGS_OWN_EACH TU_EACH_INPUT
#define TU_FLAGS_EACH_BOTH (TU_EACH_INPUT | TU_HAS_IN_PLACE)
#define TU_FLAGS_PRIVATE TU_PRIVATE
#define TU_FLAGS_PRIVATE_EACH (TU_PRIVATE | TU_EACH_INPUT)
#define TU_FLAGS_MANY TU_PRIVATE
#define TU_FLAGS_EFFECT TU_IMPURE
#define TU_FLAGS_EFFECT_LIST TU_IMPURE
#define TU_FLAGS_COMPOSITE TU_COMPOSITE
#define TU_FLAGS_COMPOSITE_OWN TU_COMPOSITE

#define TU_PROTOTYPE_TEXT(name, arguments) TU_PROTOTYPE_OF("tt_tensor *", name, arguments)
#define TU_PROTOTYPE_OF(result, name, arguments) \
    .prototype = result "tt_" #name "(" TU_EACH(TU_TEXT, , TU_TEXT_COMMA, arguments) ")",
#define TU_PROTOTYPE_PLAIN(name, arguments) TU_PROTOTYPE_TEXT(name, arguments)
#define TU_PROTOTYPE_BOTH(name, arguments) TU_PROTOTYPE_TEXT(name, arguments)
#define TU_PROTOTYPE_IN_PLACE(name, arguments) TU_PROTOTYPE_TEXT(name##_, arguments)
#define TU_PROTOTYPE_LIST(name, arguments) TU_PROTOTYPE_TEXT(name, arguments)
#define TU_PROTOTYPE_BY_HAND(name, arguments) TU_PROTOTYPE_TEXT(name, arguments)
#define TU_PROTOTYPE_BY_HAND_BOTH(name, arguments) TU_PROTOTYPE_TEXT(name, arguments)
#define TU_PROTOTYPE_COMPOSITE(name, arguments) TU_PROTOTYPE_TEXT(name, arguments)
#define TU_PROTOTYPE_OWN(name, arguments)
#define TU_PROTOTYPE_OWN_EACH(name, arguments)
#define TU_PROTOTYPE_OWN_IN_PLACE(name, arguments)
#define TU_PROTOTYPE_OWN_BOTH(name, arguments)
#define TU_PROTOTYPE_EACH(name, arguments) TU_PROTOTYPE_OF("tt_tensor_list ", name, arguments)
#define TU_PROTOTYPE_EACH_BOTH(name, arguments) TU_PROTOTYPE_EACH(name, arguments)
#define TU_PROTOTYPE_PRIVATE(name, arguments)
#define TU_PROTOTYPE_PRIVATE_EACH(name, arguments)
#define TU_PROTOTYPE_MANY(name, arguments)
#define TU_PROTOTYPE_EFFECT(name, arguments)
#define TU_PROTOTYPE_EFFECT_LIST(name, arguments)
#define TU_PROTOTYPE_COMPOSITE_OWN(name, arguments)

/* A function: gathers inputs and attributes, and runs the entry. */
#define TU_GATHER(name, arguments)                        \
    tt_tensor *inputs[] = { TU_INPUT_VALUES(arguments) }; \
    tu_##name##_attributes attributes = { TU_ATTRIBUTE_VALUES(arguments) }
#define TU_RUN(runner, name) \
    runner(&tu_operator_##name, (int)(sizeof inputs / sizeof(tt_tensor *)), inputs, &attributes
#define TU_FUNCTION(function, runner, name, arguments) \
    tt_tensor *function(TU_PARAMETERS(arguments)) {    \
        TU_GATHER(name, arguments);                    \
        return TU_RUN(runner, name));                  \
    }
#define TU_FUNCTIONS_PLAIN(name, arguments) TU_FUNCTION(tt_##name, tu_run_new, name, arguments)
#define TU_FUNCTIONS_IN_PLACE(name, arguments) TU_FUNCTION(tt_##name##_, tu_run_in_place, name, arguments)
#define TU_FUNCTIONS_BOTH(name, arguments) TU_FUNCTIONS_PLAIN(name, arguments) TU_FUNCTIONS_IN_PLACE(name, arguments)
#define TU_FUNCTIONS_BY_HAND(name, arguments) TU_FUNCTION(tu_##name, tu_run_new, name, arguments)
#define TU_FUNCTIONS_BY_HAND_BOTH(name, arguments) \
    TU_FUNCTIONS_BY_HAND(name, arguments)          \
    TU_FUNCTION(tu_##name##_, tu_run_in_place, name, arguments)
#define TU_FUNCTIONS_OWN(name, arguments) TU_FUNCTIONS_BY_HAND(name, arguments)
#define TU_FUNCTIONS_OWN_IN_PLACE(name, arguments) TU_FUNCTION(tu_##name##_, tu_run_in_place, name, arguments)
#define TU_FUNCTIONS_OWN_BOTH(name, arguments) TU_FUNCTIONS_BY_HAND_BOTH(name, arguments)
#define TU_FUNCTION_EACH(function, runner, name, arguments)                                               \
    tt_tensor_list function(TU_PARAMETERS(arguments)) {                                                   \
        tu_##name##_attributes attributes = { TU_ATTRIBUTE_VALUES(arguments) };                           \
        return runner(&tu_operator_##name, TU_EACH(TU_LIST_VALUE, , TU_NOTHING, arguments), &attributes); \
    }
#define TU_FUNCTIONS_EACH(name, arguments) TU_FUNCTION_EACH(tu_##name, tu_run_each, name, arguments)
#define TU_FUNCTIONS_EACH_BOTH(name, arguments) \
    TU_FUNCTIONS_EACH(name, arguments)          \
    TU_FUNCTION_EACH(tu_##name##_, tu_run_each_in_place, name, arguments)
#define TU_FUNCTIONS_PRIVATE_EACH(name, arguments) TU_FUNCTIONS_EACH(name, arguments)
#define TU_FUNCTIONS_OWN_EACH(name, arguments) TU_FUNCTIONS_EACH(name, arguments)
#define TU_FUNCTIONS_PRIVATE(name, arguments) TU_FUNCTIONS_BY_HAND(name, arguments)
#define TU_FUNCTIONS_MANY(name, arguments)                          \
    bool tu_##name(TU_PARAMETERS(arguments), tt_tensor **results) { \
        TU_GATHER(name, arguments);                                 \
        return TU_RUN(tu_run_many, name), results);                 \
    }
#define TU_FUNCTIONS_EFFECT(name, arguments) TU_FUNCTIONS_MANY(name, arguments)
#define TU_FUNCTIONS_EFFECT_LIST(name, arguments)                                                             \
    bool tu_##name(TU_PARAMETERS(arguments)) {                                                                \
        tu_##name##_attributes attributes = { TU_ATTRIBUTE_VALUES(arguments) };                               \
        return tu_run_all(&tu_operator_##name, TU_EACH(TU_LIST_VALUE, , TU_NOTHING, arguments), &attributes); \
    }
#define TU_FUNCTIONS_LIST(name, arguments)                                                                     \
    tt_tensor *tt_##name(TU_PARAMETERS(arguments)) {                                                           \
        tu_##name##_attributes attributes = { TU_ATTRIBUTE_VALUES(arguments) };                                \
        return tu_run_list(&tu_operator_##name, TU_EACH(TU_LIST_VALUE, , TU_NOTHING, arguments), &attributes); \
    }
#define TU_FUNCTIONS_COMPOSITE(name, arguments)
#define TU_FUNCTIONS_COMPOSITE_OWN(name, arguments)

#endif
