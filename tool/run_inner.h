/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the launcher share: run.c (arguments, and the order of things), run_environment.c (what the ranks
 * are given), run_watch.c (the loop that relays and tells until the last rank has ended).
 */
#ifndef TUTTI_TOOL_RUN_INNER_H
#define TUTTI_TOOL_RUN_INNER_H

#include <time.h>

#include <tutti/store.h>

#include "agent.h"
#include "hosts/news.h"
#include "run.h"
#include "tool.h"

#define MAX_RANKS 65535
#define NOT_FOUND 127
#define NOT_EXECUTABLE 126

typedef struct run_launcher {
    run_options options;
    run_plan plan;
    run_state *state;
    output *output;
    tutti_store *store;
    tu_secret secret; /* of the job; none on a network that is trusted */
    agent *agent;     /* NULL: one host */
    tu_news *news;    /* on one host, where ranks may die while others open their worlds (--survive); else NULL */
    bool silent;      /* the command that started this one by --hosts tells the user */
    pid_t guardian;
    int socket;  /* to the guardian */
    int signals; /* signalfd */
    int relay;   /* write end of rank 0's input when a terminal is relayed, else -1 */
    bool relay_full;
    char typed[4096];
    size_t typed_bytes, typed_written;
    char *log_dir; /* the whole path of --log-dir, or NULL */
    time_t began;
    long memory_kills; /* on this host before the job began */
    bool told_first, told_stopping;
    bool ending;      /* the user has sent a signal that ends */
    int ended_by;     /* the first of them */
    bool ended_twice; /* and it came again, which kills */
    bool from_terminal, told_outside;
    bool *told;        /* [rank of the job]: its end */
    uint32_t *refills; /* [rank]: newcomers that were told */
    bool *over;        /* [rank]: those that may wait for a newcomer know that none comes */
} run_launcher;

/* ---- run.c ---- */

/* Tells what failed and errno; returns the exit status. */
int run_system_error(const char *what);

/* ---- run_environment.c ---- */

typedef struct job_variables {
    int size, nodes, node; /* 0 nodes: one host */
    const char *store, *master;
    int master_port;
    bool secret;
} job_variables;

/* Where the shell would find the program; 0, NOT_FOUND or NOT_EXECUTABLE, and then the error was printed. */
int run_find_program(const char *name, char *path, size_t bytes);
/* What the ranks find in their environment; the texts are freed with the plan. */
bool run_build_environment(run_plan *plan, const job_variables *job);
/* Soft limits up to the hard ones, as far as it makes sense: a job of many ranks needs many descriptors. */
void run_raise_limits(void);
/* A socket that listens already, so that ranks may come before the store is up; its address into `url`. -1: errno. */
int run_listen_for_store(char *url, size_t bytes);
/* The secret in a sealed memfd, readable through as many descriptors as there are ranks. -1: errno. */
int run_keep_secret(const tu_secret *secret);
/* The secret of a file, or with "-" of the first line of the standard input. 0, or the exit status: it was told. Spaces
 * and newlines at its end do not count. */
int run_read_secret(const char *file_name, tu_secret *secret);

/* ---- run_watch.c ---- */

/* How many processes the kernel has killed for want of memory, ever; -1 unknown. */
long run_memory_kills(void);
/* Nobody takes our output; for output_open. Signals get through all the same, and when one of them has ended the job,
 * what is left of the output is given up, as it would be without us. */
bool run_held_up(void *launcher);
/* Until everything has ended. Returns false when the guardian vanished without a word. */
bool run_relay_everything(run_launcher *launcher);
/* After the last word of the guardian, or its death: tells what is left to tell; returns the exit status. */
int run_finish(run_launcher *launcher, bool guarded);

#endif
