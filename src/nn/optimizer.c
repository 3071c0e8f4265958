/* SPDX-License-Identifier: Apache-2.0
 *
 * Optimizers over the parameters of a module.
 */
#include "nn/optimizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensor/noting.h"

/* What is different between them. */
typedef struct tu_step_kind {
    const char *name;
    const char *states[TU_STEP_STATES];
    /* `count` is the number of this step, from 1. */
    bool (*step)(const tt_optimizer *optimizer, const tu_member *member, tt_tensor *gradient, tt_tensor *count);
} tu_step_kind;

static bool step_sgd(const tt_optimizer *optimizer, const tu_member *member, tt_tensor *gradient, tt_tensor *count) {
    (void)count;
    const tu_member_group *group = &optimizer->groups[member->group];
    return tu_sgd_step(member->parameter, gradient, member->states[0], group->rate, optimizer->numbers[0],
                       group->weight_decay, NULL);
}

static bool step_adamw(const tt_optimizer *optimizer, const tu_member *member, tt_tensor *gradient, tt_tensor *count) {
    const tu_member_group *group = &optimizer->groups[member->group];
    return tu_adamw_step(member->parameter, gradient, member->states[0], member->states[1], count, group->rate,
                         optimizer->numbers[0], optimizer->numbers[1], optimizer->numbers[2], group->weight_decay,
                         NULL);
}

static const tu_step_kind sgd_kind = { "sgd_optimizer", { NULL, NULL }, step_sgd };
static const tu_step_kind momentum_kind = { "sgd_optimizer", { "velocity", NULL }, step_sgd };
static const tu_step_kind adamw_kind = { "adamw_optimizer", { "m", "v" }, step_adamw };

bool tu_optimizer_usable(const char *who, const tt_optimizer *optimizer) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (optimizer == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: optimizer is NULL", who);
    return optimizer != NULL;
}

/* ---- life ---- */

static tutti_status add_group(tt_optimizer *optimizer, double learning_rate, double weight_decay) {
    size_t bytes = ((size_t)optimizer->group_count + 1) * sizeof *optimizer->groups;
    tu_member_group *groups = realloc(optimizer->groups, bytes);
    if (groups == NULL)
        return tu_pending_take(tu_error_memory("a group of parameters", bytes));
    optimizer->groups = groups;
    tt_scope scope = tt_scope_open();
    tt_tensor *rate = tu_step_number(learning_rate);
    if (rate != NULL)
        groups[optimizer->group_count++] = (tu_member_group){ tu_tensor_hold(rate), learning_rate, weight_decay };
    tu_scope_leave(&scope);
    return tu_self()->pending;
}

static bool add_member(tt_optimizer *optimizer, tt_tensor *parameter, const char *name) {
    tu_member *member = &optimizer->members[optimizer->member_count];
    *member = (tu_member){ .name = strdup(name) };
    if (member->name == NULL) {
        tu_pending_take(tu_error_memory("a parameter's name", strlen(name) + 1));
        return false;
    }
    optimizer->member_count++;
    member->parameter = tu_tensor_hold(parameter);
    for (int i = 0; i < TU_STEP_STATES && optimizer->kind->states[i] != NULL; i++) {
        tt_tensor *zeros = tt_zeros_like(parameter);
        member->states[i] = zeros != NULL ? tu_tensor_hold(zeros) : NULL;
    }
    return tu_self()->pending == TUTTI_OK;
}

static tutti_status fill(tt_optimizer *optimizer, const tt_module *module) {
    tt_named_list parameters = tt_module_parameters(module);
    optimizer->members = calloc(parameters.count + 1, sizeof *optimizer->members);
    if (optimizer->members == NULL)
        return tu_pending_take(tu_error_memory("an optimizer", (parameters.count + 1) * sizeof *optimizer->members));
    for (size_t i = 0; i < parameters.count; i++)
        if (tt_requires_grad(parameters.at[i]) && !add_member(optimizer, parameters.at[i], parameters.names[i]))
            break;
    tt_tensor *steps = tu_step_number(0);
    optimizer->steps = steps != NULL ? tu_tensor_hold(steps) : NULL;
    if (tu_self()->pending == TUTTI_OK && optimizer->member_count == 0)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: the module has no parameter that requires grad", optimizer->kind->name);
    return tu_self()->pending;
}

