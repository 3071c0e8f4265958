/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled functions: their entries, how a call finds one, and what happens where there is none.
 *
 * `lock` guards the list and the counts, and is held for moments. One thread at a time captures, builds and agrees with
 * other ranks (`building`), while others run what is there. Where ranks are threads, a function with collectives is one
 * rank's: another one would wait here for the rank that waits for it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/result.h"
#include "compile/entry.h"
#include "world/here.h"

#define REASON 512
#define FEW 96      /* inputs that a call keeps on its stack */
#define VARIANTS 32 /* for other sizes, of one function */

struct tt_compiled {
    tt_compile_function *function;
    void *user;
    tt_compile_options options; /* its strings are owned */
    char *skip, *with, *name;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* `building` or `owner` has */
    bool building;
    _Atomic(const void *) owner; /* the rank whose collectives are in it; NULL: none are, or it is not known */
    tu_entry *entries;           /* the one that ran last is first */
    tu_entry *last;              /* that ran, held; NULL: none */
    tt_compiled_counts counts;
    int kept;        /* entries that count for the limit: those that run the function itself do too */
    int most_inputs; /* of an entry */
    char reason[REASON];
    bool warned;
    tu_agreed *agreed; /* of the thread that builds */
    int twin;          /* the same; see tu_recipe */
};

/* ---- making and ending ---- */

static tutti_status check_options(const tt_compile_options *options) {
    if ((unsigned)options->mode > TT_COMPILE_INTERPRET)
        return tu_error(TUTTI_ERROR_ARGUMENT, "compile: tt_compile_options.mode is %d, which is none",
                        (int)options->mode);
    if (options->dynamic != 0 && options->dynamic != TUTTI_NONE)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "compile: tt_compile_options.dynamic is %d; 0 (sizes that change become variable) and "
                        "TUTTI_NONE are possible",
                        options->dynamic);
    for (const char *at = options->name; at != NULL && *at != 0; at++)
        if (*at == '/' || (unsigned char)*at < ' ')
            return tu_error(TUTTI_ERROR_ARGUMENT,
                            "compile: tt_compile_options.name is \"%s\", which cannot be part of "
                            "a file's name",
                            options->name);
    tutti_status status = tu_check_passes("skip", false, options->skip);
    return status == TUTTI_OK ? tu_check_passes("with", true, options->with) : status;
}

static tt_compiled *make(tt_compile_function *function, void *user, const tt_compile_options *options) {
    tt_compiled *made = calloc(1, sizeof *made);
    char *skip = strdup(options->skip != NULL ? options->skip : "");
    char *with = strdup(options->with != NULL ? options->with : "");
    char *name = strdup(options->name != NULL ? options->name : "function");
    if (made == NULL || name == NULL || skip == NULL || with == NULL) {
        free(made);
        free(skip);
        free(with);
        free(name);
        tu_error_memory("a compiled function", sizeof *made);
        return NULL;
    }
    made->function = function;
    made->user = user;
    made->options = *options;
    made->options.skip = made->skip = skip;
    made->options.with = made->with = with;
    made->options.name = made->name = name;
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->changed, NULL);
    return made;
}

bool tt_compile(tt_compile_function *function, void *user, const tt_compile_options *given, tt_compiled **compiled) {
    tt_compile_options options = TT_COMPILE_OPTIONS_INIT;
    if (compiled != NULL)
        *compiled = NULL;
    if (tu_self()->pending != TUTTI_OK)
        return false;
    tutti_status status = tu_options_copy("tt_compile_options", given, &options, sizeof options);
    if (status == TUTTI_OK && (function == NULL || compiled == NULL))
        status = tu_error(TUTTI_ERROR_ARGUMENT, "compile: %s is NULL", function == NULL ? "function" : "compiled");
    if (status == TUTTI_OK && tu_is_capturing())
        status = tu_error(TUTTI_ERROR_CAPTURE,
                          "compile: a function that is captured compiles another one; compile it outside, and call it "
                          "inside");
    if (status == TUTTI_OK)
        status = check_options(&options);
    if (status == TUTTI_OK && (*compiled = make(function, user, &options)) == NULL)
        status = TUTTI_ERROR_MEMORY;
    return tu_pending_take(status) == TUTTI_OK;
}

