/* SPDX-License-Identifier: Apache-2.0
 *
 * Flight recorders of other hosts. `tutti trace --serve` runs there and answers line by line:
 *
 *     clock           clock NS                        its clock now
 *     copy PREFIX     flight STATE CPU BYTES          one for each rank of the running jobs whose id begins so, then
 * the …                               recorder as in its file (job/dump.h); STATE is the letter of end /proc/PID/stat,
 * or -
 *
 * Clocks of hosts differ. A question and its answer bracket the moment at which the other clock was read: of many the
 * quickest tells the difference best, to half of what it took.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "flight.h"
#include "json.h"
#include "remote.h"
#include "tool.h"

#define QUESTIONS 32
#define MOST_BYTES ((size_t)1 << 28) /* of one recorder */

/* ---- the answering side ---- */

int flight_serve(void) {
    char line[256];
    setvbuf(stdout, NULL, _IOFBF, 1 << 16);
    while (fgets(line, sizeof line, stdin) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        if (strcmp(line, "clock") == 0) {
            printf("clock %" PRId64 "\n", tu_clock_now());
        } else if (strncmp(line, "copy ", 5) == 0) {
            if (flight_write_live(stdout, line + 5))
                return 1;
            puts("end");
        } else {
            return tool_fail("trace --serve: \"%s\" is no question", line);
        }
        fflush(stdout);
    }
    return 0;
}

/* ---- the asking side ---- */

static bool measure_clock(remote_command *command, flight_clock *clock) {
    clock->error_ns = INT64_MAX;
    for (int i = 0; i < QUESTIONS; i++) {
        char line[64];
        int64_t before = tu_clock_now(), theirs;
        if (!remote_say(command, "clock\n") || !remote_line(command, line, sizeof line) ||
            sscanf(line, "clock %" SCNd64, &theirs) != 1)
            return false;
        int64_t after = tu_clock_now(), error = (after - before) / 2;
        if (error >= clock->error_ns)
            continue;
        clock->error_ns = error;
        clock->ahead_ns = theirs - (before + error);
    }
    return true;
}

static int add_text(flight_list *list, char *text, size_t bytes, const flight_clock *clock, char state, int cpu) {
    char problem[160];
    json *from = json_parse(text, bytes, problem, sizeof problem);
    if (from == NULL)
        return tool_fail("%s sent a recorder that is not JSON: %s", clock->host, problem);
    int failed = flight_add_json(list, from, clock, state, cpu);
    json_free(from);
    return failed;
}

static int copy_recorders(remote_command *command, flight_list *list, const char *prefix, const flight_clock *clock) {
    char line[300], state;
    snprintf(line, sizeof line, "copy %.200s\n", prefix);
    if (!remote_say(command, line))
        return tool_fail("%s does not answer", clock->host);
    while (remote_line(command, line, sizeof line)) {
        int cpu;
        size_t bytes;
        if (strcmp(line, "end") == 0)
            return 0;
        if (sscanf(line, "flight %c %d %zu", &state, &cpu, &bytes) != 3 || bytes > MOST_BYTES)
            break;
        char *text = malloc(bytes + 1);
        if (text == NULL)
            return tool_fail("out of memory for a flight recorder of %s", clock->host);
        bool whole = remote_bytes(command, text, bytes);
        text[bytes] = '\0';
        int failed = whole ? add_text(list, text, bytes, clock, state, cpu)
                           : tool_fail("%s sent a part of a recorder", clock->host);
        free(text);
        if (failed)
            return failed;
    }
    return tool_fail("%s says what cannot be understood: is its tutti of another version? (%s)", clock->host, line);
}

static int ask_host(flight_list *list, const char *rsh, const char *prefix, flight_clock *clock) {
    char line[4300], self[4200];
    remote_command command;
    remote_self(self, sizeof self);
    snprintf(line, sizeof line, "%s trace --serve", self);
    if (!remote_start(&command, rsh, clock->host, line, true, false))
        return tool_fail("cannot start %s", remote_name(rsh));
    int failed = 0;
    if (!measure_clock(&command, clock))
        failed = tool_fail("%s cannot be asked by %s; \"tutti doctor --hosts %s\" may say why", clock->host,
                           remote_name(rsh), clock->host);
    else
        failed = copy_recorders(&command, list, prefix, clock);
    (void)remote_end(&command);
    return failed;
}

int flight_add_hosts(flight_list *list, const char *hosts, const char *rsh, const char *prefix, flight_clock *clocks,
                     int room, int *count) {
    char *copy = strdup(hosts), *rest = copy;
    int failed = copy == NULL ? tool_fail("out of memory for the list of hosts") : 0;
    *count = 0;
    for (const char *host; !failed && *count < room && (host = remote_next_host(&rest)) != NULL;) {
        flight_clock *clock = &clocks[(*count)++];
        snprintf(clock->host, sizeof clock->host, "%s", host);
        failed = ask_host(list, rsh, prefix, clock);
    }
    free(copy);
    return failed;
}
