/* SPDX-License-Identifier: Apache-2.0
 *
 * The part of `tutti doctor` that looks at libraries which backends load at run time: is the library there, new enough
 * and whole? Nothing fails without it that does not ask for its backend: what is missing is a note, what is there and
 * cannot be used a warning.
 */
#include <stdio.h>
#include <string.h>

#include <tutti/world.h>

#include "doctor.h"
#include "memory/backend.h"

/* How the library of a backend is had. */
static const struct {
    const char *backend, *fix;
} fixes[] = {
    { "nccl",
      "install NCCL (Debian, Ubuntu: libnccl2; Python: nvidia-nccl-cu13) and name its folder in LD_LIBRARY_PATH" },
    { "ucx", "install UCX 1.13 or newer (Debian: libucx0)" },
    { "nvshmem", "install NVSHMEM (Python: nvidia-nvshmem-cu13) and name its folder in LD_LIBRARY_PATH" },
};

static const char *fix_of(const char *backend) {
    for (size_t i = 0; i < sizeof fixes / sizeof *fixes; i++)
        if (strcmp(fixes[i].backend, backend) == 0)
            return fixes[i].fix;
    return "reinstall the library that this plug-in loads";
}

typedef struct looking {
    report *to;
    tutti_world *world;
} looking;

static void look(const char *name, void *argument) {
    const looking *looking = argument;
    const tu_backend *backend;
    int devices = 0;
    char text[1024] = "";
    if (tu_backend_find(looking->world, name, &backend) != TUTTI_OK) {
        doctor_put(looking->to, DOCTOR_WARNING, name, "install Tutti and its plug-ins from one build",
                   "the plug-in cannot be used: %s", tutti_error_message());
        return;
    }
    if (backend->describe == NULL)
        return; /* no library but the driver */
    tutti_status status = backend->probe(&tu_backend_host_table, &devices);
    if (status == TUTTI_ERROR_NOT_FOUND) {
        doctor_put(looking->to, DOCTOR_NOTE, name, NULL, "%s; nothing else needs it", tutti_error_message());
        return;
    }
    if (status == TUTTI_ERROR_BACKEND) {
        doctor_put(looking->to, DOCTOR_WARNING, name, fix_of(name), "%s", tutti_error_message());
        return;
    }
    backend->describe(&tu_backend_host_table, text, sizeof text);
    doctor_put(looking->to, DOCTOR_GOOD, name, NULL, "%s", text);
}

void doctor_libraries(report *to) {
    tutti_world_options options = TUTTI_WORLD_OPTIONS_INIT;
    looking looking = { .to = to };
    options.name = "tutti doctor";
    options.rank_count = 1;
    if (tutti_world_open(&options, &looking.world) != TUTTI_OK) {
        doctor_put(to, DOCTOR_FAILURE, "world", "tutti info shows more", "a world of one rank does not open: %s",
                   tutti_error_message());
        return;
    }
    tu_backend_list(looking.world, look, &looking);
    if (tutti_world_close(looking.world) != TUTTI_OK)
        doctor_put(to, DOCTOR_WARNING, "world", "tutti info shows more", "a world of one rank does not close: %s",
                   tutti_error_message());
}

void doctor_ucx(char *text, size_t bytes) {
    tutti_world_options options = TUTTI_WORLD_OPTIONS_INIT;
    tutti_world *world;
    const tu_backend *backend;
    int devices;
    options.name = "tutti doctor";
    options.rank_count = 1;
    snprintf(text, bytes, "no UCX that can be loaded");
    if (tutti_world_open(&options, &world) != TUTTI_OK)
        return;
    if (tu_backend_find(world, "ucx", &backend) == TUTTI_OK && backend->describe != NULL &&
        backend->probe(&tu_backend_host_table, &devices) == TUTTI_OK)
        backend->describe(&tu_backend_host_table, text, bytes);
    (void)!tutti_world_close(world);
}
