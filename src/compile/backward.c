/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled backwards. First, each time, what the backward depends on is collected: words that identify it (nodes,
 * attributes, hooks, sizes, which gradients are there), and the tensors that change from run to run. Then the words are
 * looked up. Where they are not known the engine runs once on stand-ins of those tensors, in its own order, and what it
 * calls is the graph, whose inputs they are. Then that graph runs, on the tensors themselves.
 */
#include <stdlib.h>
#include <string.h>

#include <tutti/backward.h>

#include "base/result.h"
#include "compile/entry.h"
#include "graph/passes.h"
#include "loops/program.h"
#include "tensor/map.h"

/* ---- words ---- */

/* What kinds of words there are, so that a miss can be told in a word. */
typedef enum part {
    NODES,
    HOOKS,
    SIZES,
    GRADIENTS,
    PARTS
} part;

typedef struct words {
    uintptr_t *at;
    size_t count, capacity;
} words;

typedef struct key {
    words parts[PARTS];
} key;

static void key_free(key *of) {
    for (int i = 0; i < PARTS; i++)
        free(of->parts[i].at);
}

static bool same_words(const words *left, const words *right) {
    return left->count == right->count &&
           (left->count == 0 || memcmp(left->at, right->at, left->count * sizeof *left->at) == 0);
}

/* The first part in which they differ; PARTS: none. */
static part difference(const key *left, const key *right) {
    for (int i = 0; i < PARTS; i++)
        if (!same_words(&left->parts[i], &right->parts[i]))
            return (part)i;
    return PARTS;
}

/* ---- the cache ---- */

/* Objects whose addresses are among the words. */
typedef struct kept {
    struct kept *next;
    void *object;
    void (*release)(void *object);
} kept;

static void kept_free(kept *list) {
    for (kept *one = list, *next; one != NULL; one = next) {
        next = one->next;
        one->release(one->object);
        free(one);
    }
}

typedef struct entry {
    struct entry *next;
    key key;
    kept *kept;
    tt_graph *graph; /* NULL: it cannot be captured */
    tu_program *program;
    int witness_count;
    tu_witness *witnesses; /* what else it depends on, kept */
    uint64_t *stamps;      /* that they gave */
} entry;

struct tt_backward_cache {
    tu_backward_runner runner; /* first */
    tu_backward_runner *outer; /* of the region that uses it */
    atomic_int used;           /* regions that do */
    bool full;
    entry *entries; /* the one that was used last is first */
    int entry_count;
    tu_agreed *agreed;
    tt_backward_counts counts;
    char reason[400];
    int twin; /* see tu_recipe */
};

static void entry_free(entry *one) {
    for (int i = 0; i < one->witness_count; i++)
        one->witnesses[i].release(one->witnesses[i].owner);
    free(one->witnesses);
    free(one->stamps);
    key_free(&one->key);
    kept_free(one->kept);
    tu_program_release(one->program);
    tt_graph_release(&one->graph);
    free(one);
}

/* ---- collecting ---- */

/* Storages of gradients are numbered from here on: they are no tensors of the list. */
#define GRADIENT_NUMBERS ((size_t)1 << 24)

/* A node or a leaf that takes part. */
typedef struct task {
    tu_node *node;   /* held */
    tt_tensor *leaf; /* held */
} task;

typedef struct collection {
    tu_collector collector; /* first */
    key key;
    kept *kept;
    part now; /* where words go */
    task *tasks;
    size_t task_count, task_capacity;
    tu_map ids; /* of nodes and leaves: number + 1 */
    tt_tensor **tensors;
    size_t tensor_count, tensor_capacity; /* held */
    tu_map numbers;                       /* of tensors: number + 1 */
    tu_map storages;                      /* of storages: number + 1 of the first tensor on it */
    size_t gradient_count;                /* of leaves */
    tu_saved_tensor **lifted;
    size_t lifted_count, lifted_capacity;
    const char *refusal;
    tutti_status status;
} collection;

