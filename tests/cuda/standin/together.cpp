/* SPDX-License-Identifier: Apache-2.0
 *
 * The products that ranks make together in one kernel (src/tensor_cuda/together.cu, which is for Hopper), for the
 * stand-in driver: what they use of Hopper, on the CPU. A thread block is a thread of the system and its threads are
 * fibers, as with the kernels of the backends. Bulk copies and products of the tensor cores are over at once, and add
 * up in f32: this shows who waits for whom and what is read and written where, not what may still be on its way.
 */
#include "together.hpp"

#define TU_TENSOR_CUDA_TOGETHER_PTX_CUH /* all of it is here */

#include "tensor_map.hpp"

/* ---- shared memory: addresses are counted from where swizzles are ---- */

/* Not a constant at first: the kernel declares it as what another file may initialise. */
static volatile uint8_t nothing;
thread_local uint8_t raw[TU_TOGETHER_SHARED] = { nothing };
HERE uint8_t *shared_begin(void) {
    return (uint8_t *)(((uintptr_t)raw + 1023) / 1024 * 1024);
}
HERE uint32_t shared_address(const void *pointer) {
    return (uint32_t)((const uint8_t *)pointer - shared_begin());
}
/* Of 8 rows of 128 bytes each row has its 16 bytes in another order. */
HERE uint8_t *swizzled(uint32_t address) {
    return shared_begin() + (address ^ (address >> 7 & 7) << 4);
}

/* ---- barriers in shared memory ---- */

struct barrier {
    int32_t bytes;                         /* that are on their way, less those that have come */
    uint16_t count, waits : 15, phase : 1; /* arrivals that a phase takes; that it still takes */
};
static_assert(sizeof(barrier) == sizeof(uint64_t), "it lies in a word");

HERE barrier &barrier_of(uint64_t *word) {
    return *(barrier *)word;
}
HERE void settle(barrier &of) {
    if (of.waits > 0 || of.bytes != 0)
        return;
    of.phase ^= 1;
    of.waits = of.count;
    emulated_went_on();
}
HERE void barrier_open(uint64_t *word, int count) {
    barrier_of(word) = { 0, (uint16_t)count, (uint16_t)count, 0 };
}
HERE void barriers_opened(void) {}
HERE void barrier_arrive(uint64_t *word) {
    barrier_of(word).waits--;
    settle(barrier_of(word));
}
HERE void barrier_expect(uint64_t *word, uint32_t bytes) {
    barrier_of(word).bytes += (int32_t)bytes;
    barrier_arrive(word);
}
HERE void count_bytes(uint64_t *word, uint32_t bytes) {
    barrier_of(word).bytes -= (int32_t)bytes;
    settle(barrier_of(word));
}
HERE bool barrier_has(uint64_t *word, int parity) {
    if (barrier_of(word).phase == parity)
        emulated_yield();
    return barrier_of(word).phase != parity;
}
HERE void barrier_await(uint64_t *word, int parity) {
    while (!barrier_has(word, parity))
        ;
}

/* ---- no clusters: thread blocks are launched one by one ---- */

HERE int cluster_size(void) {
    return 1;
}
HERE int cluster_rank(void) {
    return 0;
}
HERE void cluster_meet(void) {}
HERE void cluster_sync(void) {}
HERE void barrier_arrive_in(uint64_t *word, int) {
    barrier_arrive(word);
}
HERE void store_in(uint32_t *word, int, uint32_t value) {
    *word = value;
}

/* ---- what is nearer than memory ---- */

HERE void bring_near(const float *) {}
HERE void store_matrices(uint32_t address, uint32_t first, uint32_t second, uint32_t third, uint32_t fourth) {
    uint32_t words[4] = { first, second, third, fourth }, lane = threadIdx.x % 32;
    const uint32_t *rows = exchange_in_warp(address);
    for (uint32_t i = 0; i < 4; i++)
        memcpy(shared_begin() + rows[i * 8 + lane / 4] + lane % 4 * 4, &words[i], sizeof words[i]);
    __syncwarp();
}

/* ---- bulk copies ---- */

HERE void load_box(void *to, const tu_tensor_map *map, uint64_t *word, int x, int y) {
    const standin::tensor_map &of = standin::tensor_map_of(map);
    uint32_t begin = shared_address(to);
    for (int row = 0; row < (int)of.box_rows; row++)
        for (int byte = 0; byte < 128; byte += 16) {
            int64_t column = x + byte / (int)of.element;
            bool there = y + row >= 0 && y + row < of.rows && column >= 0 && column < of.columns;
            uint8_t *place = swizzled(begin + (uint32_t)(row * 128 + byte));
            if (there)
                memcpy(place, of.data + (y + row) * of.step + column * of.element, 16);
            else
                memset(place, 0, 16);
        }
    count_bytes(word, of.box_rows * 128);
}
HERE void load_box_both(void *, const tu_tensor_map *, uint64_t *, int, int) {
    abort(); /* there are no pairs */
}
HERE void store_box(const tu_tensor_map *map, const void *from, int x, int y) {
    const standin::tensor_map &of = standin::tensor_map_of(map);
    uint32_t begin = shared_address(from);
    for (int row = 0; row < (int)of.box_rows; row++)
        for (int byte = 0; byte < 128; byte += 16) {
            int64_t column = x + byte / (int)of.element;
            if (y + row < of.rows && column < of.columns)
                memcpy(of.data + (y + row) * of.step + column * of.element,
                       swizzled(begin + (uint32_t)(row * 128 + byte)), 16);
        }
}
/* Not by a function of the library, which the thread sanitizer would watch: it does not see what orders the threads
 * here.
 */