void tt_compiled_release(tt_compiled **place) {
    tt_compiled *compiled = place != NULL ? *place : NULL;
    if (compiled == NULL)
        return;
    *place = NULL;
    for (tu_entry *entry = compiled->entries, *next; entry != NULL; entry = next) {
        next = entry->next;
        tu_entry_drop(entry);
    }
    tu_entry_drop(compiled->last);
    tu_agreed_end(compiled->agreed);
    pthread_mutex_destroy(&compiled->lock);
    pthread_cond_destroy(&compiled->changed);
    free(compiled->skip);
    free(compiled->with);
    free(compiled->name);
    free(compiled);
}

/* ---- whose turn it is ---- */

/* Whether the function has collectives of another rank than the calling thread's. */
static bool is_foreign(const tt_compiled *compiled) {
    const void *owner = atomic_load_explicit(&compiled->owner, memory_order_acquire); /* pairs with take_over */
    if (owner == NULL)
        return false;
    const void *mine = tu_rank_here().identity;
    return mine != NULL && mine != owner;
}

static tutti_status foreign_error(const tt_compiled *compiled) {
    return tu_error(
        TUTTI_ERROR_STATE,
        "compiled %s has collectives of another rank that is a thread of this process; every rank must make "
        "its own with tt_compile",
        compiled->name);
}

/* Waits until nobody else builds. An error where that one may wait for this rank. */
static tutti_status begin_building(tt_compiled *compiled) {
    pthread_mutex_lock(&compiled->lock);
    while (compiled->building && !is_foreign(compiled))
        pthread_cond_wait(&compiled->changed, &compiled->lock);
    bool foreign = is_foreign(compiled);
    compiled->building = compiled->building || !foreign;
    pthread_mutex_unlock(&compiled->lock);
    return foreign ? foreign_error(compiled) : TUTTI_OK;
}

static void end_building(tt_compiled *compiled) {
    pthread_mutex_lock(&compiled->lock);
    compiled->building = false;
    pthread_cond_broadcast(&compiled->changed);
    pthread_mutex_unlock(&compiled->lock);
}

/* Before the first agreement: from now on the function is this rank's. */
static void take_over(tt_compiled *compiled, const tt_graph *graph) {
    bool communicates = false;
    for (const tu_vertex *vertex = graph->first; vertex != NULL && !communicates; vertex = vertex->next)
        communicates = tu_vertex_communicates(vertex);
    if (!communicates)
        return;
    pthread_mutex_lock(&compiled->lock);
    atomic_store_explicit(&compiled->owner, tu_rank_here().identity, memory_order_release); /* pairs with is_foreign */
    pthread_cond_broadcast(&compiled->changed);
    pthread_mutex_unlock(&compiled->lock);
}

static tutti_status agree(tt_compiled *compiled, const tt_graph *graph, tu_vote vote, const char *why) {
    if (graph == NULL)
        return TUTTI_OK;
    take_over(compiled, graph);
    return tu_agree(compiled->name, graph, vote, why, &compiled->agreed);
}

/* ---- running the function itself ---- */

/* A body that runs, or is captured; on the stack of its thread. */
typedef struct body {
    const tt_compiled *of;
    const void *outer;
} body;

static void enter(body *inner, const tt_compiled *compiled) {
    *inner = (body){ compiled, tu_self()->compiled_bodies };
    tu_self()->compiled_bodies = inner;
}

static void leave(const body *inner) {
    tu_self()->compiled_bodies = inner->outer;
}

/* A function that calls itself would be captured inside of its own capture, without an end. */
static bool runs_already(const tt_compiled *compiled) {
    for (const body *one = tu_self()->compiled_bodies; one != NULL; one = one->outer)
        if (one->of == compiled)
            return true;
    return false;
}

static tt_tensor_list call_itself(const tt_compiled *compiled, tt_tensor_list inputs) {
    tt_tensor_list none = { 0, tu_nothing };
    tt_tensor **outputs = tu_scope_memory(TT_GRAPH_OUTPUTS * sizeof *outputs);
    if (outputs == NULL)
        return none;
    memset(outputs, 0, TT_GRAPH_OUTPUTS * sizeof *outputs);
    body inner;
    enter(&inner, compiled);
    int count = compiled->function(inputs, outputs, compiled->user);
    leave(&inner);
    if (tu_self()->pending == TUTTI_OK && (count < 0 || count > TT_GRAPH_OUTPUTS))
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: the function returned %d results; 0 to %d are possible", compiled->name,
                count, TT_GRAPH_OUTPUTS);
    return tu_self()->pending == TUTTI_OK ? tt_tensors_of((size_t)count, outputs) : none;
}