static bool reserve(collection *of, void **array, size_t entry_bytes, size_t count, size_t *capacity) {
    if (of->status != TUTTI_OK)
        return false;
    if (count < *capacity)
        return true;
    size_t larger = *capacity * 2 + 64;
    void *moved = realloc(*array, larger * entry_bytes);
    if (moved == NULL) {
        of->status = tu_error_memory("a compiled backward", larger * entry_bytes);
        return false;
    }
    *array = moved;
    *capacity = larger;
    return true;
}

static void add_word(tu_collector *collector, uintptr_t word) {
    collection *of = (collection *)collector;
    words *to = &of->key.parts[of->now];
    if (reserve(of, (void **)&to->at, sizeof *to->at, to->count, &to->capacity))
        to->at[to->count++] = word;
}

static void word(collection *of, uintptr_t value) {
    add_word(&of->collector, value);
}

static void keep(tu_collector *collector, void *object, void (*release)(void *object)) {
    collection *of = (collection *)collector;
    kept *one = malloc(sizeof *one);
    if (one == NULL) {
        release(object);
        of->status = of->status != TUTTI_OK ? of->status : tu_error_memory("a compiled backward", sizeof *one);
        return;
    }
    *one = (kept){ of->kept, object, release };
    of->kept = one;
}

static void release_group(void *group) {
    tutti_group_release(group);
}

static void refuse(tu_collector *collector, const char *why) {
    collection *of = (collection *)collector;
    if (of->refusal == NULL)
        of->refusal = why;
}

static bool goes_on(const collection *of) {
    return of->status == TUTTI_OK && of->refusal == NULL;
}

static void add_shape(collection *of, const tu_shape *shape) {
    word(of, (uintptr_t)shape->dtype);
    word(of, (uintptr_t)shape->device);
    word(of, (uintptr_t)shape->ndim);
    for (int i = 0; i < shape->ndim; i++) {
        word(of, (uintptr_t)shape->sizes[i]);
        word(of, (uintptr_t)shape->strides[i]);
    }
}

static size_t number_in(collection *of, tu_map *map, const void *pointer, size_t next, bool *known) {
    size_t number = (uintptr_t)tu_map_get(map, pointer);
    *known = number != 0;
    if (number == 0 && of->status == TUTTI_OK) {
        number = next + 1;
        of->status = tu_map_set(map, pointer, (void *)number);
    }
    return number;
}

/* Its number, and what it looks like where it is new. */
static void add_tensor(tu_collector *collector, tt_tensor *tensor) {
    collection *of = (collection *)collector;
    bool known = true, shared;
    size_t number = tensor != NULL ? number_in(of, &of->numbers, tensor, of->tensor_count, &known) : 0;
    word(of, number);
    if (known || !reserve(of, (void **)&of->tensors, sizeof(tt_tensor *), of->tensor_count, &of->tensor_capacity))
        return;
    of->tensors[of->tensor_count++] = tu_tensor_hold(tensor);
    part before = of->now;
    of->now = SIZES;
    tu_shape shape = tu_shape_of(tensor);
    add_shape(of, &shape);
    word(of, (uintptr_t)shape.offset);
    word(of, tensor->flags & (TU_REQUIRES_GRAD | TU_IS_PARAMETER));
    word(of, number_in(of, &of->storages, tensor->storage, of->tensor_count - 1, &shared));
    of->now = before;
}

static void visit(collection *of, const tu_edge *edge) {
    const void *pointer = edge->node != NULL ? (const void *)edge->node : edge->leaf;
    bool known = true;
    word(of, pointer != NULL ? number_in(of, &of->ids, pointer, of->task_count, &known) : 0);
    word(of, (uintptr_t)edge->slot);
    if (!known && reserve(of, (void **)&of->tasks, sizeof *of->tasks, of->task_count, &of->task_capacity))
        of->tasks[of->task_count++] = (task){ tu_node_hold(edge->node), tu_tensor_hold(edge->leaf) };
}

/* ---- nodes ---- */

static void add_bytes(collection *of, const void *from, size_t bytes) {
    uintptr_t value = 0;
    memcpy(&value, from, bytes < sizeof value ? bytes : sizeof value);
    word(of, value);
}