static tt_optimizer *make(const tu_step_kind *kind, const tt_module *module, double learning_rate,
                          double weight_decay) {
    tt_optimizer *optimizer = calloc(1, sizeof *optimizer);
    if (optimizer == NULL) {
        tu_pending_take(tu_error_memory("an optimizer", sizeof *optimizer));
        return NULL;
    }
    atomic_init(&optimizer->references, 1);
    optimizer->kind = kind;
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    if (add_group(optimizer, learning_rate, weight_decay) == TUTTI_OK)
        fill(optimizer, module);
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
    if (tu_self()->pending == TUTTI_OK)
        return optimizer;
    tt_optimizer_release(optimizer);
    return NULL;
}

tt_optimizer *tt_sgd_optimizer(const tt_module *module, const tt_sgd *options) {
    tt_sgd full;
    if (!tu_settle_sgd(options, &full))
        return NULL;
    tt_optimizer *optimizer =
        make(full.momentum != 0 ? &momentum_kind : &sgd_kind, module, full.learning_rate, full.weight_decay);
    if (optimizer != NULL)
        optimizer->numbers[0] = full.momentum;
    return optimizer;
}

tt_optimizer *tt_adamw_optimizer(const tt_module *module, const tt_adamw *options) {
    tt_adamw full;
    if (!tu_settle_adamw(options, &full))
        return NULL;
    tt_optimizer *optimizer = make(&adamw_kind, module, full.learning_rate, full.weight_decay);
    if (optimizer != NULL) {
        optimizer->numbers[0] = full.beta1;
        optimizer->numbers[1] = full.beta2;
        optimizer->numbers[2] = full.epsilon;
    }
    return optimizer;
}

tt_optimizer *tu_optimizer_keep(tt_optimizer *optimizer) {
    atomic_fetch_add_explicit(&optimizer->references, 1, memory_order_relaxed);
    return optimizer;
}

void tt_optimizer_release(tt_optimizer *optimizer) {
    if (optimizer == NULL || atomic_fetch_sub_explicit(&optimizer->references, 1, memory_order_acq_rel) != 1)
        return;
    for (size_t i = 0; i < optimizer->member_count; i++) {
        tu_member *member = &optimizer->members[i];
        tu_tensor_drop(member->parameter);
        for (int k = 0; k < TU_STEP_STATES; k++)
            tu_tensor_drop(member->states[k]);
        free(member->name);
    }
    for (int i = 0; i < optimizer->group_count; i++)
        tu_tensor_drop(optimizer->groups[i].rate);
    tu_tensor_drop(optimizer->steps);
    tu_step_batch_free(&optimizer->batch);
    free(optimizer->members);
    free(optimizer->groups);
    free(optimizer);
}

/* ---- groups ---- */

static tu_member *member_of(const tt_optimizer *optimizer, const tt_tensor *parameter) {
    for (size_t i = 0; i < optimizer->member_count; i++)
        if (optimizer->members[i].parameter == parameter)
            return &optimizer->members[i];
    return NULL;
}

static bool has_all(const tt_optimizer *optimizer, tt_tensor_list parameters) {
    if (parameters.count > 0 && parameters.at == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "optimizer_add_group: the list of %zu parameters is NULL", parameters.count);
        return false;
    }
    for (size_t i = 0; i < parameters.count; i++) {
        if (tu_pending_take(tu_tensor_check("optimizer_add_group", "parameter", parameters.at[i])) != TUTTI_OK)
            return false;
        if (member_of(optimizer, parameters.at[i]) == NULL) {
            tu_fail(TUTTI_ERROR_NOT_FOUND, "optimizer_add_group: the optimizer does not have the parameter %s",
                    tu_describe(parameters.at[i]));
            return false;
        }
    }
    return true;
}

