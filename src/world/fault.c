/* SPDX-License-Identifier: Apache-2.0
 *
 * Fault injection: at the entry of an operation, once, on the rank and at the call that was asked for. A world without
 * faults pays one predictable branch.
 */
#include "world/fault.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <tutti/fault.h>

#include "base/clock.h"
#include "base/error.h"

typedef enum deed {
    KILL = 1,
    STOP,
    EXIT,
    DELAY,
    SKIP_CALL,
    FAIL
} deed;

struct tu_faults {
    tu_faults *next;
    tu_operation operation; /* TU_OPERATION_NONE: any */
    int64_t at;
    deed deed;
    int64_t number;        /* nanoseconds of a delay, status of an exit */
    _Atomic int64_t calls; /* of that operation by this rank so far */
    char text[160];
};

static tutti_status parse_deed(const char *value, tu_faults *fault) {
    static const struct {
        const char *name;
        deed deed;
    } deeds[] = { { "kill", KILL },   { "stop", STOP },      { "exit", EXIT },
                  { "delay", DELAY }, { "skip", SKIP_CALL }, { "fail", FAIL } };
    size_t length = strcspn(value, ":");
    for (size_t i = 0; i < sizeof deeds / sizeof deeds[0]; i++)
        if (strlen(deeds[i].name) == length && strncmp(deeds[i].name, value, length) == 0)
            fault->deed = deeds[i].deed;
    const char *after = value[length] == ':' ? value + length + 1 : NULL;
    if (fault->deed == 0)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "TUTTI_FAULT: do=%s is unknown; there are kill, stop, exit, delay:T, skip and fail", value);
    if (fault->deed == DELAY && after == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "TUTTI_FAULT: do=delay needs a time, as in do=delay:50ms");
    if (fault->deed == DELAY)
        return tu_parse_duration(after, &fault->number);
    fault->number = 1;
    if (fault->deed == EXIT && after != NULL)
        return tu_parse_integer(after, &fault->number);
    if (after != NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "TUTTI_FAULT: do=%s takes nothing after the colon", value);
    return TUTTI_OK;
}

static tutti_status parse_item(char *item, tu_faults *fault, int64_t *rank) {
    char *value = strchr(item, '=');
    if (value == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "TUTTI_FAULT: \"%s\" is not understood; write rank=R,op=NAME,at=N,do=WHAT", item);
    *value++ = 0;
    if (strcmp(item, "rank") == 0)
        return tu_parse_integer(value, rank);
    if (strcmp(item, "at") == 0)
        return tu_parse_integer(value, &fault->at);
    if (strcmp(item, "do") == 0)
        return parse_deed(value, fault);
    if (strcmp(item, "op") != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "TUTTI_FAULT: \"%s\" is unknown; there are rank, op, at and do", item);
    fault->operation = tu_operation_find(value);
    if (fault->operation == TU_OPERATION_NONE)
        return tu_error(TUTTI_ERROR_ARGUMENT, "TUTTI_FAULT: there is no operation \"%s\"", value);
    return TUTTI_OK;
}

static tutti_status parse_fault(const char *spec, size_t length, tu_faults *fault, int64_t *rank) {
    char text[160];
    if (length >= sizeof text)
        return tu_error(TUTTI_ERROR_ARGUMENT, "TUTTI_FAULT is too long: \"%s\"", spec);
    memcpy(text, spec, length);
    text[length] = 0;
    snprintf(fault->text, sizeof fault->text, "%s", text);
    char *rest = text;
    tutti_status status = TUTTI_OK;
    for (char *item; status == TUTTI_OK && (item = strsep(&rest, ",")) != NULL;)
        status = parse_item(item, fault, rank);
    if (status == TUTTI_OK && fault->deed == 0)
        status = tu_error(TUTTI_ERROR_ARGUMENT,
                          "TUTTI_FAULT: \"%s\" does not say what to do; add do=kill, stop, exit, delay:T, skip or fail",
                          fault->text);
    if (status == TUTTI_OK && fault->at < 0)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "TUTTI_FAULT: at=%lld is negative; calls are counted from 0",
                          (long long)fault->at);
    return status;
}