static void add_attribute(collection *of, const tu_argument *argument, const void *at) {
    switch (argument->type) {
    case TT_ARGUMENT_DIMS: {
        const tt_dims *dims = at;
        word(of, (uintptr_t)dims->count);
        for (int i = 0; i < dims->count; i++)
            word(of, (uintptr_t)dims->at[i]);
        break;
    }
    case TT_ARGUMENT_INTS: {
        const tu_ints *list = at;
        word(of, list->count);
        for (size_t i = 0; i < list->count; i++)
            word(of, (uintptr_t)list->at[i]);
        break;
    }
    case TT_ARGUMENT_INT:
        word(of, (uintptr_t)(intptr_t) * (const int *)at);
        break;
    case TT_ARGUMENT_BOOL:
        word(of, *(const bool *)at);
        break;
    case TT_ARGUMENT_INT64:
    case TT_ARGUMENT_DOUBLE:
        add_bytes(of, at, 8);
        break;
    case TT_ARGUMENT_DTYPE:
        word(of, (uintptr_t) * (const tutti_dtype *)at);
        break;
    case TT_ARGUMENT_DEVICE:
        word(of, (uintptr_t) * (const tutti_device *)at);
        break;
    case TT_ARGUMENT_REDUCTION:
        word(of, (uintptr_t) * (const tutti_reduction *)at);
        break;
    case TT_ARGUMENT_GROUP:
        word(of, (uintptr_t) * (tutti_group *const *)at);
        if (*(tutti_group *const *)at != NULL)
            keep(&of->collector, tutti_group_keep(*(tutti_group *const *)at), release_group);
        break;
    case TT_ARGUMENT_TENSOR:
    case TT_ARGUMENT_TENSORS:
        break;
    }
}

/* What it saved is unpacked here, once: versions are checked, and the capture is given the same tensors. */
static void add_saved(collection *of, tu_node *node) {
    for (int i = 0; i < node->saved_count && of->status == TUTTI_OK; i++) {
        tu_saved_tensor *saved = &node->saved[i];
        word(of, saved->which);
        tt_scope scope = tt_scope_open();
        tt_tensor *tensor = tu_saved_get(node, saved);
        if (tu_self()->pending != TUTTI_OK)
            of->status = tu_self()->pending;
        add_tensor(&of->collector, tensor);
        tu_scope_leave(&scope);
        if (tensor == NULL || saved->hooks == NULL ||
            !reserve(of, (void **)&of->lifted, sizeof(tu_saved_tensor *), of->lifted_count, &of->lifted_capacity))
            continue;
        of->lifted[of->lifted_count++] = saved;
        saved->lifted = tensor; /* the collection holds it */
    }
}

static void add_node_hooks(collection *of, tu_node *node) {
    of->now = HOOKS;
    word(of, node->hooks != NULL);
    if (node->hooks != NULL) {
        tu_hooks_describe(&node->hooks->pre, &of->collector);
        tu_hooks_describe(&node->hooks->post, &of->collector);
        for (int i = 0; i < node->output_count; i++) {
            tu_hooks_describe(&node->hooks->tensor[i], &of->collector);
            if (node->hooks->retained[i] != NULL)
                refuse(&of->collector, "the gradient of a computed tensor is kept (tt_retain_grad)");
        }
    }
    of->now = NODES;
}

static void add_node(collection *of, tu_node *node) {
    if (node->released)
        refuse(&of->collector, "what a node saved is gone");
    word(of, (uintptr_t)node->run);
    word(of, (uintptr_t)node->entry);
    word(of, (uintptr_t)node->input_count);
    word(of, (uintptr_t)node->output_count);
    word(of, (uintptr_t)node->changed);
    word(of, node->sees_nothing);
    for (int i = 0; node->entry != NULL && node->attributes != NULL && i < node->entry->argument_count; i++)
        add_attribute(of, &node->entry->arguments[i],
                      (const char *)node->attributes + node->entry->arguments[i].offset);
    if (node->describe != NULL)
        node->describe(node, &of->collector);
    for (int i = 0; i < node->input_count; i++) {
        word(of, node->needs[i]);
        visit(of, &node->next[i]);
    }
    of->now = SIZES;
    for (int i = 0; i < node->input_count; i++)
        add_shape(of, &node->inputs[i]);
    for (int i = 0; i < node->output_count; i++)
        add_shape(of, &node->outputs[i]);
    of->now = NODES;
    if (goes_on(of))
        add_saved(of, node);
    add_node_hooks(of, node);
    word(of, node->inner != NULL);
    if (node->inner != NULL)
        add_node(of, node->inner);
}

