/* SPDX-License-Identifier: Apache-2.0
 *
 * The words of a row that say what its arguments are, for the preprocessor alone: rows.h makes entries and functions of
 * them, kernels in C and in CUDA C their variables. Who includes operators.def for kernels defines TU_VARIABLE(name),
 * an input's element, and TU_CONSTANT(name), an attribute.
 */
#ifndef TU_TENSOR_WORDS_H
#define TU_TENSOR_WORDS_H

/* ---- lists of words ---- */

/* verb(context, word) for each word in parentheses, with separator() between. */
#define TU_EACH(verb, context, separator, words) TU_EACH_OF(verb, context, separator, TU_BARE words)
#define TU_BARE(...) __VA_ARGS__
#define TU_EACH_OF(verb, context, separator, ...) \
    TU_JOIN(TU_EACH, TU_COUNT(__VA_ARGS__))(verb, context, separator, __VA_ARGS__)
#define TU_JOIN(left, right) TU_JOIN_OF(left, right)
#define TU_JOIN_OF(left, right) left##right
#define TU_COUNT(...) TU_COUNT_OF(__VA_ARGS__, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
#define TU_COUNT_OF(one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, count, ...) \
    count
#define TU_EACH1(verb, context, separator, word) verb(context, word)
#define TU_EACH2(verb, context, separator, word, ...) \
    verb(context, word) separator() TU_EACH1(verb, context, separator, __VA_ARGS__)
#define TU_EACH3(verb, context, separator, word, ...) \
    verb(context, word) separator() TU_EACH2(verb, context, separator, __VA_ARGS__)
#define TU_EACH4(verb, context, separator, word, ...) \
    verb(context, word) separator() TU_EACH3(verb, context, separator, __VA_ARGS__)
#define TU_EACH5(verb, context, separator, word, ...) \
    verb(context, word) separator() TU_EACH4(verb, context, separator, __VA_ARGS__)
#define TU_EACH6(verb, context, separator, word, ...) \
    verb(context, word) separator() TU_EACH5(verb, context, separator, __VA_ARGS__)
#define TU_EACH7(verb, context, separator, word, ...) \
    verb(context, word) separator() TU_EACH6(verb, context, separator, __VA_ARGS__)
#define TU_EACH8(verb, context, separator, word, ...) \
    verb(context, word) separator() TU_EACH7(verb, context, separator, __VA_ARGS__)
#define TU_EACH9(verb, context, separator, word, ...) \
    verb(context, word) separator() TU_EACH8(verb, context, separator, __VA_ARGS__)
#define TU_EACH10(verb, context, separator, word, ...) \
    verb(context, word) separator() TU_EACH9(verb, context, separator, __VA_ARGS__)
#define TU_EACH11(verb, context, separator, word, ...) \
    verb(context, word) separator() TU_EACH10(verb, context, separator, __VA_ARGS__)
#define TU_EACH12(verb, context, separator, word, ...) \
    verb(context, word) separator() TU_EACH11(verb, context, separator, __VA_ARGS__)
#define TU_EACH13(verb, context, separator, word, ...) \
    verb(context, word) separator() TU_EACH12(verb, context, separator, __VA_ARGS__)
#define TU_NOTHING()
#define TU_COMMA() ,
#define TU_TEXT_COMMA() ", "

/* ---- arguments: each word is a tuple of what it is in each place ---- */

