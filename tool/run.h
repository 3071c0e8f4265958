/* SPDX-License-Identifier: Apache-2.0
 *
 * The parts of `tutti run`.
 *
 *     launcher (run.c)      reads the ranks' output (output.c), relays input and signals, hosts the store, tells
 *        └── guardian       (guardian.c) starts the ranks, reaps everything below it, decides who failed first,
 *              ├── rank 0   stops the others, publishes exit statuses, keeps flight recorders; when the launcher is
 *              └── rank 1   gone it kills all descendants
 *
 * The guardian is a child subreaper: grandchildren whose parents end become its children. Ranks die with it
 * (PDEATHSIG); the launcher is a subreaper too, for the case that the guardian is killed.
 */
#ifndef TUTTI_TOOL_RUN_H
#define TUTTI_TOOL_RUN_H

#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "topology.h"

typedef struct run_options {
    int ranks;
    binding_policy binding;
    bool show_binding;
    bool quiet;
    bool survive;
    int refill; /* newcomers that may take the places of ranks that died, in all */
    int64_t grace_ns;
    const char *log_dir; /* NULL: none */
    char **program;      /* arguments, the name first; NULL-terminated */
    /* Several hosts: */
    int nodes, node;         /* 0 nodes: this host alone */
    const char *meet;        /* HOST:PORT */
    const char *secret_file; /* NULL: none; "-": the first line of the standard input (started by --hosts) */
    const char *hosts, *rsh; /* --hosts */
    int first_rank;          /* of this host's; known when the hosts have met */
} run_options;

/* Shared between launcher and guardian, in anonymous shared memory. The guardian writes all but `signals`. */
typedef struct run_rank {
    _Atomic int32_t pid;         /* 0 before it was started */
    _Atomic int32_t wait_status; /* valid once `ended` is not 0 */
    _Atomic uint32_t ended;   /* 0 while it runs; else the how-manyeth to end, from 1. Release, pairs with acquire. */
    _Atomic uint32_t stopped; /* signal with which the guardian stopped it, or 0 */
    /* Of the last process that a newcomer replaced; complete before `refills` grows. Release, pairs with acquire. */
    _Atomic int32_t lost_pid, lost_status;
    _Atomic uint32_t refills;
} run_rank;

typedef struct run_state {
    _Atomic uint32_t first_failure;  /* rank + 1; 0 none. Release. */
    _Atomic uint32_t first_suffered; /* that one failed because another had died; before first_failure */
    _Atomic uint32_t stopping;       /* the others' moment is over */
    _Atomic uint32_t done;           /* everything has ended. Release. */
    _Atomic uint32_t left_over;      /* descendants of ranks that outlived them and were killed */
    _Atomic int32_t start_error;     /* errno: a rank could not be started */
    _Atomic int32_t start_rank;
    run_rank ranks[];
} run_state;

#define RUN_VARIABLES 24 /* that are added to the environment, at most */

/* What the guardian needs to start the ranks. */
typedef struct run_plan {
    const run_options *options;
    const char *path;         /* of the program */
    const char *log_dir;      /* the whole path of --log-dir, or NULL */
    char **environment;       /* of all ranks; the variables of one rank are buffers that are rewritten for each */
    char *rank_variables[4];  /* those buffers: RANK=, LOCAL_RANK=, TUTTI_RANK=, TUTTI_LOCAL_RANK= */
    char *refill_variable;    /* and TUTTI_REFILL=; NULL without --refill */
    char *own[RUN_VARIABLES]; /* texts made for it */
    int own_count;
    const binding *bindings; /* one per rank; NULL: not bound */
    int (*pipes)[2];         /* [2 * rank + stream]: read end, write end */
    int input;               /* what rank 0 reads */
    int secret;              /* memfd with the job's secret, or -1 */
    int store;               /* listening socket of the store, the launcher's; -1: another host has it */
    int news;                /* descriptor of the news page (hosts/news.h), or -1 */
    struct tu_news *page;    /* the same page; NULL: one host */
    int64_t silence_ns;      /* how long the launcher may be silent on it */
    int woken;               /* eventfd that the guardian writes when something is new, or -1 */
    const sigset_t *signals; /* the mask that ranks start with */
} run_plan;

#define RUN_SECRET_FD 3 /* where ranks find the secret */
#define RUN_NEWS_FD 4   /* and the news page */

#define RUN_STOP 0x10000 /* to the guardian: the others' failure is known, stop the ranks after their moment */

/* Whether a signal is one of those that are passed on. */
bool run_forwards(int signal_number);
/* Whether it asks a job to end. */
bool run_ends(int signal_number);
/* A port of this host that nobody uses now, for PyTorch. */
int run_free_port(void);
/* Starts agents on hosts by ssh or the like, and relays what they say: --hosts. */
int run_on_hosts(const run_options *options);

/* Becomes the guardian: never returns. `launcher` is a SEQPACKET socket: each message from there is an int, a signal
 * to forward or RUN_STOP; each from here is a byte that says "look at the state". */
_Noreturn void guardian_main(const run_plan *plan, run_state *state, int launcher);

/* Kills all descendants of the calling process, which must be a subreaper, and reaps them; returns how many there
 * were. */
int kill_descendants(void);

/* ---- output.c ---- */

typedef struct output output;

/* Takes the read ends of the pipes. While nobody takes our own output, held_up(argument) is called now and then, and
 * when there is something to read in `signals`; it returns true to give that output up. NULL when there is no memory or
 * a log file cannot be made; the error was printed. */
output *output_open(const run_options *options, int (*pipes)[2], int signals, bool (*held_up)(void *argument),
                    void *argument);

/* Adds the streams that are still open to `polled`, at most 2 * ranks; returns how many. */
struct pollfd;
int output_poll(const output *output, struct pollfd *polled);
/* Reads what poll(2) found. */
void output_read(output *output, const struct pollfd *polled, int count);
/* Milliseconds until the beginning of a line is to be shown on the terminal, -1 for none; and showing those that are
 * due. */
int output_timeout(const output *output);
void output_show_prompts(output *output);
/* The user has typed a line, whose echo has moved the cursor to a new one. */
void output_answered(output *output);
/* Reads what is there now, of one rank or of all (-1), without waiting. */
void output_drain(output *output, int rank);
/* A line of the launcher's own, to standard error, with the same patience: it never holds up signals. NULL output: it
 * is over, and the line is written at once. */
void output_tell(output *output, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Writes what is left, incomplete lines too, and frees. */
void output_close(output *output);

/* ---- run.c and run_watch.c, for hosts.c ---- */

/* Blocks the signals that are passed on, SIGCHLD and SIGPIPE; *ours: those to read from a signalfd. */
void run_block_signals(sigset_t *before, sigset_t *ours);
/* Only the foreground may read from a terminal; in the background a read would stop us. */
bool run_may_read_terminal(void);

#endif
