/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs a kernel of words.hpp: a thread of the system for each block, and a fiber of it for each thread of the block.
 * Included once in a program, after the kernels.
 */
#ifndef TUTTI_TESTS_CUDA_EMULATED_FIBERS_HPP
#define TUTTI_TESTS_CUDA_EMULATED_FIBERS_HPP

#include <pthread.h>
#include <sched.h>
#include <ucontext.h>
#include <unistd.h>

#define STACK ((size_t)64 << 10)

typedef void emulated_body(const void *args);

thread_local emulated_index threadIdx, blockIdx, blockDim, gridDim;

/* ---- the fibers of a block ---- */

/* Where a fiber, or its scheduler, goes on. The library's functions ask the system at every switch; where nobody
 * watches stacks, a few instructions do it. */
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
struct place_of_fiber {
    void *stack;
};
extern "C" void emulated_exchange(void **from, void *to);
__asm__(".text\n.type emulated_exchange, @function\nemulated_exchange:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
        ".size emulated_exchange, . - emulated_exchange\n");
static void exchange(place_of_fiber *from, place_of_fiber *to) {
    emulated_exchange(&from->stack, to->stack);
}
static void prepare(place_of_fiber *place, char *stack, void (*begin)(void)) {
    void **top = (void **)(void *)(stack + STACK - 16); /* as a call leaves it: 8 bytes off a multiple of 16 */
    *--top = NULL;                                      /* begin does not return */
    *--top = (void *)(uintptr_t)begin;
    for (int i = 0; i < 6; i++)
        *--top = NULL;
    place->stack = top;
}
#else
typedef ucontext_t place_of_fiber;
static void exchange(place_of_fiber *from, place_of_fiber *to) {
    swapcontext(from, to);
}
static void prepare(place_of_fiber *place, char *stack, void (*begin)(void)) {
    getcontext(place);
    place->uc_stack.ss_sp = stack;
    place->uc_stack.ss_size = STACK;
    place->uc_link = NULL;
    makecontext(place, begin, 0);
}
#endif

struct fiber {
    place_of_fiber context;
    bool over;
};

struct block {
    unsigned index, blocks, threads;
    emulated_body *body;
    const void *args;
    fiber *fibers;
    char *stacks;
    place_of_fiber scheduler;
    unsigned current, arrived, generation, steps;
    int conjunction, last;
    pthread_t thread;
};

static thread_local block *here;

void emulated_yield(void) {
    block *mine = here;
    fiber *self = &mine->fibers[mine->current];
    exchange(&self->context, &mine->scheduler);
}

void emulated_went_on(void) {
    here->steps++;
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

static void begin_fiber(void) {
    block *mine = here;
    mine->body(mine->args);
    mine->fibers[mine->current].over = true;
    exchange(&mine->fibers[mine->current].context, &mine->scheduler);
}

static void *run_block(void *argument) {
    block *mine = here = (block *)argument;
    blockIdx.x = mine->index;
    gridDim.x = mine->blocks;
    blockDim.x = mine->threads;
    for (unsigned i = 0; i < mine->threads; i++)
        prepare(&mine->fibers[i].context, mine->stacks + i * STACK, begin_fiber);
    unsigned left = mine->threads, before = 0, idle = 0;
    while (left > 0) {
        idle = before == left + mine->generation + mine->steps ? idle + 1 : 0;
        if (idle > 0) /* it waits for another block, which shall have the processor */
            idle < 200 ? (void)sched_yield() : (void)usleep(50);
        before = left + mine->generation + mine->steps;
        for (unsigned i = 0; i < mine->threads; i++) {
            if (mine->fibers[i].over)
                continue;
            mine->current = i;
            threadIdx.x = i;
            exchange(&mine->scheduler, &mine->fibers[i].context);
            left -= mine->fibers[i].over;
        }
    }
    return NULL;
}

/* Stacks are used again: making them takes longer than most kernels. */
#define SPARE_STACKS 16
static pthread_mutex_t spare_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char *stacks;
    unsigned threads;
} spare[SPARE_STACKS];

static char *take_stacks(unsigned threads) {
    char *found = NULL;
    pthread_mutex_lock(&spare_lock);
    for (int i = 0; i < SPARE_STACKS && found == NULL; i++)
        if (spare[i].stacks != NULL && spare[i].threads >= threads) {
            found = spare[i].stacks;
            spare[i].stacks = NULL;
        }
    pthread_mutex_unlock(&spare_lock);
    return found != NULL ? found : (char *)malloc((threads < 512 ? 512 : threads) * STACK);
}

static void give_stacks(char *stacks, unsigned threads) {
    pthread_mutex_lock(&spare_lock);
    for (int i = 0; i < SPARE_STACKS && stacks != NULL; i++)
        if (spare[i].stacks == NULL) {
            spare[i].stacks = stacks;
            spare[i].threads = threads < 512 ? 512 : threads;
            stacks = NULL;
        }
    pthread_mutex_unlock(&spare_lock);
    free(stacks);
}

/* Returns when all blocks have ended. */
static void emulated_run(emulated_body *body, unsigned blocks, unsigned threads, const void *args) {
    block *all = (block *)calloc(blocks, sizeof *all);
    for (unsigned i = 0; i < blocks; i++) {
        all[i].index = i;
        all[i].blocks = blocks;
        all[i].threads = threads;
        all[i].body = body;
        all[i].args = args;
        all[i].fibers = (fiber *)calloc(threads, sizeof(fiber));
        all[i].stacks = take_stacks(threads);
        if (pthread_create(&all[i].thread, NULL, run_block, &all[i]) != 0)
            abort();
    }
    for (unsigned i = 0; i < blocks; i++) {
        pthread_join(all[i].thread, NULL);
        free(all[i].fibers);
        give_stacks(all[i].stacks, threads);
    }
    free(all);
}

/* A kernel as a body: its argument, a struct, by address. */
template <auto kernel> struct emulated_entry;
template <class Args, void (*kernel)(Args)> struct emulated_entry<kernel> {
    static void run(const void *args) {
        kernel(*(const Args *)args);
    }
    static constexpr size_t bytes = sizeof(Args);
};

#endif
