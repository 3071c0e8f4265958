/* SPDX-License-Identifier: Apache-2.0
 *
 * What libtutti lends to a backend: the functions behind tu_backend_host.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "job/liveness.h"
#include "memory/tables.h"

static void host_log(tutti_world *world, tutti_log_level level, const char *backend, const char *format, ...) {
    tu_log *log = world == NULL ? NULL : world->log;
    if (!tu_log_wants(log, level, "backend"))
        return;
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    tu_log_write(log, level, "backend", "%s: %s", backend, text);
}

/* TU_SETTING_COUNT: there is none of that name. */
static tu_setting find_setting(const char *name) {
    int i = 0;
    while (i < TU_SETTING_COUNT && strcmp(tu_setting_rows[i].environment, name) != 0)
        i++;
    return (tu_setting)i;
}

static const char *host_setting(tutti_world *world, const char *name) {
    tu_setting setting = find_setting(name);
    return setting != TU_SETTING_COUNT ? tu_settings_text(&world->settings, setting) : NULL;
}

static int64_t host_setting_number(tutti_world *world, const char *name) {
    tu_setting setting = find_setting(name);
    return setting != TU_SETTING_COUNT ? tu_settings_number(&world->settings, setting) : 0;
}

static const _Atomic uint64_t *host_group_state(tutti_group *group) {
    return &group->page->state;
}

static void host_group_end(tutti_group *group) {
    tu_group_end(group, NULL);
}

static int64_t host_timeout(tutti_group *group, int64_t call_timeout_ns) {
    int64_t timeout_ns = 0;
    if (tu_timeout_choose(NULL, call_timeout_ns, group->timeout_ns, group->world->timeout_ns, &timeout_ns) != TUTTI_OK)
        return -1;
    return timeout_ns;
}

static tutti_status host_exchange(tutti_group *group, const char *purpose, const void *payload, size_t bytes, int fd,
                                  int64_t deadline, void *payloads, int *fds) {
    tu_operation_info info = { .operation = TU_OPERATION_RENDEZVOUS, .root = -1, .group_key = group->key };
    return tu_group_exchange_descriptors(group, &info, purpose, payload, bytes, fd, deadline, payloads, fds);
}

static const char *host_operation_name(uint32_t operation) {
    return tu_operation_name((tu_operation)operation);
}

static uint32_t host_operation_find(const char *name) {
    return (uint32_t)tu_operation_find(name);
}

static tutti_status host_group_look(tutti_group *group) {
    if (group->world->fake || tu_group_ended(group))
        return TUTTI_OK;
    for (int member = 0; member < group->size; member++) {
        /* One that closed its world may have enqueued all it had to; one that died may not. */
        if (member == group->rank || group->job_ranks[member] < 0 ||
            tu_rank_probe(group->world->job, group->job_ranks[member]) != TU_RANK_DEAD)
            continue;
        char doing[128];
        snprintf(doing, sizeof doing, "while group %s was in use on a GPU", group->name);
        tutti_status status = tu_death_error(group->world->job, group->job_ranks[member], doing);
        tu_error_at_fault(member);
        tu_group_end(group, NULL);
        return status;
    }
    return TUTTI_OK;
}

const tu_backend_host tu_backend_host_table = {
    .size = sizeof(tu_backend_host),
    .version = TU_BACKEND_VERSION,
    .error = tu_error,
    .error_system = tu_error_system,
    .error_append = tu_error_append,
    .error_at_fault = tu_error_at_fault,
    .log = host_log,
    .now = tu_clock_now,
    .setting = host_setting,
    .setting_number = host_setting_number,
    .exchange = host_exchange,
    .local_rank = tutti_world_local_rank,
    .local_size = tutti_world_local_size,
    .group_rank = tutti_group_rank,
    .group_size = tutti_group_size,
    .group_name = tutti_group_name,
    .operation_name = host_operation_name,
    .operation_find = host_operation_find,
    .group_look = host_group_look,
    .group_state = host_group_state,
    .group_cause = tu_group_cause,
    .group_end = host_group_end,
    .timeout = host_timeout,
    .error_message = tutti_error_message,
};