int tt_optimizer_add_group(tt_optimizer *optimizer, tt_tensor_list parameters, const tt_parameter_group *options) {
    tt_parameter_group full = TT_PARAMETER_GROUP_INIT;
    if (!tu_optimizer_usable("optimizer_add_group", optimizer) ||
        tu_pending_take(tu_options_copy("tt_parameter_group", options, &full, sizeof full)) != TUTTI_OK ||
        !tu_settle("tt_parameter_group", "learning_rate", &full.learning_rate, optimizer->groups[0].base_rate,
                   HUGE_VAL) ||
        !tu_settle("tt_parameter_group", "weight_decay", &full.weight_decay, optimizer->groups[0].weight_decay,
                   HUGE_VAL) ||
        !has_all(optimizer, parameters) || add_group(optimizer, full.learning_rate, full.weight_decay) != TUTTI_OK)
        return TUTTI_NONE;
    for (size_t i = 0; i < parameters.count; i++)
        member_of(optimizer, parameters.at[i])->group = optimizer->group_count - 1;
    return optimizer->group_count - 1;
}

int tt_optimizer_group_count(const tt_optimizer *optimizer) {
    return optimizer != NULL ? optimizer->group_count : 0;
}

/* ---- steps ---- */

/* The gradients of all members, NULL where there is none; NULL with the pending error set where no member has one. */
static tt_tensor **gradients_of(const tt_optimizer *optimizer) {
    tt_tensor **gradients = tu_scope_memory(optimizer->member_count * sizeof *gradients);
    bool some = false;
    for (size_t i = 0; i < optimizer->member_count && gradients != NULL; i++) {
        gradients[i] = tt_grad(optimizer->members[i].parameter);
        some = some || gradients[i] != NULL;
    }
    if (!some && tu_self()->pending == TUTTI_OK)
        tu_fail(TUTTI_ERROR_STATE,
                "optimizer_step: none of %zu parameters has a gradient, neither the first, %s: no backward has reached "
                "them since their gradients were removed, or the module has others by now: tt_fully_shard comes before "
                "the optimizer",
                optimizer->member_count, tu_describe(optimizer->members[0].parameter));
    return tu_self()->pending == TUTTI_OK ? gradients : NULL;
}

/* Whether the data is there. It is not waited for: that is the operators' part. */
static bool has_data(const char *what, const tt_tensor *x) {
    if (x->device == TUTTI_META || tu_tensor_need(x) <= x->storage->bytes)
        return true;
    return tu_pending_take(tu_tensor_ready("optimizer_step", what, x)) == TUTTI_OK;
}

/* What was freed is found before anything is computed. While a function is captured, the recorder looks after it. */
static bool have_data(const tt_optimizer *optimizer, tt_tensor *const *gradients) {
    bool good = true;
    for (size_t i = 0; i < optimizer->member_count && good && tu_self()->recorder == NULL; i++) {
        const tu_member *member = &optimizer->members[i];
        if (gradients[i] == NULL)
            continue;
        good = has_data("parameter", member->parameter) && has_data("gradient", gradients[i]);
        for (int k = 0; k < TU_STEP_STATES && member->states[k] != NULL && good; k++)
            good = has_data(optimizer->kind->states[k], member->states[k]);
    }
    return good;
}

static void step_members(tt_optimizer *optimizer, tt_tensor *const *gradients, tt_tensor *count) {
    tu_step_batch_open(&optimizer->batch);
    for (size_t i = 0; i < optimizer->member_count && tu_self()->pending == TUTTI_OK; i++)
        if (gradients[i] != NULL)
            optimizer->kind->step(optimizer, &optimizer->members[i], gradients[i], count);
    tu_pending_take(tu_step_batch_close(&optimizer->batch, tu_self()->pending == TUTTI_OK));
}

/* What a noted step does with the count at each run: first the number of the step, and behind it the count itself. */
typedef struct noted_count {
    tu_noted_act act;         /* first */
    tt_tensor *from, *number; /* f64; held. The same: it is counted */
} noted_count;

static tutti_status count_again(tu_noted_act *act) {
    const noted_count *noted = (const noted_count *)act;
    *(double *)tu_pointer(noted->number) = *(const double *)tu_pointer(noted->from) + 1;
    tu_bump(noted->number);
    return TUTTI_OK;
}

static void end_count(tu_noted_act *act) {
    noted_count *noted = (noted_count *)act;
    tu_tensor_drop(noted->from);
    tu_tensor_drop(noted->number);
    free(noted);
}

