/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the plug-in that has the tensors on GPUs of NVIDIA: its devices, and what its files share.
 */
#ifndef TU_TENSOR_CUDA_TENSORS_H
#define TU_TENSOR_CUDA_TENSORS_H

#include <pthread.h>

#include "cuda.h"
#include "memory/backend.h"
#include "tensor/device.h"
#include "tensor/together.h"

#define TU_TENSOR_GPUS 64
#define TU_TENSOR_IMAGES 11
#define TU_SIZE_CLASSES 160
#define TU_RECENT_CLASSES 32
#define TU_TOGETHER_KERNELS 12
#define TU_PLAIN_KERNELS 4

typedef struct tu_gpu_segment tu_gpu_segment;
typedef struct tu_gpu_piece tu_gpu_piece;
typedef struct tu_gpu_graph tu_gpu_graph;
typedef struct tu_gpu_compiler tu_gpu_compiler;

/* A stream on which a piece was used besides its own. */
typedef struct tu_gpu_use {
    CUstream stream;
    CUevent event; /* recorded when the piece is released */
    struct tu_gpu_use *next;
} tu_gpu_use;

/* A part of a segment: given out, spare, or waiting for other streams. */
struct tu_gpu_piece {
    CUdeviceptr address;
    size_t bytes;
    tu_gpu_segment *segment;
    tu_gpu_piece *before, *after; /* its neighbours in the segment */
    tu_gpu_piece *next, **link;   /* in the list of spare ones of its size, or of those that wait */
    CUstream stream;              /* whose work comes in order with it */
    tu_gpu_use *uses;
    bool spare;
};

/* What was taken of the driver at once. */
struct tu_gpu_segment {
    CUdeviceptr address;
    size_t bytes;
    tu_gpu_segment *next, **link;
    tu_gpu_piece *first;
    tu_gpu_graph *graph; /* whose memory it is; NULL: everybody's */
};

/* Bytes of the host that a graph copies, in pinned memory behind this head. */
typedef struct tu_gpu_kept {
    _Alignas(16) struct tu_gpu_kept *next;
} tu_gpu_kept;

struct tu_gpu_graph {
    CUgraphExec runnable;
    CUevent began; /* behind what its stream held before; none in captures that others began */
    CUevent ran;   /* behind its last run */
    tu_gpu_kept *kept;
    unsigned long long number; /* the driver's, of the capture */
    tu_gpu_graph *next;        /* of those that others began: they live as long as the device is open, since nothing
                                * tells when their graphs end */
};
#define TU_GPU_CAPTURES 16 /* at one time */

/* A graph of one kernel, which is another one at each run. */
typedef struct tu_gpu_quick {
    pthread_mutex_t lock;
    CUgraph graph;
    CUgraphNode node;
    CUgraphExec runnable; /* NULL: the driver cannot */
} tu_gpu_quick;

/* Kernels that were written at run time. */
typedef struct tu_gpu_module {
    struct tu_gpu_module *next;
    CUmodule module;
    char name[64];
} tu_gpu_module;

typedef struct tu_gpu {
    bool open; /* what follows is there; under the lock of tu_gpus */
    CUdevice device;
    CUcontext context;
    CUmodule modules[TU_TENSOR_IMAGES];
    /* Kernels of products that ranks make together, in the order of together.c. NULL: there are none. */
    CUmodule together, together_plain;
    CUfunction together_kernels[TU_TOGETHER_KERNELS], plain_kernels[TU_PLAIN_KERNELS];
    int together_pairs; /* of their thread blocks, as clusters, that the device holds at once */
    int processors, major, minor;
    tu_device_fault *fault; /* pinned; written by kernels, the first wins */
    CUdeviceptr fault_here;

    pthread_mutex_t lock; /* of everything below */
    bool loads;           /* kernels at once, and not when they are launched */
    tu_gpu_piece *spare[TU_SIZE_CLASSES];
    tu_gpu_piece *recent[TU_RECENT_CLASSES]; /* of each small class one that was just released, as a whole */
    tu_gpu_piece *waiting;
    tu_gpu_segment *segments;
    int going; /* threads that give segments back, which still count as reserved */
    tu_device_usage usage;
    /* Captures that are under way. Written under the lock, the stream last; a thread looks for its own without it. */
    int capture_count;
    struct {
        CUstream stream; /* NULL: free */
        tu_gpu_graph *graph;
    } captures[TU_GPU_CAPTURES];
    tu_gpu_graph *others; /* of captures that others began */
    tu_gpu_module *written;
    void *products; /* the matrix library's handle: product.c */
    tu_gpu_quick quick;
} tu_gpu;

typedef struct tu_gpus {
    const tu_backend_host *host;
    tu_cuda_driver driver;
    pthread_mutex_t lock; /* opening of devices */
    int count;
    void *library; /* of matrix products; NULL: not looked for, or not there */
    bool looked;
    tu_gpu_compiler *compiler; /* of nvrtc.c; NULL: not looked for */
    tu_gpu gpus[TU_TENSOR_GPUS];
} tu_gpus;

/* The image of the kernels: image.S. */
extern const unsigned char *const tu_gpu_images[TU_TENSOR_IMAGES];
extern const unsigned char *const tu_gpu_together_image; /* for one generation of devices alone */
extern const unsigned char *const tu_gpu_together_plain_image;

