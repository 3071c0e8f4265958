/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels that are written at run time, by NVRTC, which is looked for on first need. Only what is used of it is
 * declared, in our own words; what it has been since CUDA 11.
 */
#include <dlfcn.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensors.h"

typedef struct nvrtc_program nvrtc_program;

/* X(name, parameters) */
#define NVRTC_FUNCTIONS(X)                                                                            \
    X(nvrtcVersion, (int *major, int *minor))                                                         \
    X(nvrtcCreateProgram, (nvrtc_program * *program, const char *text, const char *name, int headers, \
                           const char *const *texts, const char *const *names))                       \
    X(nvrtcDestroyProgram, (nvrtc_program * *program))                                                \
    X(nvrtcCompileProgram, (nvrtc_program * program, int count, const char *const *options))          \
    X(nvrtcGetCUBINSize, (nvrtc_program * program, size_t * bytes))                                   \
    X(nvrtcGetCUBIN, (nvrtc_program * program, char *image))                                          \
    X(nvrtcGetProgramLogSize, (nvrtc_program * program, size_t * bytes))                              \
    X(nvrtcGetProgramLog, (nvrtc_program * program, char *text))

struct tu_gpu_compiler {
    int major, minor;
#define X(name, parameters) int(*name) parameters;
    NVRTC_FUNCTIONS(X)
#undef X
    char reason[512]; /* why there is none; "" */
};

/* -fmad=false: no fused multiply-add but where one is written, so that results are the same bits as on the CPU. */
static const char *const common[] = { "--std=c++17", "--fmad=false", "--device-int128", "--disable-warnings" };
enum {
    COMMON = sizeof common / sizeof common[0]
};

/* ---- the library ---- */

/* In the places where pip and NVIDIA's own packages put it. */
static void *open_elsewhere(void) {
    static const char *const folders[] = {
        "$VIRTUAL_ENV/lib/python3*/site-packages/nvidia", "/usr/local/lib/python3*/dist-packages/nvidia",
        "/usr/local/lib/python3*/site-packages/nvidia",   "/usr/lib/python3*/site-packages/nvidia",
        "/usr/lib/python3/dist-packages/nvidia",          "/opt/*/lib/python3*/site-packages/nvidia",
        "$HOME/.local/lib/python3*/site-packages/nvidia"
    };
    static const char *const files[] = { "cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12" };
    void *opened = NULL;
    for (size_t i = 0; i < sizeof folders / sizeof folders[0] && opened == NULL; i++)
        for (size_t k = 0; k < sizeof files / sizeof files[0] && opened == NULL; k++) {
            char variable[32] = "", pattern[1024];
            const char *rest = folders[i], *base = "";
            glob_t found = { 0 };
            if (rest[0] == '$') {
                snprintf(variable, sizeof variable, "%.*s", (int)strcspn(rest + 1, "/"), rest + 1);
                base = secure_getenv(variable);
                rest += 1 + strlen(variable);
            }
            if (base == NULL)
                continue;
            snprintf(pattern, sizeof pattern, "%s%s/%s", base, rest, files[k]);
            if (glob(pattern, GLOB_NOSORT, NULL, &found) == 0)
                for (size_t j = 0; j < found.gl_pathc && opened == NULL; j++)
                    opened = dlopen(found.gl_pathv[j], RTLD_NOW | RTLD_LOCAL);
            globfree(&found);
        }
    return opened;
}

static void *open_library(char *reason, size_t size) {
    static const char *const names[] = { "libnvrtc.so.13", "libnvrtc.so.12", "/usr/local/cuda/lib64/libnvrtc.so.13",
                                         "/usr/local/cuda/lib64/libnvrtc.so.12" };
    const char *given = secure_getenv("TUTTI_NVRTC");
    if (given != NULL && given[0] != 0) {
        void *opened = dlopen(given, RTLD_NOW | RTLD_LOCAL);
        const char *cause = opened == NULL ? dlerror() : NULL;
        if (opened == NULL)
            snprintf(reason, size, "TUTTI_NVRTC names what cannot be loaded: %s", cause != NULL ? cause : given);
        return opened;
    }
    void *opened = NULL;
    for (size_t i = 0; i < sizeof names / sizeof names[0] && opened == NULL; i++)
        opened = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (opened == NULL)
        opened = open_elsewhere();
    if (opened == NULL)
        snprintf(reason, size,
                 "NVRTC is not found (libnvrtc.so.13 or .12): put its folder into LD_LIBRARY_PATH, or name it by "
                 "TUTTI_NVRTC");
    return opened;
}

/* NVRTC opens a library of its own by name, which is found only where its folder is searched; the one that lies beside
 * it does where it is loaded already. */
