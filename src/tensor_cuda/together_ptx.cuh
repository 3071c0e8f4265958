/* SPDX-License-Identifier: Apache-2.0
 *
 * What products that ranks make together use of Hopper, and CUDA C has no words for: barriers in shared memory, bulk
 * copies, and the tensor cores' products of a team of four warps.
 */
#ifndef TU_TENSOR_CUDA_TOGETHER_PTX_CUH
#define TU_TENSOR_CUDA_TOGETHER_PTX_CUH

#include "together_words.cuh"

/* ---- barriers in shared memory ---- */

HERE uint32_t shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}
HERE void barrier_open(uint64_t *barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}
/* Of all that were opened: whoever counts on them comes later. */
HERE void barriers_opened(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
HERE void barrier_expect(uint64_t *barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
HERE void barrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
/* Whether its phase of that parity is over: waits a moment. */
HERE bool barrier_has(uint64_t *barrier, int parity) {
    uint32_t there;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}\n"
                 : "=r"(there)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return there != 0;
}
/* The same, and does not wait. */
HERE bool barrier_has_now(uint64_t *barrier, int parity) {
    uint32_t there;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}\n"
                 : "=r"(there)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return there != 0;
}
HERE void barrier_await(uint64_t *barrier, int parity) {
    while (!barrier_has(barrier, parity))
        ;
}

/* ---- thread blocks that are launched as a cluster ---- */

/* Both are asked for where they are needed: registers are rarer than a moment. */
HERE int cluster_size(void) {
    uint32_t size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return (int)size;
}
HERE int cluster_rank(void) {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return (int)rank;
}
/* All threads of the cluster's thread blocks are here. */
HERE void cluster_meet(void) {
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}
/* The same, and what they stored before is seen by all behind it. */
HERE void cluster_sync(void) {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
/* Where something of this thread block's shared memory lies in that of another one of the cluster. */
HERE uint32_t address_in(const void *pointer, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
    return address;
}
/* At that one's. Nothing that this thread stored goes with it: a release to the cluster would wait for all of its
 * stores to reach the device's memory, which takes longer than a stage. */
HERE void barrier_arrive_in(uint64_t *barrier, int rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(barrier, rank)) : "memory");
}
HERE void store_in(uint32_t *word, int rank, uint32_t value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address_in(word, rank)), "r"(value) : "memory");
}

/* ---- what is nearer than memory ---- */

/* Into the first-level cache. */
HERE void bring_near(const float *address) {
    float value;
    asm volatile("ld.global.ca.f32 %0, [%1];" : "=f"(value) : "l"(address));
}
/* Of a warp, into shared memory: four matrices of 8 by 8, of 16 bits, whose rows are spread over the lanes. Lane 8i + k
 * says where row k of matrix i goes. */
HERE void store_matrices(uint32_t address, uint32_t first, uint32_t second, uint32_t third, uint32_t fourth) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(first),
                 "r"(second), "r"(third), "r"(fourth)
                 : "memory");
}

/* ---- bulk copies ---- */

HERE void load_box(void *to, const tu_tensor_map *map, uint64_t *barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
        : "memory");
}
/* The same into both thread blocks of a pair, which each count the bytes at a barrier of theirs. */
HERE void load_box_both(void *to, const tu_tensor_map *map, uint64_t *barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"((uint16_t)3)
                 : "memory");
}
HERE void store_box(const tu_tensor_map *map, const void *from, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(x), "r"(y)
                 : "memory");
}
HERE void load_bytes(void *to, uint64_t from, uint32_t bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
HERE void store_bytes(uint64_t to, const void *from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                 "r"(bytes)
                 : "memory");
}
HERE void stores_commit(void) {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* All but the last Open groups of stores have read what they store. */
template <int Open> HERE void stores_await_read(void) {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Open) : "memory");
}
HERE void stores_await(void) {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
HERE void prefetch_map(const tu_tensor_map *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/* Between bulk copies and ordinary accesses to the same memory. */
HERE void order_copies_global(void) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
HERE void order_copies_shared(void) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- registers ---- */

/* Of a team: each thread has so many from here on. */
template <int Count> HERE void give_registers(void) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count> HERE void take_registers(void) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

/* ---- tensor cores ---- */

HERE uint64_t descriptor(const void *pointer, uint32_t leading, uint32_t stride) {
    uint64_t address = shared_address(pointer);
    return (address & 0x3ffff) >> 4 | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
           (uint64_t)1 << 62; /* rows of 128 bytes, swizzled */
}

#define SUMS_64                                                                        \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_128                                                                                           \
    SUMS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "           \
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
            "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define EIGHT(i)                                                                                                  \
    "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), \
        "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define ALL_64 EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56)
#define ALL_128 ALL_64, EIGHT(64), EIGHT(72), EIGHT(80), EIGHT(88), EIGHT(96), EIGHT(104), EIGHT(112), EIGHT(120)
#define MULTIPLY_128(shape, tail, ...)                                                                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                              \
                 "wgmma.mma_async.sync.aligned." shape " {" SUMS_128 "}, %128, %129, p, 1, 1" tail ";\n}\n" \
                 : ALL_128                                                                                  \
                 : "l"(left), "l"(right), "r"(add), ##__VA_ARGS__)
#define MULTIPLY_64(shape)                                                                       \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                    \
                 "wgmma.mma_async.sync.aligned." shape " {" SUMS_64 "}, %64, %65, p, 1, 1;\n}\n" \
                 : ALL_64                                                                        \
                 : "l"(left), "l"(right), "r"(add))

/* sums (64, 256) += left (64, 32 bytes) right; without `add` they are not read. Of f8 the right matrix lies by columns.
 */
template <int Left, int Right, int ByRows>
HERE void multiply(float (&sums)[128], uint64_t left, uint64_t right, int add) {
    if (Left == BF16)
        MULTIPLY_128("m64n256k16.f32.bf16.bf16", ", 0, %131", "n"(ByRows));
    else if (Left == F16)
        MULTIPLY_128("m64n256k16.f32.f16.f16", ", 0, %131", "n"(ByRows));
    else if (Left == E4M3 && Right == E4M3)
        MULTIPLY_128("m64n256k32.f32.e4m3.e4m3", "");
    else if (Left == E4M3)
        MULTIPLY_128("m64n256k32.f32.e4m3.e5m2", "");
    else if (Right == E4M3)
        MULTIPLY_128("m64n256k32.f32.e5m2.e4m3", "");
    else
        MULTIPLY_128("m64n256k32.f32.e5m2.e5m2", "");
}

/* The same of half as many columns, of f8. */
template <int Left, int Right> HERE void multiply_f8(float (&sums)[64], uint64_t left, uint64_t right, int add) {
    if (Left == E4M3 && Right == E4M3)
        MULTIPLY_64("m64n128k32.f32.e4m3.e4m3");
    else if (Left == E4M3)
        MULTIPLY_64("m64n128k32.f32.e4m3.e5m2");
    else if (Right == E4M3)
        MULTIPLY_64("m64n128k32.f32.e5m2.e4m3");
    else
        MULTIPLY_64("m64n128k32.f32.e5m2.e5m2");
}

HERE void products_begin(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
HERE void products_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* All but the last Open groups of products are made: their sums may be read from here on, and not before. */
template <int Open, int Count> HERE void products_await(float (&sums)[Count]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Open) : "memory");
#pragma unroll
    for (int i = 0; i < (Open > 0 ? 0 : Count); i++)
        asm volatile("" : "+f"(sums[i])::"memory");
}

#endif