static void add_leaf(collection *of, tt_tensor *leaf) {
    tu_history *history = leaf->history;
    add_tensor(&of->collector, leaf);
    tt_tensor *grad = NULL;
    of->now = HOOKS;
    if (history == NULL) { /* as with no hooks */
        word(of, 0);
        word(of, 0);
    } else {
        tu_hooks_describe(&history->tensor_hooks, &of->collector);
        tu_hooks_describe(&history->accumulate_hooks, &of->collector);
        pthread_mutex_lock(&history->grad_lock);
        grad = tu_tensor_hold(history->grad);
        pthread_mutex_unlock(&history->grad_lock);
    }
    of->now = GRADIENTS;
    word(of, grad != NULL);
    if (grad != NULL) {
        bool shared; /* with a tensor that was met, or with another gradient */
        tu_shape shape = tu_shape_of(grad);
        add_shape(of, &shape);
        word(of, number_in(of, &of->storages, grad->storage, GRADIENT_NUMBERS + of->gradient_count++, &shared));
    }
    tu_tensor_drop(grad);
    of->now = NODES;
}

/* ---- everything ---- */

static int compare_sequences(const void *left, const void *right) {
    const tu_node *first = *(tu_node *const *)left, *second = *(tu_node *const *)right;
    return first->sequence < second->sequence ? -1 : first->sequence > second->sequence;
}

/* The engine runs nodes by when they were made: that order is part of what a backward is. */
static void add_order(collection *of) {
    tu_node **nodes = malloc((of->task_count + 1) * sizeof(tu_node *));
    size_t count = 0;
    if (nodes == NULL) {
        of->status = tu_error_memory("a compiled backward", of->task_count * sizeof(tu_node *));
        return;
    }
    for (size_t i = 0; i < of->task_count; i++)
        if (of->tasks[i].node != NULL)
            nodes[count++] = of->tasks[i].node;
    qsort(nodes, count, sizeof *nodes, compare_sequences);
    for (size_t i = 0; i < count; i++)
        word(of, (uintptr_t)tu_map_get(&of->ids, nodes[i]));
    free(nodes);
}

static void add_root(collection *of, tt_tensor *root, tt_tensor *grad) {
    tu_edge edge = { NULL, NULL, 0 };
    of->status = tu_tensor_check("backward", "roots", root);
    if (of->status == TUTTI_OK && grad != NULL)
        of->status = tu_tensor_check("backward", "grads", grad);
    if (of->status != TUTTI_OK)
        return;
    tu_history_refresh(root);
    if (!(root->flags & TU_REQUIRES_GRAD)) {
        refuse(&of->collector, "a root does not require grad");
        return;
    }
    of->status = tu_edge_to(root, &edge);
    if (of->status == TUTTI_OK)
        visit(of, &edge);
    tu_edge_drop(&edge);
    of->now = SIZES;
    tu_shape shape = tu_shape_of(root);
    add_shape(of, &shape);
    of->now = NODES;
    add_tensor(&of->collector, grad);
}

static void collect(collection *of, tt_tensor_list roots, tt_tensor_list grads) {
    *of = (collection){ .collector = { add_word, add_tensor, keep, refuse }, .now = NODES };
    if (roots.count == 0 || (grads.count != 0 && grads.count != roots.count))
        refuse(&of->collector, "its arguments are wrong");
    for (size_t i = 0; i < roots.count && goes_on(of); i++)
        add_root(of, roots.at[i], grads.count == 0 ? NULL : grads.at[i]);
    for (size_t i = 0; i < of->task_count && goes_on(of); i++) {
        task one = of->tasks[i];
        if (one.node != NULL)
            add_node(of, one.node);
        else
            add_leaf(of, one.leaf);
    }
    if (goes_on(of))
        add_order(of);
}

static void forget_lifted(collection *of) {
    for (size_t i = 0; i < of->lifted_count; i++)
        of->lifted[i]->lifted = NULL;
    of->lifted_count = 0;
}