static tt_tensor_list call_eagerly(tt_compiled *compiled, tt_tensor_list inputs, const char *reason) {
    pthread_mutex_lock(&compiled->lock);
    compiled->counts.eager++;
    snprintf(compiled->reason, REASON, "%s", reason);
    bool warns = !compiled->warned;
    compiled->warned = true;
    pthread_mutex_unlock(&compiled->lock);
    if (warns)
        TU_LOG(TUTTI_LOG_WARN, NULL, "compile", "compiled %s runs as it is: %s", compiled->name, reason);
    return call_itself(compiled, inputs);
}

/* ---- finding an entry ---- */

/* The tensors of an entry's inputs while a call runs. */
typedef struct holding {
    tt_tensor **at;
    int count, room;
    tt_tensor *few[FEW];
} holding;

static void let_go(holding *inputs) {
    for (int i = 0; i < inputs->count; i++)
        tu_tensor_drop(inputs->at[i]);
    if (inputs->at != inputs->few)
        free(inputs->at);
    *inputs = (holding){ .count = 0 };
}

static tutti_status make_room(holding *inputs, int room) {
    inputs->count = 0;
    inputs->at = inputs->few;
    inputs->room = room > FEW ? room : FEW;
    if (room > FEW)
        inputs->at = calloc((size_t)room, sizeof(tt_tensor *));
    if (inputs->at != NULL)
        return TUTTI_OK;
    inputs->at = inputs->few;
    return tu_error_memory("the inputs of a call", (size_t)room * sizeof(tt_tensor *));
}

/* Under the lock: its graphs are those that are shown. */
static void note_run(tt_compiled *compiled, tu_entry *entry) {
    if (compiled->last == entry || entry->why_eager != NULL)
        return;
    tu_entry *before = compiled->last;
    compiled->last = tu_entry_hold(entry);
    tu_entry_drop(before);
}

/* Under the lock. */
static tu_entry *look(tt_compiled *compiled, tt_tensor_list given, holding *inputs, tt_miss *first) {
    tt_miss miss = TT_MISS_FIRST;
    tu_entry **link = &compiled->entries, *entry;
    for (; (entry = *link) != NULL; link = &entry->next) {
        if (tu_guards_hold(&entry->guards, given, inputs->at, &miss, NULL, 0))
            break;
        if (entry == compiled->entries)
            *first = miss;
    }
    if (entry == NULL)
        return NULL;
    *link = entry->next;
    entry->next = compiled->entries;
    compiled->entries = entry;
    inputs->count = entry->guards.count;
    compiled->counts.hits += entry->why_eager == NULL;
    note_run(compiled, entry);
    return tu_entry_hold(entry);
}

/* The entry whose guards hold, held, and with the tensors of its inputs. NULL: there is none; with `tells` it is noted
 * why not. */
static tu_entry *find(tt_compiled *compiled, tt_tensor_list given, holding *inputs, bool tells) {
    tt_miss first = TT_MISS_FIRST;
    pthread_mutex_lock(&compiled->lock);
    tu_entry *entry = tu_pending_take(make_room(inputs, compiled->most_inputs)) == TUTTI_OK
                          ? look(compiled, given, inputs, &first)
                          : NULL;
    if (entry == NULL && tells) {
        compiled->counts.misses[first]++;
        snprintf(compiled->reason, REASON, "it is the first call");
        if (compiled->entries != NULL)
            tu_guards_hold(&compiled->entries->guards, given, inputs->at, &first, compiled->reason, REASON);
    }
    pthread_mutex_unlock(&compiled->lock);
    return entry;
}

/* ---- capturing ---- */

/* A tensor that is given twice is one input of the graph: the function gets it in both places. */
typedef struct expansion {
    tt_compile_function *function;
    void *user;
    size_t count;
    int *first;  /* of each position: the first with the same tensor */
    int *unique; /* of each position: its place among those that are different */
} expansion;

static int expand(tt_tensor_list unique, tt_tensor **outputs, void *user) {
    const expansion *of = user;
    tt_tensor **all = tu_scope_memory((of->count + 1) * sizeof *all);
    for (size_t i = 0; all != NULL && i < of->count; i++)
        all[i] = unique.at[of->unique[i]];
    return all != NULL ? of->function(tt_tensors_of(of->count, all), outputs, of->user) : 0;
}