static void note_count(tt_tensor *from, tt_tensor *number) {
    noted_count *made = malloc(sizeof *made);
    if (made == NULL) {
        tu_pending_take(tu_error_memory("a count of a replay", sizeof *made));
        return;
    }
    *made = (noted_count){ { .run = count_again, .end = end_count }, tu_tensor_hold(from), tu_tensor_hold(number) };
    tu_noted_add(tu_noting_here(), &made->act);
}

/* The count of steps rises by one; where the step is noted, at each run and not now. */
static void count_step(tt_tensor *steps, bool noted) {
    if (!noted)
        tt_add_scalar_(steps, 1); /* not after an error */
    else if (tu_self()->pending == TUTTI_OK)
        note_count(steps, steps);
}

bool tt_optimizer_step(tt_optimizer *optimizer) {
    if (!tu_optimizer_usable("optimizer_step", optimizer))
        return false;
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    bool noted = tu_noting_here() != NULL && !tu_is_capturing();
    tt_tensor **gradients = gradients_of(optimizer), *count = NULL;
    if (gradients != NULL && have_data(optimizer, gradients))
        count = tt_add_scalar(optimizer->steps, 1);
    if (count != NULL && noted)
        note_count(optimizer->steps, count);
    if (count != NULL) {
        step_members(optimizer, gradients, count);
        count_step(optimizer->steps, noted);
    }
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
    return tu_self()->pending == TUTTI_OK;
}

void tt_optimizer_zero_grad(tt_optimizer *optimizer) {
    if (!tu_optimizer_usable("optimizer_zero_grad", optimizer))
        return;
    for (size_t i = 0; i < optimizer->member_count; i++)
        tt_set_grad(optimizer->members[i].parameter, NULL);
}

/* ---- what it remembers ---- */

tt_tensor *tt_optimizer_steps(const tt_optimizer *optimizer) {
    return tu_optimizer_usable("optimizer_steps", optimizer) ? tu_scope_own(tu_tensor_hold(optimizer->steps)) : NULL;
}

tt_tensor *tt_optimizer_learning_rate(const tt_optimizer *optimizer, int group) {
    if (!tu_optimizer_usable("optimizer_learning_rate", optimizer))
        return NULL;
    if (group < 0 || group >= optimizer->group_count) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "optimizer_learning_rate: there is no group %d; they count from 0 to %d", group,
                optimizer->group_count - 1);
        return NULL;
    }
    return tu_scope_own(tu_tensor_hold(optimizer->groups[group].rate));
}

typedef struct listing {
    size_t count;
    tt_tensor **tensors;
    const char **names;
} listing;

static void list_one(listing *list, tt_tensor *tensor, const char *prefix, const char *name) {
    if (tu_self()->pending != TUTTI_OK)
        return;
    size_t bytes = strlen(prefix) + strlen(name) + 2;
    char *text = tu_scope_memory(bytes);
    if (text == NULL)
        return;
    snprintf(text, bytes, "%s%s%s", prefix, name[0] != 0 ? "." : "", name);
    list->names[list->count] = text;
    list->tensors[list->count++] = tu_scope_own(tu_tensor_hold(tensor));
}

tt_named_list tt_optimizer_state(const tt_optimizer *optimizer) {
    tt_named_list none = { 0, tu_nothing, tu_no_names };
    if (!tu_optimizer_usable("optimizer_state", optimizer))
        return none;
    size_t most = 1 + (size_t)optimizer->group_count + TU_STEP_STATES * optimizer->member_count;
    listing list = { 0, tu_scope_memory(most * sizeof *list.tensors), tu_scope_memory(most * sizeof *list.names) };
    if (list.tensors == NULL || list.names == NULL)
        return none;
    list_one(&list, optimizer->steps, "step", "");
    for (int i = 0; i < optimizer->group_count; i++) {
        char number[16];
        snprintf(number, sizeof number, "%d", i);
        list_one(&list, optimizer->groups[i].rate, "learning_rate", number);
    }
    for (size_t i = 0; i < optimizer->member_count; i++)
        for (int k = 0; k < TU_STEP_STATES && optimizer->kind->states[k] != NULL; k++)
            list_one(&list, optimizer->members[i].states[k], optimizer->kind->states[k], optimizer->members[i].name);
    return tu_self()->pending == TUTTI_OK ? (tt_named_list){ list.count, list.tensors, list.names } : none;
}
