/* SPDX-License-Identifier: Apache-2.0
 *
 * The products that ranks make together in one kernel on any GPU (src/tensor_cuda/together_plain.cu), for the stand-in
 * driver. Copies into shared memory come when they are waited for, and not before; products of the tensor cores are
 * over at once, and add up in f32. Where a lane has which element is told to nobody, and is another place than on a
 * GPU.
 */
#include "together.hpp"

#define __align__(bytes) __attribute__((aligned(bytes)))

/* ---- copies that go on by themselves: of each thread, in groups ---- */

struct copy_under_way {
    void *to;
    const void *from;
    int group; /* that it belongs to */
};
#define MOST_COPIES 64
struct copies_of_thread {
    int count, group; /* the group that is open */
    copy_under_way all[MOST_COPIES];
};
static thread_local copies_of_thread copies_under_way[TU_PLAIN_THREADS]; /* of this thread block */

HERE void __pipeline_memcpy_async(void *to, const void *from, size_t bytes) {
    copies_of_thread &mine = copies_under_way[threadIdx.x];
    if (bytes != 16 || ((uintptr_t)to | (uintptr_t)from) % 16 != 0 || mine.count == MOST_COPIES)
        abort();
    mine.all[mine.count++] = { to, from, mine.group };
}
HERE void __pipeline_commit(void) {
    copies_under_way[threadIdx.x].group++;
}
/* All but the last `open` groups have come. */
HERE void __pipeline_wait_prior(int open) {
    copies_of_thread &mine = copies_under_way[threadIdx.x];
    int left = 0;
    for (int i = 0; i < mine.count; i++) {
        if (mine.all[i].group < mine.group - open)
            store_vector(mine.all[i].to, load_vector(mine.all[i].from));
        else
            mine.all[left++] = mine.all[i];
    }
    mine.count = left;
}

/* ---- shared memory ---- */

/* Not a constant at first: the kernel declares it as what another file may initialise. */
static volatile uint8_t nothing;
thread_local uint8_t room_for_stages[TU_PLAIN_SHARED] __align__(128) = { nothing };

/* ---- tensor cores ---- */

#define TU_TENSOR_CUDA_TOGETHER_WMMA_CUH

/* Lane l has row l / 2 of the left matrix; eight columns of the right one, and of that row of the products: the first
 * ones if l is even. */
template <int Kind> struct sixteen { float of[128]; };
struct sums {
    float of[8];
};
HERE void check_place(const void *place, int distance, int multiple) {
    if ((uintptr_t)place % 32 != 0 || distance % multiple != 0)
        abort();
}
template <int Kind> HERE void load_left(sixteen<Kind> &to, const uint16_t *from, int distance) {
    check_place(from, distance, 8);
    for (int k = 0; k < 16; k++)
        to.of[k] = value_of<Kind>(from[(int)threadIdx.x % 32 / 2 * distance + k]);
}
template <int Kind, int ByRows> HERE void load_right(sixteen<Kind> &to, const uint16_t *from, int distance) {
    int first = threadIdx.x % 2 * 8;
    check_place(from, distance, 8);
    for (int k = 0; k < 16; k++)
        for (int column = 0; column < 8; column++)
            to.of[k * 8 + column] =
                value_of<Kind>(from[ByRows ? k * distance + first + column : (first + column) * distance + k]);
}
template <int Kind, int ByRows>
HERE void multiply_sixteen(sums &to, const sixteen<Kind> &left, const sixteen<Kind> &right) {
    for (int k = 0; k < 16; k++)
        for (int column = 0; column < 8; column++)
            to.of[column] += left.of[k] * right.of[k * 8 + column];
    emulated_went_on();
}
HERE void store_sums(float *to, const sums &from, int distance) {
    check_place(to, distance, 4);
    for (int column = 0; column < 8; column++)
        to[(int)threadIdx.x % 32 / 2 * distance + (int)threadIdx.x % 2 * 8 + column] = from.of[column];
}

#include "together_plain.cu"

KERNEL_OF(plain_bf16_columns)
KERNEL_OF(plain_bf16_rows)
KERNEL_OF(plain_f16_columns)
KERNEL_OF(plain_f16_rows)