typedef struct attempt {
    tt_compiled *compiled;
    tt_tensor_list inputs;
    expansion expansion;
    tt_tensor **unique;
    size_t unique_count;
} attempt;

static tutti_status attempt_begin(attempt *of, tt_compiled *compiled, tt_tensor_list inputs) {
    size_t room = inputs.count + 1;
    *of = (attempt){ .compiled = compiled, .inputs = inputs };
    of->expansion = (expansion){ .function = compiled->function, .user = compiled->user, .count = inputs.count };
    of->expansion.first = malloc(room * sizeof *of->expansion.first);
    of->expansion.unique = malloc(room * sizeof *of->expansion.unique);
    of->unique = malloc(room * sizeof(tt_tensor *));
    if (of->expansion.first == NULL || of->expansion.unique == NULL || of->unique == NULL)
        return tu_error_memory("inputs", room * sizeof(tt_tensor *));
    for (size_t i = 0; i < inputs.count; i++) {
        size_t same = 0;
        while (inputs.at[same] != inputs.at[i])
            same++;
        of->expansion.first[i] = (int)same;
        of->expansion.unique[i] = same < i ? of->expansion.unique[same] : (int)of->unique_count;
        if (same == i)
            of->unique[of->unique_count++] = inputs.at[i];
    }
    return TUTTI_OK;
}

static void attempt_end(attempt *of) {
    free(of->expansion.first);
    free(of->expansion.unique);
    free(of->unique);
}

static tu_entry *new_entry(const tt_compiled *compiled) {
    tu_entry *entry = calloc(1, sizeof *entry);
    if (entry == NULL) {
        tu_error_memory("a compiled function", sizeof *entry);
        return NULL;
    }
    atomic_init(&entry->references, 1);
    pthread_mutex_init(&entry->lock, NULL);
    snprintf(entry->name, sizeof entry->name, "%s", compiled->name);
    return entry;
}

/* The tensors that the inputs of a capture are now; lent. */
static tutti_status list_inputs(const attempt *of, const tu_captured *captured, tt_tensor **inputs) {
    for (int i = 0; i < captured->input_count; i++) {
        const tu_graph_input *input = &captured->graph->inputs[i];
        tt_tensor *x = input->tensor;
        if (input->kind == TU_INPUT_ARGUMENT)
            x = of->unique[input->index];
        else if (input->kind == TU_INPUT_HELD)
            x = input->holder.get(input->holder.owner, input->holder.index);
        else if (input->kind == TU_INPUT_GRADIENT)
            x = tt_grad(inputs[input->index]);
        if (x == NULL)
            return tu_error(TUTTI_ERROR_STATE, "%s: %s went while the function was captured", of->compiled->name,
                            input->value->name);
        inputs[i] = x;
    }
    return TUTTI_OK;
}

static tutti_status make_guards(const attempt *of, tu_entry *entry) {
    tt_tensor **inputs = tu_scope_memory(((size_t)entry->captured.input_count + 1) * sizeof *inputs);
    tutti_status status = inputs != NULL ? list_inputs(of, &entry->captured, inputs) : TUTTI_ERROR_MEMORY;
    if (status != TUTTI_OK)
        return status;
    return tu_guards_make(&entry->guards, &entry->captured, (int)of->inputs.count, of->expansion.first, inputs);
}

static tutti_status build(const attempt *of, tu_entry *entry) {
    tt_compiled *compiled = of->compiled;
    tu_recipe how = { .name = compiled->name, .mode = compiled->options.mode, .strict = compiled->options.strict };
    how.skip = compiled->skip;
    how.with = compiled->with;
    how.no_compiler = entry->is_variant;
    how.number = compiled->counts.captures;
    tu_recipe_look_around(&how, &compiled->twin);
    tutti_status status = tu_build_entry(entry, &how);
    if (status == TUTTI_OK)
        status = make_guards(of, entry);
    return status == TUTTI_OK && compiled->options.replay ? tu_replay_make(entry, compiled->options.full) : status;
}

/* Whether the function runs as it is instead: it cannot be captured, or eager code would say what is wrong with its
 * backward when that runs. */
static bool is_eager(const tt_compiled *compiled, const tu_captured *captured, tutti_status status) {
    return !compiled->options.full && status != TUTTI_ERROR_MEMORY &&
           (status == TUTTI_ERROR_CAPTURE || captured->in_backward);
}

