/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti info --hosts`: what it says on other hosts. All of the first one's, and of the others what differs: versions,
 * processors, backends and settings of hosts that work together should be the same.
 */
#include "info.h"

#include <stdlib.h>
#include <string.h>

#include "remote.h"
#include "tool.h"

typedef struct lines {
    char **text;
    size_t count;
} lines;

static bool add(lines *to, const char *text) {
    char **grown = realloc(to->text, (to->count + 1) * sizeof *grown);
    if (grown == NULL)
        return false;
    to->text = grown;
    to->text[to->count] = strdup(text);
    return to->text[to->count++] != NULL;
}

static void free_lines(lines *of) {
    for (size_t i = 0; i < of->count; i++)
        free(of->text[i]);
    free(of->text);
    *of = (lines){ 0 };
}

static bool has(const lines *of, const char *text) {
    for (size_t i = 0; i < of->count; i++)
        if (strcmp(of->text[i], text) == 0)
            return true;
    return false;
}

/* What `tutti info` prints there; false after saying why there is nothing. *status: its exit status. */
static bool ask(const char *host, const char *rsh, int64_t ranks, lines *said, int *status) {
    char line[4352], self[4200];
    remote_command command;
    remote_self(self, sizeof self);
    snprintf(line, sizeof line, ranks > 0 ? "%s info -n %lld" : "%s info", self, (long long)ranks);
    if (!remote_start(&command, rsh, host, line, false, false))
        return !tool_fail("cannot start %s", remote_name(rsh));
    bool kept = true;
    while (kept && remote_line(&command, line, sizeof line))
        kept = add(said, line);
    *status = remote_end(&command);
    if (kept && said->count > 0)
        return true;
    return !tool_fail(kept ? "%s says nothing of itself by %s; \"tutti doctor --hosts %s\" may say why"
                           : "out of memory for what %s says by %s (%s)",
                      host, remote_name(rsh), host);
}

/* Lines that one has and the other has not. */
static int print_difference(const char *mark, const lines *of, const lines *other) {
    int count = 0;
    for (size_t i = 0; i < of->count; i++)
        if (of->text[i][0] != '\0' && !has(other, of->text[i])) {
            printf("  %s %s\n", mark, of->text[i]);
            count++;
        }
    return count;
}

int info_hosts(const char *hosts, const char *rsh, int64_t ranks) {
    char *copy = strdup(hosts), *rest = copy;
    lines first = { 0 };
    int failed = copy == NULL ? tool_fail("out of memory for the list of hosts") : 0;
    for (const char *host; copy != NULL && (host = remote_next_host(&rest)) != NULL;) {
        lines said = { 0 };
        int status = 0;
        bool there = ask(host, rsh, ranks, &said, &status);
        failed |= !there || status != 0;
        if (there && first.count == 0) {
            printf("host %s\n", host);
            for (size_t i = 0; i < said.count; i++)
                printf("%s\n", said.text[i]);
            first = said;
            continue;
        }
        if (there) {
            printf("\nhost %s: as the first, but for\n", host);
            if (print_difference("-", &first, &said) + print_difference("+", &said, &first) == 0)
                printf("  nothing\n");
        }
        free_lines(&said);
    }
    free_lines(&first);
    free(copy);
    return failed;
}
