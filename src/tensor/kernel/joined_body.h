/* SPDX-License-Identifier: Apache-2.0
 *
 * Several operators at once, for the float TYPE: each step works on what the step before left in registers.
 * kernel/pointwise.c includes it behind the operators' expressions, once for each float.
 */

/* Registers that go through the steps together, so that choosing a step is little beside its work. */
#ifndef TU_JOINED_TOGETHER
#define TU_JOINED_TOGETHER 8
#endif

#define VALUE_OF(name) VALUE_JOIN(name, SUFFIX)
#define VALUE_JOIN(name, suffix) VALUE_NAME(name, suffix)
#define VALUE_NAME(name, suffix) name##_value_##suffix

/* What is held is the left input (side 0) or the right one. */
#define STEP(name, side, left, right)                                      \
    case TU_JOINED_CASE(TU_POINTWISE_##name, side):                        \
        for (int k = 0; k < registers; k++) {                              \
            const VEC given[] = { left, right };                           \
            held[k] = VALUE_OF(name)(NULL, 0, 0, given, step->attributes); \
        }                                                                  \
        break;
#define OTHER GET(other + k * LANES, part)
#define UNARY(name) STEP(name, 0, held[k], held[k])
#define BINARY(name) STEP(name, 0, held[k], OTHER) STEP(name, 1, OTHER, held[k])

TU_LANE void TU_MEANING(joined_part)(const tu_joined_step *steps, int step_count, const TYPE *from, TYPE *to, int64_t i,
                                     int registers, int64_t part, bool past) {
    VEC held[TU_JOINED_TOGETHER];
    for (int k = 0; k < registers; k++)
        held[k] = GET(from + i + k * LANES, part);
    for (const tu_joined_step *step = steps; step < steps + step_count; step++) {
        const TYPE *other = (const TYPE *)step->other + i;
        switch (TU_JOINED_CASE(step->number, step->side)) { TU_JOINED_OPERATORS(UNARY, BINARY) }
    }
    for (int k = 0; k < registers; k++) {
        if (past && part == LANES)
            TU_MEANING(stream)(to + i + k * LANES, held[k]);
        else
            PUT(to + i + k * LANES, held[k], part);
    }
}

tu_joined_kernel TU_OF_LEVEL(tu_joined, SUFFIX);
void TU_OF_LEVEL(tu_joined, SUFFIX)(const tu_joined_step *steps, int step_count, const void *from, void *to,
                                    int64_t count, bool past) {
    int64_t i = 0;
    past = past && (uintptr_t)to % sizeof(VEC) == 0;
    for (; i + TU_JOINED_TOGETHER * LANES <= count; i += TU_JOINED_TOGETHER * LANES)
        TU_MEANING(joined_part)(steps, step_count, from, to, i, TU_JOINED_TOGETHER, LANES, past);
    for (; i + LANES <= count; i += LANES)
        TU_MEANING(joined_part)(steps, step_count, from, to, i, 1, LANES, past);
    if (i < count)
        TU_MEANING(joined_part)(steps, step_count, from, to, i, 1, count - i, past);
}

#undef VALUE_OF
#undef VALUE_JOIN
#undef VALUE_NAME
#undef STEP
#undef OTHER
#undef UNARY
#undef BINARY