static tutti_status make_eager(const attempt *of, tu_entry *entry, tutti_status status) {
    tu_pending_take(status);
    tt_error_show();
    entry->why_eager = strdup(tutti_error_message());
    tt_error_clear();
    if (entry->why_eager == NULL)
        return tu_error_memory("a message", strlen(tutti_error_message()));
    return tu_guards_of_arguments(&entry->guards, &entry->captured, of->inputs, of->expansion.first);
}

/* ---- other sizes ---- */

/* Whether an entry of before and this one differ in one size alone: then a third one needs no capture. */
static tutti_status find_pattern(const attempt *of, tu_entry *made) {
    tt_compiled *compiled = of->compiled;
    tutti_status status = TUTTI_OK;
    if (compiled->options.dynamic == TUTTI_NONE || made->captured.asks_sizes)
        return TUTTI_OK;
    holding inputs;
    pthread_mutex_lock(&compiled->lock);
    for (const tu_entry *entry = compiled->entries; entry != NULL && made->pattern == NULL && status == TUTTI_OK;
         entry = entry->next) {
        if (entry->why_eager != NULL || (status = make_room(&inputs, entry->guards.count)) != TUTTI_OK)
            continue;
        if (tu_guards_hold_but_sizes(&entry->guards, of->inputs, inputs.at)) {
            inputs.count = entry->guards.count;
            status = tu_pattern_find(&entry->guards, &entry->captured, &made->captured, inputs.at, &made->pattern);
        }
        let_go(&inputs);
    }
    pthread_mutex_unlock(&compiled->lock);
    return status;
}

/* Whether two entries differ from this call in nothing but sizes, in a way that no pattern was found for. Then more of
 * them are captured as variants: some sizes are no reason to run as it is. */
static bool has_many_sizes(tt_compiled *compiled, tt_tensor_list given) {
    int alike = 0;
    holding inputs;
    if (compiled->options.dynamic == TUTTI_NONE || compiled->counts.captures > VARIANTS)
        return false;
    pthread_mutex_lock(&compiled->lock);
    for (const tu_entry *entry = compiled->entries; entry != NULL; entry = entry->next) {
        if (entry->why_eager != NULL || entry->is_variant || make_room(&inputs, entry->guards.count) != TUTTI_OK)
            continue;
        if (tu_guards_hold_but_sizes(&entry->guards, given, inputs.at)) {
            inputs.count = entry->guards.count;
            alike++;
        }
        let_go(&inputs);
    }
    pthread_mutex_unlock(&compiled->lock);
    return alike >= 2;
}

/* The entry with a pattern that these inputs fit, held; the size that they have goes to *size. */
static tu_entry *find_fitting(tt_compiled *compiled, tt_tensor_list given, holding *inputs, int64_t *size) {
    tu_entry *found = NULL;
    *size = 0;
    pthread_mutex_lock(&compiled->lock);
    for (tu_entry *entry = compiled->entries; entry != NULL && found == NULL; entry = entry->next) {
        if (entry->pattern == NULL || make_room(inputs, entry->guards.count) != TUTTI_OK)
            continue;
        if (tu_guards_hold_but_sizes(&entry->guards, given, inputs->at)) {
            inputs->count = entry->guards.count;
            *size = tu_pattern_size(entry->pattern, &entry->guards, inputs->at);
        }
        if (*size > 0)
            found = tu_entry_hold(entry);
        else
            let_go(inputs);
    }
    pthread_mutex_unlock(&compiled->lock);
    return found;
}

/* Where a pattern cannot be applied after all, the function is captured as ever. */
static tutti_status try_pattern(attempt *of, tu_entry *entry, bool *applied) {
    tt_compiled *compiled = of->compiled;
    holding inputs = { .count = 0 };
    int64_t size;
    tu_entry *from = find_fitting(compiled, of->inputs, &inputs, &size);
    *applied = false;
    if (from == NULL)
        return TUTTI_OK;
    entry->is_variant = true;
    tt_scope scope = tt_scope_open();
    tutti_status status = tu_pattern_apply(compiled->name, from->pattern, from, inputs.at, size, &entry->captured);
    if (status == TUTTI_OK)
        status = build(of, entry);
    tu_scope_leave(&scope);
    *applied = status == TUTTI_OK;
    let_go(&inputs);
    tu_entry_drop(from);
    if (*applied)
        return agree(compiled, entry->captured.graph, TU_VOTE_READY, "");
    tt_error_clear();
    return status == TUTTI_ERROR_MEMORY ? status : TUTTI_OK;
}

