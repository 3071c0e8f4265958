/* SPDX-License-Identifier: Apache-2.0 */
#include "machine.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

bool machine_first_line(const char *path, char *text, size_t bytes) {
    FILE *file = fopen(path, "re");
    bool here = file != NULL && fgets(text, (int)bytes, file) != NULL;
    if (file != NULL)
        fclose(file);
    text[here ? strcspn(text, "\n") : 0] = '\0';
    return here;
}

bool machine_line_of(const char *path, const char *key, char *text, size_t bytes) {
    char line[512];
    bool found = false;
    FILE *file = fopen(path, "re");
    text[0] = '\0';
    while (file != NULL && !found && fgets(line, sizeof line, file) != NULL) {
        const char *colon = strchr(line, ':');
        found = colon != NULL && strncmp(line, key, strlen(key)) == 0;
        if (!found)
            continue;
        const char *value = colon + 1 + strspn(colon + 1, " \t");
        snprintf(text, bytes, "%.*s", (int)strcspn(value, "\n"), value);
    }
    if (file != NULL)
        fclose(file);
    return found;
}

void machine_processor(char *text, size_t bytes) {
    if (!machine_line_of("/proc/cpuinfo", "model name", text, bytes))
        snprintf(text, bytes, "unknown processor");
}

int machine_nodes(void) {
    int nodes = 0;
    char path[64];
    do
        snprintf(path, sizeof path, "/sys/devices/system/node/node%d", nodes);
    while (access(path, F_OK) == 0 && nodes++ < 1024);
    return nodes > 0 ? nodes : 1;
}

int machine_gpus(void) {
    int gpus = 0;
    char path[64];
    for (int i = 0; i < 64; i++) {
        snprintf(path, sizeof path, "/dev/nvidia%d", i);
        gpus += access(path, F_OK) == 0;
    }
    return gpus;
}