static void collection_end(collection *of) {
    forget_lifted(of);
    for (size_t i = 0; i < of->task_count; i++) {
        tu_node_drop(of->tasks[i].node);
        tu_tensor_drop(of->tasks[i].leaf);
    }
    for (size_t i = 0; i < of->tensor_count; i++)
        tu_tensor_drop(of->tensors[i]);
    free(of->tasks);
    free(of->tensors);
    free(of->lifted);
    tu_map_free(&of->ids);
    tu_map_free(&of->numbers);
    tu_map_free(&of->storages);
    kept_free(of->kept);
    key_free(&of->key);
}

/* ---- capturing ---- */

typedef struct trace {
    tt_tensor_list roots, grads;
} trace;

static int trace_backward(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const trace *of = user;
    (void)inputs, (void)outputs;
    tu_backward_traced(of->roots, of->grads);
    return 0;
}

/* The graph, as far as it came, and what else the backward depends on. */
static tutti_status capture(entry *one, const collection *of, trace *traced) {
    tu_captured made;
    tutti_status status = tu_capture_function("backward", trace_backward, traced,
                                              tt_tensors_of(of->tensor_count, of->tensors), false, &made);
    one->graph = made.graph;
    one->witness_count = made.witness_count;
    one->witnesses = made.witnesses;
    one->stamps = made.stamps;
    made.graph = NULL;
    made.witness_count = 0;
    made.witnesses = NULL;
    made.stamps = NULL;
    tu_captured_end(&made);
    return status;
}

/* `number` tells the files of several backwards apart. */
static tutti_status build(entry *one, const collection *of, trace *traced, int number, int *twin) {
    tu_recipe how = { .name = "backward", .number = number };
    tu_recipe_look_around(&how, twin);
    tutti_status status = capture(one, of, traced);
    if (status == TUTTI_OK)
        status = tu_pass_sink(one->graph, 0);
    return status == TUTTI_OK ? tu_build_graph(one->graph, &how, "traced", &one->program) : status;
}

/* Ranks compare what they are about to do, whatever came of the capture; an error that is pending stays. */
static tutti_status agree(tt_backward_cache *cache, const entry *made, tu_vote vote) {
    tu_pending_copy error;
    tu_pending_save(&error);
    char why[sizeof cache->reason] = "";
    if (vote != TU_VOTE_READY)
        snprintf(why, sizeof why, "%s", vote == TU_VOTE_EAGER ? cache->reason : tutti_error_message());
    tutti_status agreed = made->graph != NULL ? tu_agree("backward", made->graph, vote, why, &cache->agreed) : TUTTI_OK;
    tu_pending_restore(&error);
    return error.status != TUTTI_OK ? error.status : agreed;
}

/* The backward runs as ever from now on, for the reason that is pending. */
static void make_eager(tt_backward_cache *cache) {
    tt_error_show();
    snprintf(cache->reason, sizeof cache->reason, "%s", tutti_error_message());
    tt_error_clear();
}

/* A new entry, which has taken the words; NULL with the thread's error written. One whose graph is NULL says that the
 * backward cannot be captured. */
static entry *add_entry(tt_backward_cache *cache, collection *of, trace *traced) {
    entry *made = calloc(1, sizeof *made);
    if (made == NULL) {
        tu_error_memory("a compiled backward", sizeof *made);
        return NULL;
    }
    tutti_status status = tu_pending_take(build(made, of, traced, ++cache->counts.captures, &cache->twin));
    forget_lifted(of);
    tu_vote vote = status == TUTTI_OK                            ? TU_VOTE_READY
                   : cache->full || status == TUTTI_ERROR_MEMORY ? TU_VOTE_FAILED
                                                                 : TU_VOTE_EAGER;
    if (vote == TU_VOTE_EAGER)
        make_eager(cache);
    status = agree(cache, made, vote);
    if (status != TUTTI_OK) {
        entry_free(made);
        tu_pending_take(status);
        return NULL;
    }
    if (vote == TU_VOTE_EAGER) {
        tu_program_release(made->program);
        made->program = NULL;
        tt_graph_release(&made->graph);
    } else {
        cache->counts.vertices += made->graph->vertex_count;
    }
    made->kept = of->kept;
    of->kept = NULL;
    made->key = of->key;
    memset(&of->key, 0, sizeof of->key);
    made->next = cache->entries;
    cache->entries = made;
    cache->entry_count++;
    return made;
}