/* A function that runs a backward itself and returns its loss as it is would be differentiated twice: the engine's
 * advice, to keep what was saved, is not what its author wants. */
static tutti_status advise(const tt_compiled *compiled, const tu_captured *captured, tutti_status status) {
    char cause[REASON];
    if (!captured->in_backward || !captured->inner_backward || status == TUTTI_ERROR_MEMORY)
        return status;
    snprintf(cause, sizeof cause, "%s", tutti_error_message());
    tt_error_clear();
    return tu_error(status,
                    "%s runs a backward itself and returns a result with history, whose backward would be captured "
                    "behind it: return it detached (tt_detach). Else: %s",
                    compiled->name, cause);
}

/* Captures, builds, and agrees with the other ranks, whatever came of the first two. */
static tutti_status try_capture(attempt *of, tu_entry *entry) {
    tt_compiled *compiled = of->compiled;
    pthread_mutex_lock(&compiled->lock);
    compiled->counts.captures++;
    pthread_mutex_unlock(&compiled->lock);
    tt_scope scope = tt_scope_open();
    bool same = of->unique_count == of->inputs.count;
    body inner;
    enter(&inner, compiled);
    tutti_status status = tu_capture_function(
        compiled->name, same ? compiled->function : expand, same ? compiled->user : (void *)&of->expansion,
        tt_tensors_of(of->unique_count, of->unique), tt_grad_enabled(), &entry->captured);
    leave(&inner);
    status = advise(compiled, &entry->captured, status);
    tu_vote vote = TU_VOTE_READY;
    if (status == TUTTI_OK)
        status = build(of, entry);
    if (status == TUTTI_OK)
        status = find_pattern(of, entry);
    if (status != TUTTI_OK) {
        bool eager = is_eager(compiled, &entry->captured, status);
        vote = eager ? TU_VOTE_EAGER : TU_VOTE_FAILED;
        if (eager)
            status = make_eager(of, entry, status);
    }
    char why[REASON] = "";
    tu_pending_take(status);
    if (vote != TU_VOTE_READY)
        snprintf(why, sizeof why, "%s", entry->why_eager != NULL ? entry->why_eager : tutti_error_message());
    tu_pending_copy error;
    tu_pending_save(&error);
    tutti_status agreed = agree(compiled, entry->captured.graph, vote, why);
    tu_pending_restore(&error);
    tu_scope_leave(&scope);
    return status != TUTTI_OK ? status : agreed;
}

static tutti_status check_limit(tt_compiled *compiled) {
    char reason[REASON];
    pthread_mutex_lock(&compiled->lock);
    int entries = compiled->kept;
    snprintf(reason, sizeof reason, "%s", compiled->reason);
    pthread_mutex_unlock(&compiled->lock);
    if (entries < TT_COMPILE_ENTRIES)
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_LIMIT,
                    "%s has %d entries, which is the limit, and none fits this call (%s); what changes so often "
                    "should be a tensor, or have a function of its own",
                    compiled->name, TT_COMPILE_ENTRIES, reason);
}

/* Under the lock. */
static void drop_oldest_variant(tt_compiled *compiled) {
    tu_entry **oldest = NULL;
    for (tu_entry **link = &compiled->entries; *link != NULL; link = &(*link)->next)
        if ((*link)->is_variant)
            oldest = link;
    if (oldest == NULL)
        return;
    tu_entry *gone = *oldest;
    *oldest = gone->next;
    compiled->counts.variants--;
    tu_entry_drop(gone);
}

static void insert(tt_compiled *compiled, tu_entry *entry) {
    pthread_mutex_lock(&compiled->lock);
    if (entry->is_variant && compiled->counts.variants >= VARIANTS)
        drop_oldest_variant(compiled);
    entry->next = compiled->entries;
    compiled->entries = entry;
    note_run(compiled, entry);
    compiled->counts.variants += entry->is_variant;
    compiled->kept += !entry->is_variant;
    compiled->counts.entries += !entry->is_variant && entry->why_eager == NULL;
    if (entry->guards.count > compiled->most_inputs)
        compiled->most_inputs = entry->guards.count;
    if (entry->forward != NULL)
        compiled->counts.vertices +=
            entry->forward->vertex_count + (entry->backward != NULL ? entry->backward->vertex_count : 0);
    pthread_mutex_unlock(&compiled->lock);
}

