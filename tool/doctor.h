/* SPDX-License-Identifier: Apache-2.0
 *
 * What the checks of `tutti doctor` share.
 */
#ifndef TUTTI_TOOL_DOCTOR_H
#define TUTTI_TOOL_DOCTOR_H

#include <stdbool.h>
#include <stddef.h>

#include <tutti/export.h>

typedef enum level {
    DOCTOR_GOOD,
    DOCTOR_NOTE,
    DOCTOR_WARNING,
    DOCTOR_FAILURE
} level;

typedef struct report {
    bool json, verbose, colour, strict;
    int ranks;
    int count[4];
} report;

/* One finding. */
void doctor_put(report *to, level found, const char *subject, const char *fix, const char *format, ...)
    TUTTI_PRINTF(5, 6);

/* Checks a comma list of hosts, as tutti run --hosts takes it. */
void doctor_hosts(report *to, const char *hosts, const char *rsh);
/* The other end of it: whether a port of another host can be reached from here. */
int doctor_reach(const char *host, int port);

/* Whether the libraries that backends load are there, new enough and whole: doctor_libraries.c. */
void doctor_libraries(report *to);
/* "UCX 1.13.1", or that there is none: what messages to other hosts go by. */
void doctor_ucx(char *text, size_t bytes);

#endif
