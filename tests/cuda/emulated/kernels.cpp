/* SPDX-License-Identifier: Apache-2.0
 *
 * All kernels of the CUDA backend, compiled for the CPU, and the way to run one.
 */
#include "words.hpp"

#include <pthread.h>
#include <ucontext.h>
#include <unistd.h>

#include "kernels.cu"

#include "emulated.h"

#define STACK ((size_t)64 << 10)

thread_local emulated_index threadIdx, blockIdx, blockDim, gridDim;

/* ---- the fibers of a block ---- */

struct fiber {
    ucontext_t context;
    bool over;
};

struct block {
    unsigned index, blocks, threads;
    emulated_kernel kernel;
    const void *args;
    fiber *fibers;
    char *stacks;
    ucontext_t scheduler;
    unsigned current, arrived, generation;
    int conjunction, last;
    pthread_t thread;
};

static thread_local block *here;

void emulated_yield(void) {
    block *mine = here;
    fiber *self = &mine->fibers[mine->current];
    swapcontext(&self->context, &mine->scheduler);
}

int emulated_barrier(int value) {
    block *mine = here;
    unsigned generation = mine->generation;
    mine->conjunction = mine->arrived == 0 ? value != 0 : mine->conjunction && value != 0;
    if (++mine->arrived == mine->threads) {
        mine->last = mine->conjunction;
        mine->arrived = 0;
        mine->generation++;
        return mine->last;
    }
    while (mine->generation == generation)
        emulated_yield();
    return mine->last;
}

template <class Args> static void call(void (*kernel)(Args), const void *args) {
    kernel(*(const Args *)args);
}

static void run_kernel(emulated_kernel kernel, const void *args) {
    switch (kernel) {
    case EMULATED_PACKETS_F32:
        return call(tutti_packets_f32, args);
    case EMULATED_PACKETS_BF16:
        return call(tutti_packets_bf16, args);
    case EMULATED_PACKETS_I8:
        return call(tutti_packets_i8, args);
    case EMULATED_PACKETS_F64:
        return call(tutti_packets_f64, args);
    case EMULATED_REDUCE_F32:
        return call(tutti_reduce_f32, args);
    case EMULATED_REDUCE_F32_4:
        return call(tutti_reduce_f32_4, args);
    case EMULATED_MULTIMEM_F32:
        return call(tutti_multimem_f32_by_members, args);
    case EMULATED_MULTIMEM_GATHER:
        return call(tutti_multimem_gather_by_members, args);
    case EMULATED_MOVE:
        return call(tutti_move, args);
    case EMULATED_MESSAGE:
        return call(tutti_message, args);
    case EMULATED_SIGNAL:
        return call(tutti_signal, args);
    case EMULATED_MULTIMEM_BARRIER:
        return call(tutti_multimem_barrier_by_members, args);
    }
}

static void begin_fiber(void) {
    block *mine = here;
    run_kernel(mine->kernel, mine->args);
    mine->fibers[mine->current].over = true;
    swapcontext(&mine->fibers[mine->current].context, &mine->scheduler);
}

static void *run_block(void *argument) {
    block *mine = here = (block *)argument;
    blockIdx.x = mine->index;
    gridDim.x = mine->blocks;
    blockDim.x = mine->threads;
    for (unsigned i = 0; i < mine->threads; i++) {
        ucontext_t *context = &mine->fibers[i].context;
        getcontext(context);
        context->uc_stack.ss_sp = mine->stacks + i * STACK;
        context->uc_stack.ss_size = STACK;
        context->uc_link = NULL;
        makecontext(context, begin_fiber, 0);
    }
    unsigned left = mine->threads, before = 0;
    while (left > 0) {
        if (before == left + mine->generation)
            usleep(50); /* it waits for another block, which shall have the processor */
        before = left + mine->generation;
        for (unsigned i = 0; i < mine->threads; i++) {
            if (mine->fibers[i].over)
                continue;
            mine->current = i;
            threadIdx.x = i;
            swapcontext(&mine->scheduler, &mine->fibers[i].context);
            left -= mine->fibers[i].over;
        }
    }
    return NULL;
}

extern "C" void emulated_launch(emulated_kernel kernel, unsigned blocks, unsigned threads, const void *args) {
    block *all = (block *)calloc(blocks, sizeof *all);
    for (unsigned i = 0; i < blocks; i++) {
        all[i].index = i;
        all[i].blocks = blocks;
        all[i].threads = threads;
        all[i].kernel = kernel;
        all[i].args = args;
        all[i].fibers = (fiber *)calloc(threads, sizeof(fiber));
        all[i].stacks = (char *)malloc(threads * STACK);
        if (pthread_create(&all[i].thread, NULL, run_block, &all[i]) != 0)
            abort();
    }
    for (unsigned i = 0; i < blocks; i++) {
        pthread_join(all[i].thread, NULL);
        free(all[i].fibers);
        free(all[i].stacks);
    }
    free(all);
}