/* A new entry for these inputs, held. NULL with the error pending, or, with why it may not be captured in `reason`,
 * without one. Called by the thread that builds. */
static tu_entry *add_entry(tt_compiled *compiled, tt_tensor_list inputs, char *reason) {
    attempt of;
    tu_entry *entry = NULL;
    bool applied = false;
    tutti_status status = attempt_begin(&of, compiled, inputs);
    if (status == TUTTI_OK && (entry = new_entry(compiled)) == NULL)
        status = TUTTI_ERROR_MEMORY;
    if (status == TUTTI_OK)
        status = try_pattern(&of, entry, &applied);
    if (status == TUTTI_OK && !applied) {
        tu_entry_drop(entry);
        entry = new_entry(compiled);
        if (entry != NULL)
            entry->is_variant = has_many_sizes(compiled, inputs);
        status = entry == NULL ? TUTTI_ERROR_MEMORY : entry->is_variant ? TUTTI_OK : check_limit(compiled);
        if (status == TUTTI_ERROR_LIMIT && !compiled->options.full) {
            snprintf(reason, REASON, "%s", tutti_error_message());
            tu_entry_drop(entry);
            attempt_end(&of);
            return NULL;
        }
        if (status == TUTTI_OK)
            status = try_capture(&of, entry);
    }
    attempt_end(&of);
    if (status != TUTTI_OK) {
        tu_entry_drop(entry);
        tu_pending_take(status);
        tt_error_show();
        pthread_mutex_lock(&compiled->lock);
        snprintf(compiled->reason, REASON, "its capture failed: %s", tutti_error_message());
        pthread_mutex_unlock(&compiled->lock);
        return NULL;
    }
    insert(compiled, entry);
    return tu_entry_hold(entry);
}

/* ---- the call ---- */

/* The tensors of a new entry's inputs. Nothing but another thread can have changed them. */
static tutti_status hold_inputs(const tt_compiled *compiled, const tu_entry *entry, tt_tensor_list given,
                                holding *inputs) {
    char words[REASON];
    tt_miss miss;
    let_go(inputs);
    tutti_status status = make_room(inputs, entry->guards.count);
    if (status != TUTTI_OK)
        return status;
    if (!tu_guards_hold(&entry->guards, given, inputs->at, &miss, words, sizeof words))
        return tu_error(TUTTI_ERROR_STATE, "%s: something changed while the function was captured: %s", compiled->name,
                        words);
    inputs->count = entry->guards.count;
    return TUTTI_OK;
}

/* By the thread that builds: another one may have built it meanwhile. NULL with the error pending, or, with why it may
 * not be captured in `reason`, without one. */
static tu_entry *find_or_add(tt_compiled *compiled, tt_tensor_list given, holding *inputs, char *reason) {
    tu_entry *entry = find(compiled, given, inputs, true);
    if (entry != NULL || tu_self()->pending != TUTTI_OK)
        return entry;
    entry = add_entry(compiled, given, reason);
    tutti_status status = entry != NULL ? hold_inputs(compiled, entry, given, inputs) : TUTTI_OK;
    if (status != TUTTI_OK) {
        tu_entry_drop(entry);
        entry = NULL;
    }
    tu_pending_take(status);
    return entry;
}

/* A rank that captures anew asks the others by a collective of its own, which the user has not called: whoever meets it
 * is told what it is. */
static tutti_status explain(const tu_entry *entry, tutti_status status) {
    char cause[REASON];
    if (status != TUTTI_ERROR_MISMATCH)
        return status;
    snprintf(cause, sizeof cause, "%s", tutti_error_message());
    tt_error_clear();
    return tu_error(status,
                    "compiled %s: %s (an all_gather of u64 that nobody called is that of a rank which had to capture "
                    "the function anew, and asks whether the others did: all ranks must call with inputs of the same "
                    "sizes and kinds)",
                    entry->name, cause);
}

static tt_tensor_list run(tu_entry *entry, tt_tensor *const *inputs) {
    tt_tensor_list none = { 0, tu_nothing };
    size_t count = (size_t)entry->captured.result_count;
    tt_tensor **results = tu_scope_memory((count + 1) * sizeof *results);
    if (results == NULL)
        return none;
    tutti_status status = tu_pending_take(explain(entry, tu_entry_run(entry, inputs, results)));
    return status == TUTTI_OK ? tt_tensors_of(count, results) : none;
}