static bool witnesses_hold(const entry *one) {
    for (int i = 0; i < one->witness_count; i++)
        if (one->witnesses[i].stamp(one->witnesses[i].owner) != one->stamps[i])
            return false;
    return true;
}

/* The entry of these words, which comes to the front; NULL where there is none, and the miss is counted. */
static entry *find_entry(tt_backward_cache *cache, const key *wanted) {
    for (entry **link = &cache->entries; *link != NULL; link = &(*link)->next) {
        entry *one = *link;
        if (difference(&one->key, wanted) != PARTS || !witnesses_hold(one))
            continue;
        *link = one->next;
        one->next = cache->entries;
        cache->entries = one;
        return one;
    }
    static const tt_backward_miss misses[PARTS + 1] = { /* the last: what hooks depend on */
                                                        TT_BACKWARD_MISS_NODES, TT_BACKWARD_MISS_HOOKS,
                                                        TT_BACKWARD_MISS_SIZES, TT_BACKWARD_MISS_GRADIENTS,
                                                        TT_BACKWARD_MISS_HOOKS
    };
    tt_backward_miss why =
        cache->entries == NULL ? TT_BACKWARD_MISS_FIRST : misses[difference(&cache->entries->key, wanted)];
    cache->counts.misses[why]++;
    return NULL;
}

/* ---- running ---- */

/* The graph's inputs for these tensors, held; an error where they do not fit after all, and nothing has happened. */
static tutti_status gather(const entry *one, const collection *of, tt_tensor ***inputs) {
    size_t count = (size_t)one->graph->input_count;
    *inputs = calloc(count + 1, sizeof(tt_tensor *));
    if (*inputs == NULL)
        return tu_error_memory("a compiled backward", count * sizeof(tt_tensor *));
    return tu_graph_gather("backward", one->graph, tt_tensors_of(of->tensor_count, of->tensors), *inputs);
}

static tutti_status run_entry(const entry *one, collection *of, tt_tensor *const *inputs, bool retain_graph) {
    for (size_t i = 0; i < of->task_count && !retain_graph; i++)
        if (of->tasks[i].node != NULL)
            tu_node_release_saved(of->tasks[i].node);
    return tu_program_run(one->program, inputs, NULL);
}

/* The backward runs as ever, for that reason. */
static bool leave(tt_backward_cache *cache, const char *why, tutti_status *status) {
    if (why != NULL)
        snprintf(cache->reason, sizeof cache->reason, "%s", why);
    if (cache->full) {
        *status = tu_error(TUTTI_ERROR_CAPTURE, "backward: it cannot be compiled: %s", cache->reason);
        return true;
    }
    cache->counts.eager++;
    return false;
}

static bool run_collected(tt_backward_cache *cache, collection *of, trace *traced, bool retain_graph,
                          tutti_status *status) {
    if (of->status != TUTTI_OK) { /* the engine finds the same, and says it better */
        tt_error_clear();
        cache->counts.eager++;
        return false;
    }
    if (of->refusal != NULL)
        return leave(cache, of->refusal, status);
    entry *one = find_entry(cache, &of->key);
    if (one != NULL) {
        cache->counts.hits += one->graph != NULL;
    } else if (cache->entry_count == TT_BACKWARD_ENTRIES) {
        return leave(cache, "the cache is full", status);
    } else if ((one = add_entry(cache, of, traced)) == NULL) {
        *status = tu_self()->pending != TUTTI_OK ? tu_self()->pending : TUTTI_ERROR_MEMORY;
        return true;
    }
    if (one->graph == NULL)
        return leave(cache, NULL, status);
    tt_tensor **inputs;
    *status = gather(one, of, &inputs);
    bool fits = *status == TUTTI_OK;
    if (fits)
        *status = run_entry(one, of, inputs, retain_graph);
    for (int i = 0; inputs != NULL && i < one->graph->input_count; i++)
        tu_tensor_drop(inputs[i]);
    free(inputs);
    return fits || *status == TUTTI_ERROR_MEMORY || leave(cache, tutti_error_message(), status);
}

