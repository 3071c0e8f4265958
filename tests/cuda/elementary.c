/* SPDX-License-Identifier: Apache-2.0
 *
 * Elementary functions give the same bits on a GPU as on the CPU: over numbers of every size and sign, denormals,
 * infinities and NaN among them, and over those that networks compute with.
 */
#include <math.h>

#include "gpu.h"
#include "tensor/kernel/elementary.h"

#define COUNT ((size_t)1 << 20)

typedef enum width {
    F32,
    F64
} width;

typedef struct function {
    const char *name;
    float (*f32)(float, float);
    double (*f64)(double, double);
} function;

#define ONE(name)                                         \
    static float name##_on_cpu_f32(float x, float y) {    \
        (void)y;                                          \
        return tu_##name##_f32(x);                        \
    }                                                     \
    static double name##_on_cpu_f64(double x, double y) { \
        (void)y;                                          \
        return tu_##name##_f64(x);                        \
    }
#define TWO(name)                                         \
    static float name##_on_cpu_f32(float x, float y) {    \
        return tu_##name##_f32(x, y);                     \
    }                                                     \
    static double name##_on_cpu_f64(double x, double y) { \
        return tu_##name##_f64(x, y);                     \
    }
#include "elementary.def"
#undef ONE
#undef TWO

static const function functions[] = {
#define ONE(name) { #name, name##_on_cpu_f32, name##_on_cpu_f64 },
#define TWO(name) ONE(name)
#include "elementary.def"
#undef ONE
#undef TWO
};

static uint64_t random_bits(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state * UINT64_C(2685821657736338717);
}

/* Any bits, and in turn numbers from -20 to 20. */
static void fill(float *x32, double *x64, uint64_t state) {
    for (size_t i = 0; i < COUNT; i++) {
        uint64_t bits = random_bits(&state);
        uint32_t low = (uint32_t)(bits >> 32);
        memcpy(&x32[i], &low, sizeof low);
        memcpy(&x64[i], &bits, sizeof bits);
        if (i % 2 == 1) {
            x64[i] = (double)(bits >> 11) * 0x1p-53 * 40 - 20;
            x32[i] = (float)x64[i];
        }
    }
    const double corners[] = { 0.0, -0.0, INFINITY, -INFINITY, NAN, 1, -1, 0x1p-1074, 0x1p-149, 0x1.fffffep127, 0.5 };
    for (size_t i = 0; i < sizeof corners / sizeof corners[0]; i++) {
        x64[i] = corners[i];
        x32[i] = (float)corners[i];
    }
}

typedef struct board {
    float *x32[2], *got32; /* on the host */
    double *x64[2], *got64;
    void *here[2], *result; /* on the device; of f64's size */
    CUmodule module;
} board;

static void *read_image(void) {
    FILE *file = fopen(TEST_ELEMENTARY_IMAGE, "rb");
    if (file == NULL)
        SKIP("the kernels of this test were not built");
    fseek(file, 0, SEEK_END);
    size_t bytes = (size_t)ftell(file);
    rewind(file);
    void *image = malloc(bytes);
    CHECK_EQ(fread(image, 1, bytes, file), bytes);
    fclose(file);
    return image;
}

static void run_on_gpu(const board *board, const char *name, width width) {
    char kernel[64];
    CUfunction function;
    CUdeviceptr x = (CUdeviceptr)(uintptr_t)board->here[0], y = (CUdeviceptr)(uintptr_t)board->here[1],
                result = (CUdeviceptr)(uintptr_t)board->result;
    uint64_t count = COUNT;
    void *arguments[] = { &x, &y, &result, &count };
    snprintf(kernel, sizeof kernel, "%s_%s", name, width == F32 ? "f32" : "f64");
    CHECK_CUDA(gpu.cuModuleGetFunction(&function, board->module, kernel));
    CHECK_CUDA(gpu.cuLaunchKernel(function, COUNT / 256, 1, 1, 256, 1, 1, 0, stream, arguments, NULL));
    if (width == F32)
        gpu_read(board->got32, board->result, COUNT * 4);
    else
        gpu_read(board->got64, board->result, COUNT * 8);
}

static void check_f32(const board *board, const function *function) {
    for (int i = 0; i < 2; i++)
        gpu_write(board->here[i], board->x32[i], COUNT * 4);
    run_on_gpu(board, function->name, F32);
    for (size_t i = 0; i < COUNT; i++) {
        float expected = function->f32(board->x32[0][i], board->x32[1][i]), got = board->got32[i];
        if (memcmp(&expected, &got, 4) != 0 && !(isnan(expected) && isnan(got)))
            FAIL("%s_f32(%a, %a) is %a on the CPU and %a on the GPU", function->name, board->x32[0][i],
                 board->x32[1][i], expected, got);
    }
}

static void check_f64(const board *board, const function *function) {
    for (int i = 0; i < 2; i++)
        gpu_write(board->here[i], board->x64[i], COUNT * 8);
    run_on_gpu(board, function->name, F64);
    for (size_t i = 0; i < COUNT; i++) {
        double expected = function->f64(board->x64[0][i], board->x64[1][i]), got = board->got64[i];
        if (memcmp(&expected, &got, 8) != 0 && !(isnan(expected) && isnan(got)))
            FAIL("%s_f64(%a, %a) is %a on the CPU and %a on the GPU", function->name, board->x64[0][i],
                 board->x64[1][i], expected, got);
    }
}

static board begin(void) {
    board board;
    void *image = read_image();
    gpu_begin();
    CHECK_CUDA(gpu.cuModuleLoadData(&board.module, image));
    for (int i = 0; i < 2; i++) {
        board.x32[i] = malloc(COUNT * 4);
        board.x64[i] = malloc(COUNT * 8);
        board.here[i] = gpu_private(COUNT * 8);
        fill(board.x32[i], board.x64[i], UINT64_C(88172645463325252) + (uint64_t)i * 977);
    }
    board.result = gpu_private(COUNT * 8);
    board.got32 = malloc(COUNT * 4);
    board.got64 = malloc(COUNT * 8);
    free(image);
    return board;
}

TEST_LIMIT(elementary_functions_have_the_same_bits_on_the_gpu, 120) {
    gpu_needed();
    board board = begin();
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        check_f32(&board, &functions[i]);
        check_f64(&board, &functions[i]);
    }
    _exit(0); /* the driver keeps descriptors and threads of its own */
}

/* elementary.h divides in fewer steps where every number was tried: here. */
TEST_LIMIT(shorter_ratios_give_the_same_for_every_number, 120) {
    gpu_needed();
    board board = begin();
    for (int which = 0; which < 2; which++) {
        const char *name = which == 0 ? "tried_tanh" : "tried_sigmoid";
        double differing = 0;
        run_on_gpu(&board, name, F32);
        for (size_t i = 0; i < COUNT; i++)
            differing += board.got32[i];
        if (differing != 0)
            FAIL("%s: %.0f numbers differ", name, differing);
    }
    _exit(0);
}