static tutti_status check_call(const tt_compiled *compiled, tt_tensor_list inputs) {
    if (compiled == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "compiled_call: compiled is NULL");
    if (inputs.count > 0 && inputs.at == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: inputs are %zu, and their list is NULL", compiled->name,
                        inputs.count);
    if (runs_already(compiled))
        return tu_error(TUTTI_ERROR_STATE, "compiled %s calls itself; call the function that it was made from instead",
                        compiled->name);
    tutti_status status = TUTTI_OK;
    for (size_t i = 0; i < inputs.count && status == TUTTI_OK; i++)
        status = tu_tensor_check(compiled->name, "inputs", inputs.at[i]);
    return status;
}

/* What the thread does at the moment that only the operators themselves know about. */
static const char *why_eager_now(void) {
    const tu_thread *self = tu_self();
    return self->anomaly               ? "anomaly mode looks at each operator"
           : self->saved_hooks != NULL ? "saved-tensor hooks are pushed"
           : self->batch != NULL       ? "a batch of collectives is open"
           : self->recorder != NULL    ? "a recorder looks at each operator"
                                       : NULL;
}

tt_tensor_list tt_compiled_call(tt_compiled *compiled, tt_tensor_list given) {
    tt_tensor_list none = { 0, tu_nothing };
    if (tu_self()->pending != TUTTI_OK || !tu_scope_check() || tu_pending_take(check_call(compiled, given)) != TUTTI_OK)
        return none;
    if (tu_is_capturing())
        return call_itself(compiled, given);
    if (why_eager_now() != NULL)
        return call_eagerly(compiled, given, why_eager_now());
    if (is_foreign(compiled)) {
        tu_pending_take(foreign_error(compiled));
        return none;
    }
    holding inputs = { .count = 0 };
    char reason[REASON] = "";
    tu_entry *entry = find(compiled, given, &inputs, false);
    if (entry == NULL && tu_self()->pending == TUTTI_OK) {
        let_go(&inputs);
        if (tu_pending_take(begin_building(compiled)) != TUTTI_OK)
            return none;
        entry = find_or_add(compiled, given, &inputs, reason);
        end_building(compiled);
    }
    tt_tensor_list results = none;
    if (entry != NULL && entry->why_eager == NULL)
        results = run(entry, inputs.at);
    else if (entry != NULL || reason[0] != 0)
        results = call_eagerly(compiled, given, entry != NULL ? entry->why_eager : reason);
    let_go(&inputs);
    tu_entry_drop(entry);
    return results;
}

/* ---- looking ---- */

static bool is_there(const char *who, const tt_compiled *compiled) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (compiled == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: compiled is NULL", who);
    return compiled != NULL;
}

const tt_graph *tt_compiled_graph(const tt_compiled *compiled, tt_direction direction) {
    if (!is_there("compiled_graph", compiled))
        return NULL;
    if (direction != TT_FORWARD && direction != TT_BACKWARD) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "compiled_graph: direction is %d, and must be TT_FORWARD or TT_BACKWARD",
                (int)direction);
        return NULL;
    }
    pthread_mutex_t *lock = (pthread_mutex_t *)&compiled->lock; /* a lock changes nothing that the caller can see */
    pthread_mutex_lock(lock);
    const tu_entry *entry = compiled->last;
    const tt_graph *graph = entry == NULL ? NULL : direction == TT_FORWARD ? entry->forward : entry->backward;
    pthread_mutex_unlock(lock);
    return graph;
}

bool tt_compiled_count(const tt_compiled *compiled, tt_compiled_counts *counts) {
    if (compiled == NULL && !is_there("compiled_count", compiled))
        return false;
    pthread_mutex_t *lock = (pthread_mutex_t *)&compiled->lock;
    pthread_mutex_lock(lock);
    tt_compiled_counts own = compiled->counts;
    for (const tu_entry *entry = compiled->entries; entry != NULL; entry = entry->next)
        own.replays += atomic_load_explicit(&entry->replays, memory_order_relaxed);
    pthread_mutex_unlock(lock);
    tutti_status status = tu_result_copy("tt_compiled_counts", &own, sizeof own, counts);
    if (status != TUTTI_OK)
        tu_pending_take(status);
    return status == TUTTI_OK;
}

const char *tt_compiled_reason(const tt_compiled *compiled) {
    return compiled != NULL ? compiled->reason : "";
}