tutti_status tu_faults_add(tu_faults **faults, const char *spec, const tutti_world *world) {
    while (*spec != 0) {
        size_t length = strcspn(spec, ";");
        tu_faults *fault = calloc(1, sizeof *fault);
        if (fault == NULL)
            return tu_error_memory("a fault", sizeof *fault);
        int64_t rank = -1;
        tutti_status status = length > 0 ? parse_fault(spec, length, fault, &rank) : TUTTI_OK;
        if (status == TUTTI_OK && rank >= world->size)
            status = tu_error(TUTTI_ERROR_ARGUMENT, "TUTTI_FAULT: rank=%lld, but the world has %d ranks",
                              (long long)rank, world->size);
        if (status != TUTTI_OK || length == 0 || (rank >= 0 && rank != world->rank)) {
            free(fault);
        } else {
            fault->next = *faults;
            *faults = fault;
        }
        if (status != TUTTI_OK)
            return status;
        spec += length + (spec[length] == ';');
    }
    return TUTTI_OK;
}

void tu_faults_free(tu_faults *faults) {
    while (faults != NULL) {
        tu_faults *next = faults->next;
        free(faults);
        faults = next;
    }
}

static tutti_status deliver(tutti_group *group, const tu_operation_info *info, const tu_faults *fault) {
    char operation[160];
    tu_operation_text(group, info, operation, sizeof operation);
    TU_LOG(TUTTI_LOG_WARN, group->world->log, "world",
           "injecting \"%s\" into %s on rank %d (at=N counts this rank's calls from 0)", fault->text, operation,
           group->world->rank);
    switch (fault->deed) {
    case KILL:
        raise(SIGKILL);
        break;
    case STOP:
        kill(getpid(), SIGSTOP);
        break;
    case EXIT:
        _exit((int)fault->number);
    case DELAY: {
        struct timespec left = { .tv_sec = fault->number / TU_SECOND, .tv_nsec = fault->number % TU_SECOND };
        while (nanosleep(&left, &left) != 0 && errno == EINTR)
            ;
        break;
    }
    case SKIP_CALL:
        if (!tu_operation_row_of(info->operation)->returns_object)
            return TU_FAULT_SKIP;
        tu_error(TUTTI_ERROR_FAULT,
                 "%s was skipped on rank %d because TUTTI_FAULT asked for it (\"%s\"), so there is nothing to return",
                 operation, group->rank, fault->text);
        return tu_error_where(group->name, tu_operation_name((tu_operation)info->operation), info->sequence,
                              group->rank);
    case FAIL:
        tu_error(TUTTI_ERROR_FAULT, "%s failed on rank %d because TUTTI_FAULT asked for it (\"%s\")", operation,
                 group->rank, fault->text);
        tu_error_at_fault(group->rank);
        (void)tu_error_where(group->name, tu_operation_name((tu_operation)info->operation), info->sequence,
                             group->rank);
        tu_group_end(group, info);
        return TUTTI_ERROR_FAULT;
    }
    return TUTTI_OK;
}

tutti_status tu_fault_meet(tutti_group *group, const tu_operation_info *info) {
    for (tu_faults *fault = group->world->faults; fault != NULL; fault = fault->next) {
        if (fault->operation != TU_OPERATION_NONE && fault->operation != (tu_operation)info->operation)
            continue;
        if (atomic_fetch_add_explicit(&fault->calls, 1, memory_order_relaxed) != fault->at)
            continue;
        tutti_status status = deliver(group, info, fault);
        if (status != TUTTI_OK)
            return status;
    }
    return TUTTI_OK;
}

tutti_status tutti_fault_inject(tutti_world *world, const char *faults) {
    tutti_status status = tu_world_check(world);
    if (status == TUTTI_OK && faults == NULL)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "tutti_fault_inject: the faults are NULL");
    return status == TUTTI_OK ? tu_faults_add(&world->faults, faults, world) : status;
}