static bool run(tu_backward_runner *runner, tt_tensor_list roots, tt_tensor_list grads, bool retain_graph,
                tutti_status *status) {
    tt_backward_cache *cache = (tt_backward_cache *)runner;
    trace traced = { roots, grads };
    collection of;
    bool recording = tt_grad_mode(false);
    tu_backward_runner_set(NULL); /* backwards inside are part of this one */
    tt_scope scope = tt_scope_open();
    collect(&of, roots, grads);
    bool done = run_collected(cache, &of, &traced, retain_graph, status);
    collection_end(&of);
    tu_scope_leave(&scope);
    tu_backward_runner_set(runner);
    tt_grad_mode(recording);
    return done;
}

/* ---- the calls ---- */

bool tt_backward_cache_new(const tt_backward_cache_options *options, tt_backward_cache **cache) {
    tt_backward_cache_options full = TT_BACKWARD_CACHE_OPTIONS_INIT;
    if (cache != NULL)
        *cache = NULL;
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (cache == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "backward_cache_new: cache is NULL");
        return false;
    }
    if (tu_pending_take(tu_options_copy("tt_backward_cache_options", options, &full, sizeof full)) != TUTTI_OK)
        return false;
    tt_backward_cache *made = calloc(1, sizeof *made);
    if (made == NULL) {
        tu_pending_take(tu_error_memory("a cache of backwards", sizeof *made));
        return false;
    }
    made->runner.run = run;
    made->full = full.full;
    made->counts.size = sizeof made->counts;
    *cache = made;
    return true;
}

void tt_backward_cache_release(tt_backward_cache **place) {
    tt_backward_cache *cache = place != NULL ? *place : NULL;
    if (cache == NULL)
        return;
    if (atomic_load_explicit(&cache->used, memory_order_acquire) != 0) {
        tu_fail(TUTTI_ERROR_STATE, "backward_cache_release: a region uses it; end that first");
        return;
    }
    for (entry *one = cache->entries, *next; one != NULL; one = next) {
        next = one->next;
        entry_free(one);
    }
    tu_agreed_end(cache->agreed);
    free(cache);
    *place = NULL;
}

bool tt_backward_compiled_begin(tt_backward_cache *cache) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (cache == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "backward_compiled_begin: cache is NULL");
        return false;
    }
    if (atomic_exchange_explicit(&cache->used, 1, memory_order_acq_rel) != 0) {
        tu_fail(TUTTI_ERROR_STATE, "backward_compiled_begin: another region uses this cache");
        return false;
    }
    cache->outer = tu_backward_runner_set(&cache->runner);
    return true;
}

bool tt_backward_compiled_end(void) {
    tu_backward_runner *runner = tu_backward_runner_set(NULL);
    if (runner == NULL || runner->run != run) {
        tu_backward_runner_set(runner);
        tu_fail(TUTTI_ERROR_STATE, "backward_compiled_end: no region is open in this thread");
        return false;
    }
    tt_backward_cache *cache = (tt_backward_cache *)runner;
    tu_backward_runner_set(cache->outer);
    atomic_store_explicit(&cache->used, 0, memory_order_release);
    return tu_self()->pending == TUTTI_OK;
}

static bool is_there(const char *who, const tt_backward_cache *cache) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (cache == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: cache is NULL", who);
    return cache != NULL;
}

bool tt_backward_cache_count(const tt_backward_cache *cache, tt_backward_counts *counts) {
    return is_there("backward_cache_count", cache) &&
           tu_pending_take(tu_result_copy("tt_backward_counts", &cache->counts, sizeof cache->counts, counts)) ==
               TUTTI_OK;
}

const tt_graph *tt_backward_cache_graph(const tt_backward_cache *cache) {
    return is_there("backward_cache_graph", cache) && cache->entries != NULL ? cache->entries->graph : NULL;
}

const char *tt_backward_cache_reason(const tt_backward_cache *cache) {
    return is_there("backward_cache_reason", cache) ? cache->reason : "";
}
