/* SPDX-License-Identifier: Apache-2.0
 *
 * Random words by a counter, and dropout with them. The function is Philox-4x32 with ten rounds, as in tensor/random.c.
 * Elements come in groups of 64: those of group g are made from the blocks 16 g to 16 g + 15, and element 16 w + b of
 * the group is word w of block b. So a register holds one word of as many blocks as it has lanes, at every level.
 */
#define TU_GROUP_BLOCKS (TU_DROPOUT_GROUP / 4)

/* Each counter word in the low half of 64 bits; what is above does not count. */
typedef struct tu_philox {
    vec_u64 word[4];
} tu_philox;

TU_LANE tu_philox tu_philox_of(vec_u64 block, uint64_t seed, uint32_t rank) {
    vec_u64 first = block, second = block >> 32, third = block - block + rank, fourth = block - block;
    uint32_t key = (uint32_t)seed, other = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++, key += 0x9E3779B9u, other += 0xBB67AE85u) {
        vec_u64 left = tu_wide_product(first, 0xD2511F53u), right = tu_wide_product(third, 0xCD9E8D57u);
        first = (right >> 32) ^ second ^ (uint64_t)key;
        third = (left >> 32) ^ fourth ^ (uint64_t)other;
        second = right;
        fourth = left;
    }
    return (tu_philox){ { first, second, third, fourth } };
}

#if TU_LANES_F32 == 1
static void group_words(const tu_dropout_draw *draw, uint64_t block, uint32_t *words) {
    for (uint64_t i = 0; i < TU_GROUP_BLOCKS; i++) {
        tu_philox made = tu_philox_of(block + i, draw->seed, draw->rank);
        for (int k = 0; k < 4; k++)
            words[k * TU_GROUP_BLOCKS + i] = (uint32_t)made.word[k];
    }
}
#else
/* Even blocks in one vector and odd ones in another: together they fill the lanes of 32 bits in order. */
static void group_words(const tu_dropout_draw *draw, uint64_t block, uint32_t *words) {
    static const uint64_t steps[] = { 0, 2, 4, 6, 8, 10, 12, 14 };
    for (int i = 0; i < TU_GROUP_BLOCKS; i += TU_LANES_F32) {
        vec_u64 at = tu_load_u64(steps) + (block + (uint64_t)i);
        tu_philox even = tu_philox_of(at, draw->seed, draw->rank), odd = tu_philox_of(at + 1, draw->seed, draw->rank);
        for (int k = 0; k < 4; k++) {
            vec_u64 both = (even.word[k] & 0xffffffff) | (odd.word[k] << 32);
            memcpy(words + k * TU_GROUP_BLOCKS + i, &both, sizeof both);
        }
    }
}
#endif

static void dropout_f32(const tu_dropout_draw *draw, int64_t begin, int64_t end) {
    const float *x = draw->x;
    float *out = draw->out, kept = (float)draw->kept;
    for (int64_t i = begin; i < end; i += TU_DROPOUT_GROUP) {
        uint32_t words[TU_DROPOUT_GROUP];
        int64_t count = end - i < TU_DROPOUT_GROUP ? end - i : TU_DROPOUT_GROUP, j = 0;
        group_words(draw, draw->block + (uint64_t)(i / 4), words);
        for (; j + TU_LANES_F32 <= count; j += TU_LANES_F32) {
            vec_u32 word;
            memcpy(&word, words + j, sizeof word);
            vec_f32 value = tu_load_f32(x + i + j) * tu_splat_f32(kept);
            tu_store_f32(out + i + j, TU_SELECT(word < draw->limit, tu_splat_f32(0), value));
        }
        for (; j < count; j++)
            out[i + j] = words[j] < draw->limit ? 0 : x[i + j] * kept;
    }
}

static void dropout_f64(const tu_dropout_draw *draw, int64_t begin, int64_t end) {
    const double *x = draw->x;
    double *out = draw->out;
    for (int64_t i = begin; i < end; i += TU_DROPOUT_GROUP) {
        uint32_t words[TU_DROPOUT_GROUP];
        int64_t count = end - i < TU_DROPOUT_GROUP ? end - i : TU_DROPOUT_GROUP;
        group_words(draw, draw->block + (uint64_t)(i / 4), words);
        for (int64_t j = 0; j < count; j++)
            out[i + j] = words[j] < draw->limit ? 0 : x[i + j] * draw->kept;
    }
}