/* (parameter, member, member among the inputs, input, attribute, list, text, kernel's variable, table entry…) */
#define TU_TENSOR(name, optional, written) \
    (tt_tensor * name, , char name;        \
     , name, , , "tt_tensor *" #name, TU_VARIABLE(name), name, TT_ARGUMENT_TENSOR, optional, written, OF_TENSOR)
#define TENSOR(name) TU_TENSOR(name, false, false)
#define OPTIONAL(name) TU_TENSOR(name, true, false)
#define WRITTEN(name) TU_TENSOR(name, false, true)
#define WRITTEN_OPTIONAL(name) TU_TENSOR(name, true, true)
#define TENSORS(name) \
    (tt_tensor_list name, , , , , name, "tt_tensor_list " #name, , name, TT_ARGUMENT_TENSORS, false, false, OF_LIST)
#define TU_ATTRIBUTE(type, name, text, kind) \
    (type name, type name;                   \
     , , , .name = name, , text, TU_CONSTANT(name), name, TT_ARGUMENT_##kind, false, false, OF_ATTRIBUTE)
#define INT(name) TU_ATTRIBUTE(int, name, "int " #name, INT)
#define INT64(name) TU_ATTRIBUTE(int64_t, name, "int64_t " #name, INT64)
#define DOUBLE(name) TU_ATTRIBUTE(double, name, "double " #name, DOUBLE)
#define BOOL(name) TU_ATTRIBUTE(bool, name, "bool " #name, BOOL)
#define DIMS(name) TU_ATTRIBUTE(tt_dims, name, "tt_dims " #name, DIMS)
#define BYTES(name) TU_ATTRIBUTE(int64_t, name, "size_t " #name, INT64)
#define BITS(name) TU_ATTRIBUTE(int64_t, name, "uint64_t " #name, INT64)
#define INTS(name) TU_ATTRIBUTE(tu_ints, name, "const int64_t *" #name, INTS)
#define SHORT_INTS(name) TU_ATTRIBUTE(tu_ints, name, "const int *" #name, INTS)
#define COUNTED_INTS(count, name) TU_ATTRIBUTE(tu_ints, name, "size_t " #count ", const int64_t *" #name, INTS)
#define COUNTED_SHORT_INTS(count, name) TU_ATTRIBUTE(tu_ints, name, "size_t " #count ", const int *" #name, INTS)
#define DTYPE(name) TU_ATTRIBUTE(tutti_dtype, name, "tutti_dtype " #name, DTYPE)
#define DEVICE(name) TU_ATTRIBUTE(tutti_device, name, "const tt_options *options", DEVICE)
#define DEVICE_BY_VALUE(name) TU_ATTRIBUTE(tutti_device, name, "tutti_device " #name, DEVICE)
#define REDUCTION(name) TU_ATTRIBUTE(tutti_reduction, name, "tutti_reduction " #name, REDUCTION)
#define GROUP(name) TU_ATTRIBUTE(tutti_group *, name, "tutti_group *" #name, GROUP)

#define TU_PARAMETER(context, word) TU_PARAMETER_OF word
#define TU_PARAMETER_OF(parameter, ...) parameter
#define TU_MEMBER(context, word) TU_MEMBER_OF word
#define TU_MEMBER_OF(parameter, member, ...) member
#define TU_PLACE(context, word) TU_PLACE_OF word
#define TU_PLACE_OF(parameter, member, place, ...) place
#define TU_INPUT_VALUE(context, word) TU_INPUT_VALUE_OF word
#define TU_INPUT_VALUE_OF(parameter, member, place, input, ...) TU_ITEM(input)
#define TU_ATTRIBUTE_VALUE(context, word) TU_ATTRIBUTE_VALUE_OF word
#define TU_ATTRIBUTE_VALUE_OF(parameter, member, place, input, attribute, ...) TU_ITEM(attribute)
#define TU_LIST_VALUE(context, word) TU_LIST_VALUE_OF word
#define TU_LIST_VALUE_OF(parameter, member, place, input, attribute, list, ...) list
#define TU_TEXT(context, word) TU_TEXT_OF word
#define TU_TEXT_OF(parameter, member, place, input, attribute, list, text, ...) text
#define TU_LOAD(context, word) TU_LOAD_OF word
#define TU_LOAD_OF(parameter, member, place, input, attribute, list, text, variable, ...) variable
#define TU_TABLE_OF(parameter, member, place, input, attribute, list, text, variable, ...) __VA_ARGS__
#define TU_DESCRIBE(context, word) TU_DESCRIBE_WITH(context, TU_TEXT_OF word, TU_TABLE_OF word)
#define TU_DESCRIBE_WITH(...) TU_DESCRIBE_ENTRY(__VA_ARGS__)
#define TU_DESCRIBE_ENTRY(context, text, name, type, optional, written, kind) \
    { #name, text, type, optional, written, TU_OFFSET_##kind(context, name) },
#define TU_OFFSET_OF_TENSOR(context, name) 0
#define TU_OFFSET_OF_LIST(context, name) 0
#define TU_OFFSET_OF_ATTRIBUTE(context, name) offsetof(tu_##context##_attributes, name)
#define TU_OPTIONAL_BIT(context, word) TU_OPTIONAL_WITH(context, TU_TABLE_OF word)
#define TU_OPTIONAL_WITH(...) TU_OPTIONAL_ENTRY(__VA_ARGS__)
#define TU_OPTIONAL_ENTRY(context, name, type, optional, written, kind) | TU_BIT_##kind(context, name, optional)
#define TU_WRITTEN_BIT(context, word) TU_WRITTEN_WITH(context, TU_TABLE_OF word)
#define TU_WRITTEN_WITH(...) TU_WRITTEN_ENTRY(__VA_ARGS__)
#define TU_WRITTEN_ENTRY(context, name, type, optional, written, kind) | TU_BIT_##kind(context, name, written)
#define TU_BIT_OF_TENSOR(context, name, set) (set ? TU_INPUT(offsetof(tu_##context##_inputs, name)) : 0)
#define TU_BIT_OF_LIST(context, name, set) 0
#define TU_BIT_OF_ATTRIBUTE(context, name, set) 0
/* An item of an initializer, with its comma, or nothing. */
#define TU_ITEM(...) __VA_OPT__(__VA_ARGS__, )

#define TU_PARAMETERS(arguments) TU_EACH(TU_PARAMETER, , TU_COMMA, arguments)
#define TU_INPUT_VALUES(arguments) TU_EACH(TU_INPUT_VALUE, , TU_NOTHING, arguments)
#define TU_ATTRIBUTE_VALUES(arguments) TU_EACH(TU_ATTRIBUTE_VALUE, , TU_NOTHING, arguments)

#endif