/* ---- plugin.c ---- */
tutti_status tu_gpu_error(const tu_gpus *gpus, CUresult result, const char *what);
/* The device, opened, with its context current in this thread; tu_gpu_leave ends that. */
tutti_status tu_gpu_enter(tu_gpus *gpus, int index, tu_gpu **gpu, bool *pushed);
void tu_gpu_leave(const tu_gpus *gpus, bool pushed);
/* The same for what gives memory, events or streams back, or asks after them: another library of this process may
 * capture meanwhile, and the driver would refuse it and break that capture. */
typedef struct tu_gpu_aside {
    bool entered, pushed;
    int mode;
} tu_gpu_aside;
tutti_status tu_gpu_enter_aside(tu_gpus *gpus, int index, tu_gpu **gpu, tu_gpu_aside *aside);
void tu_gpu_leave_aside(const tu_gpus *gpus, const tu_gpu_aside *aside);

/* Whether it is open, so that its members may be read without entering it. */
static inline bool tu_gpu_is_open(const tu_gpus *gpus, int index) {
    return index >= 0 && index < gpus->count &&
           __atomic_load_n(&gpus->gpus[index].open, __ATOMIC_ACQUIRE); /* pairs with open_gpu */
}

/* ---- allocator.c ---- */
tutti_status tu_gpu_allocate(void *state, int index, void *stream, size_t bytes, tu_device_block *block);
void tu_gpu_release(void *state, int index, tu_device_block *block);
void tu_gpu_release_behind(void *state, int index, tu_device_block *block);
void tu_gpu_used(void *state, int index, const tu_device_block *block, void *stream);
void tu_gpu_trim(void *state, int index);
tutti_status tu_gpu_usage(void *state, int index, tu_device_usage *usage);
tutti_status tu_gpu_set_limit(void *state, int index, size_t bytes);
void tu_gpu_stream_gone(tu_gpus *gpus, tu_gpu *gpu, CUstream stream); /* its work is over */
void tu_gpu_memory_end(tu_gpus *gpus, tu_gpu *gpu);                   /* with the context entered */
void tu_gpu_memory_freed(tu_gpu *gpu, const tu_gpu_graph *graph);     /* its segments are everybody's now */

/* ---- quick.c ---- */
/* While a device is opened, before any kernel runs there: `kernel` is any that exists. */
void tu_gpu_quick_begin(const tu_gpus *gpus, tu_gpu *gpu, CUfunction kernel);
/* Launches a kernel and sets the result; false where it has to be launched as others are. */
bool tu_gpu_launch_quickly(const tu_gpus *gpus, tu_gpu *gpu, CUstream stream, const CUDA_KERNEL_NODE_PARAMS *kernel,
                           CUresult *result);
void tu_gpu_quick_end(const tu_gpus *gpus, tu_gpu *gpu);

/* ---- graph.c ---- */
bool tu_gpu_capturing(void *state, int index, void *stream);
tutti_status tu_gpu_capture_begin(void *state, int index, void *stream);
tutti_status tu_gpu_capture_end(void *state, int index, void *stream, void **graph);
tutti_status tu_gpu_graph_run(void *state, int index, void *stream, void *graph);
void tu_gpu_graph_end(void *state, int index, void *graph);
/* The graph of a replay that notes what comes to the stream; NULL: there is none. */
tu_gpu_graph *tu_gpu_capture_of(const tu_gpu *gpu, CUstream stream);
/* The same, also where others began the capture: what it uses is kept from everybody else, too. */
tutti_status tu_gpu_graph_of(tu_gpus *gpus, tu_gpu *gpu, CUstream stream, tu_gpu_graph **graph);
/* Whether anything notes what comes to the stream. */
bool tu_gpu_is_noted(const tu_gpus *gpus, const tu_gpu *gpu, CUstream stream);
void tu_gpu_others_end(tu_gpus *gpus, tu_gpu *gpu); /* with the context entered */
/* What may be copied when the graph runs: `from` itself, or of the host's memory a copy; NULL: there is no memory. */
const void *tu_gpu_keep_bytes(tu_gpus *gpus, tu_gpu_graph *graph, const void *from, size_t bytes);
/* Sets what this thread may do while a stream is captured, and returns what was set before. */
int tu_gpu_relax(const tu_gpus *gpus, int mode);
#define TU_GPU_RELAXED 2 /* memory may be allocated */

/* ---- nvrtc.c ---- */
tutti_status tu_gpu_compiler_name(void *state, int index, char *name, size_t size);
tutti_status tu_gpu_compile(void *state, int index, const char *text, void **image, size_t *bytes);
void tu_gpu_compiler_end(tu_gpus *gpus);

/* ---- product.c ---- */
tutti_status tu_gpu_product(void *state, int index, void *stream, const tu_device_product *product);
bool tu_gpu_has_library(void *state, int index);
void tu_gpu_products_end(tu_gpus *gpus, tu_gpu *gpu);

/* ---- together.c ---- */
int tu_gpu_can_together(void *state, int index, const tu_device_together *product);
tutti_status tu_gpu_together(void *state, int index, void *stream, const tu_device_together *product,
                             const tu_backend_kernel *kernel, unsigned *blocks);
CUresult tu_gpu_together_load(tu_gpus *gpus, tu_gpu *gpu); /* with the context entered */

#endif