HERE void copy_whole(uint8_t *to, const uint8_t *from, uint32_t bytes) {
    for (uint32_t at = 0; at < bytes; at += 16) {
        store_vector(to + at, load_vector(from + at));
        __asm__ volatile("" ::: "memory");
    }
}
HERE void load_bytes(void *to, uint64_t from, uint32_t bytes, uint64_t *word) {
    copy_whole((uint8_t *)to, (const uint8_t *)(uintptr_t)from, bytes);
    count_bytes(word, bytes);
}
HERE void store_bytes(uint64_t to, const void *from, uint32_t bytes) {
    copy_whole((uint8_t *)(uintptr_t)to, (const uint8_t *)from, bytes);
}
HERE void stores_commit(void) {}
template <int Open> HERE void stores_await_read(void) {}
HERE void stores_await(void) {}
HERE void prefetch_map(const tu_tensor_map *) {}
HERE void order_copies_global(void) {}
HERE void order_copies_shared(void) {}

/* ---- registers ---- */

template <int Count> HERE void give_registers(void) {}
template <int Count> HERE void take_registers(void) {}

/* ---- tensor cores ---- */

HERE uint64_t descriptor(const void *pointer, uint32_t leading, uint32_t stride) {
    return (uint64_t)shared_address(pointer) | (uint64_t)leading << 24 | (uint64_t)stride << 44;
}

/* 32 bytes of the depth, from there on. */
template <int Kind, int Depth> HERE void load_depth(float (&to)[Depth], uint32_t address) {
    constexpr int element = 32 / Depth;
    for (uint32_t half = 0; half < 2; half++) {
        const uint8_t *from = swizzled(address + half * 16);
        for (int k = 0; k < Depth / 2; k++) {
            uint16_t bits = from[k * element];
            if (element == 2)
                memcpy(&bits, from + k * 2, 2);
            to[(int)half * Depth / 2 + k] = value_of<Kind>(bits);
        }
    }
}

/* What this thread has of a product of 64 rows: of two rows two columns in every eight. */
template <int Left, int Right, int ByRows, int Count>
HERE void multiply_all(float (&sums)[Count], uint64_t left, uint64_t right, int add) {
    constexpr int depth = Left == E4M3 || Left == E5M2 ? 32 : 16;
    uint32_t begin_left = left & 0xffffff, begin_right = right & 0xffffff, leading = right >> 24 & 0xfffff,
             stride = (uint32_t)(right >> 44), row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    float of_left[2][depth], of_right[depth];
    load_depth<Left>(of_left[0], begin_left + row * 128);
    load_depth<Left>(of_left[1], begin_left + (row + 8) * 128);
    for (int i = 0; i < Count / 2; i++) {
        uint32_t column = (uint32_t)i / 2 * 8 + threadIdx.x % 4 * 2 + (uint32_t)i % 2;
        if (!ByRows)
            load_depth<Right>(of_right, begin_right + column / 8 * stride + column % 8 * 128);
        for (uint32_t k = 0; ByRows && k < depth; k++) {
            uint16_t bits;
            memcpy(&bits,
                   swizzled(begin_right + column / 64 * leading + k / 8 * stride + k % 8 * 128 + column % 64 * 2), 2);
            of_right[k] = value_of<Right>(bits);
        }
        float upper = 0, lower = 0;
        for (int k = 0; k < depth; k++) {
            upper += of_left[0][k] * of_right[k];
            lower += of_left[1][k] * of_right[k];
        }
        float *to = &sums[i / 2 * 4 + i % 2];
        to[0] = add ? to[0] + upper : upper;
        to[2] = add ? to[2] + lower : lower;
    }
    emulated_went_on();
}
template <int Left, int Right, int ByRows>
HERE void multiply(float (&sums)[128], uint64_t left, uint64_t right, int add) {
    multiply_all<Left, Right, ByRows>(sums, left, right, add);
}
template <int Left, int Right> HERE void multiply_f8(float (&sums)[64], uint64_t left, uint64_t right, int add) {
    multiply_all<Left, Right, 0>(sums, left, right, add);
}
HERE void products_begin(void) {}
HERE void products_commit(void) {}
template <int Open, int Count> HERE void products_await(float (&)[Count]) {}

#include "together.cu"

KERNEL_OF(bf16_columns)
KERNEL_OF(bf16_rows)
KERNEL_OF(f16_columns)
KERNEL_OF(f16_rows)
KERNEL_OF(e4m3_e4m3)
KERNEL_OF(e4m3_e5m2)
KERNEL_OF(e5m2_e4m3)
KERNEL_OF(e5m2_e5m2)
KERNEL_OF(e4m3_e4m3_fast)
KERNEL_OF(e4m3_e5m2_fast)
KERNEL_OF(e5m2_e4m3_fast)
KERNEL_OF(e5m2_e5m2_fast)