static void load_beside(const tu_gpu_compiler *made) {
    Dl_info about;
    char path[1200];
    if (dladdr((void *)(uintptr_t)made->nvrtcVersion, &about) == 0 || strrchr(about.dli_fname, '/') == NULL)
        return;
    snprintf(path, sizeof path, "%.*s/libnvrtc-builtins.so.%d.%d",
             (int)(strrchr(about.dli_fname, '/') - about.dli_fname), about.dli_fname, made->major, made->minor);
    (void)dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

static void load_compiler(tu_gpu_compiler *made) {
    void *opened = open_library(made->reason, sizeof made->reason);
    if (opened == NULL)
        return;
#define X(name, parameters)                                          \
    made->name = (int(*) parameters)(uintptr_t)dlsym(opened, #name); \
    if (made->name == NULL)                                          \
        snprintf(made->reason, sizeof made->reason, "NVRTC is too old: it has no %s, which CUDA 11.1 has", #name);
    NVRTC_FUNCTIONS(X)
#undef X
    if (made->reason[0] == 0 && made->nvrtcVersion(&made->major, &made->minor) != 0)
        snprintf(made->reason, sizeof made->reason, "NVRTC does not tell its version");
    if (made->reason[0] == 0)
        load_beside(made);
}

/* Looked for once; the error where there is none. */
static tutti_status compiler_of(tu_gpus *gpus, tu_gpu_compiler **compiler) {
    pthread_mutex_lock(&gpus->lock);
    if (gpus->compiler == NULL && (gpus->compiler = calloc(1, sizeof *gpus->compiler)) != NULL)
        load_compiler(gpus->compiler);
    *compiler = gpus->compiler;
    pthread_mutex_unlock(&gpus->lock);
    if (*compiler == NULL)
        return gpus->host->error(TUTTI_ERROR_MEMORY, "out of memory for NVRTC");
    return (*compiler)->reason[0] == 0 ? TUTTI_OK
                                       : gpus->host->error(TUTTI_ERROR_UNSUPPORTED, "%s", (*compiler)->reason);
}

void tu_gpu_compiler_end(tu_gpus *gpus) {
    free(gpus->compiler); /* the library itself stays: it has threads and handlers of its own */
}

/* ---- compiling ---- */

static void architecture_of(const tu_gpu *gpu, char *text, size_t size) {
    snprintf(text, size, "--gpu-architecture=sm_%d%d", gpu->major, gpu->minor);
}

tutti_status tu_gpu_compiler_name(void *state, int index, char *name, size_t size) {
    tu_gpus *gpus = state;
    tu_gpu *gpu;
    bool pushed;
    tu_gpu_compiler *compiler;
    char architecture[48];
    tutti_status status = tu_gpu_enter(gpus, index, &gpu, &pushed);
    if (status != TUTTI_OK)
        return status;
    tu_gpu_leave(gpus, pushed);
    status = compiler_of(gpus, &compiler);
    if (status != TUTTI_OK)
        return status;
    architecture_of(gpu, architecture, sizeof architecture);
    int length = snprintf(name, size, "NVRTC %d.%d %s", compiler->major, compiler->minor, architecture);
    for (int i = 0; i < COMMON && length >= 0 && (size_t)length < size; i++)
        length += snprintf(name + length, size - (size_t)length, " %s", common[i]);
    return TUTTI_OK;
}

/* The first line of the compiler's messages that tells of an error. */
static tutti_status complain(const tu_gpus *gpus, const tu_gpu_compiler *compiler, nvrtc_program *program, int result) {
    size_t bytes = 0;
    char *text = compiler->nvrtcGetProgramLogSize(program, &bytes) == 0 ? calloc(1, bytes + 1) : NULL;
    const char *line = "";
    if (text != NULL && compiler->nvrtcGetProgramLog(program, text) == 0) {
        char *error = strstr(text, "error");
        while (error != NULL && error > text && error[-1] != '\n')
            error--;
        line = error != NULL ? error : text;
        *strchrnul(line, '\n') = 0;
    }
    tutti_status status = gpus->host->error(TUTTI_ERROR_UNSUPPORTED, "NVRTC %d.%d failed with result %d%s%.400s",
                                            compiler->major, compiler->minor, result, line[0] != 0 ? ": " : "", line);
    free(text);
    return status;
}

static tutti_status take_image(const tu_gpus *gpus, const tu_gpu_compiler *compiler, nvrtc_program *program,
                               void **image, size_t *bytes) {
    int result = compiler->nvrtcGetCUBINSize(program, bytes);
    if (result != 0 || *bytes == 0)
        return complain(gpus, compiler, program, result);
    char *data = malloc(*bytes);
    if (data == NULL)
        return gpus->host->error(TUTTI_ERROR_MEMORY, "out of memory for the image of kernels (%zu bytes)", *bytes);
    result = compiler->nvrtcGetCUBIN(program, data);
    if (result != 0) {
        free(data);
        return complain(gpus, compiler, program, result);
    }
    *image = data;
    return TUTTI_OK;
}

tutti_status tu_gpu_compile(void *state, int index, const char *text, void **image, size_t *bytes) {
    tu_gpus *gpus = state;
    tu_gpu_compiler *compiler;
    nvrtc_program *program = NULL;
    const char *options[COMMON + 1];
    char architecture[48];
    tutti_status status = compiler_of(gpus, &compiler);
    if (status != TUTTI_OK)
        return status;
    architecture_of(&gpus->gpus[index], architecture, sizeof architecture);
    memcpy(options, common, sizeof common);
    options[COMMON] = architecture;
    int result = compiler->nvrtcCreateProgram(&program, text, "loops.cu", 0, NULL, NULL);
    if (result != 0)
        return gpus->host->error(TUTTI_ERROR_UNSUPPORTED, "NVRTC %d.%d takes no program: result %d", compiler->major,
                                 compiler->minor, result);
    result = compiler->nvrtcCompileProgram(program, COMMON + 1, options);
    status =
        result == 0 ? take_image(gpus, compiler, program, image, bytes) : complain(gpus, compiler, program, result);
    compiler->nvrtcDestroyProgram(&program);
    return status;
}
