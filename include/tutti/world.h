/* SPDX-License-Identifier: Apache-2.0
 *
 * Worlds: all ranks of a job, and how a program joins one.
 *
 *     static tutti_status rank_main(tutti_world *world, void *argument) {
 *         printf("rank %d of %d\n", tutti_world_rank(world), tutti_world_size(world));
 *         return TUTTI_OK;
 *     }
 *     int main(void) { return tutti_main(4, rank_main, NULL); }
 *
 * A world belongs to one rank; its calls may come from any thread. Several worlds may live in one process.
 */
#ifndef TUTTI_WORLD_H
#define TUTTI_WORLD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tutti/log.h>
#include <tutti/status.h>
#include <tutti/store.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tutti_world tutti_world;
typedef struct tutti_group tutti_group;

/* Every setting can be given here and then wins over the environment. */
typedef struct tutti_world_options {
    size_t size;
    const char *name; /* of the world; NULL: "default". The same name open twice in one rank is an error. */
    int rank;         /* this one, with rank_count; without it 0 */
    int rank_count;   /* 0: rank and number of ranks come from the environment */
    tutti_store
        *store; /* where the ranks meet; NULL: from the environment. With it, rank and rank_count are required. */
    const char *store_url; /* "unix:@name", "tcp://host:port", "file:///path"; NULL: from the environment. Rank 0 serves
                            * the first two, unless somebody does already. */
    int64_t timeout_ns;    /* of opening, and default of everything in this world; 0: TUTTI_TIMEOUT, else 300 s */
    int threads; /* that may compute inside a call besides the caller's; TUTTI_NONE: none; 0: TUTTI_THREADS, else the
                    rank's share of cores */
    const char *log; /* as TUTTI_LOG */
    tutti_log_callback *log_callback;
    void *log_user;
    const char *settings; /* any others, "TUTTI_SPIN=100,TUTTI_HUGE_PAGES=no" */
} tutti_world_options;
#define TUTTI_WORLD_OPTIONS_INIT TUTTI_DEFAULTS(tutti_world_options)
/* TUTTI_WORLD_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_world_options_init(tutti_world_options *options, size_t size);

/* Joins the job and waits, bounded, for all its ranks. With NULL, or with rank_count 0, the launch environment decides:
 * inside tutti_spawn, then `tutti run`, torchrun, Open MPI, Hydra (MPICH), Slurm; with none of them a world of one rank
 * opens. An incomplete or contradictory set of variables is an error that names the variable; the log (info) says which
 * launcher was found. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_world_open(const tutti_world_options *options, tutti_world **world);

/* Local: waits for nobody and always says goodbye to the peers. It takes nothing back: the others complete collectives
 * in which this rank has done its part, and receive what it has sent; only what they still need from it afterwards is
 * TUTTI_ERROR_GONE. With live handles (groups, memory, works) it also returns TUTTI_ERROR_STATE listing them; their
 * memory goes with their last release. An earlier error of the calling thread, or what ended a group of the world,
 * stays in the message, in front of that list. What a getter lent, used after the close, is an error. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_world_close(tutti_world *world);

/* Leaves together: waits until every rank of the world that lives has called it, then closes the world as
 * tutti_world_close does, whatever came of the wait. A rank that closed or died meanwhile is not waited for. timeout_ns
 * 0: the world's. Ranks that live and do not come until then are TUTTI_ERROR_TIMEOUT, by name. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_world_finish(tutti_world *world, int64_t timeout_ns);

/* This rank, from 0. */
TUTTI_API int tutti_world_rank(const tutti_world *world);
/* How many ranks the world has. */
TUTTI_API int tutti_world_size(const tutti_world *world);
TUTTI_API int tutti_world_local_rank(const tutti_world *world); /* among the ranks of this host */
/* How many ranks this host has. */
TUTTI_API int tutti_world_local_size(const tutti_world *world);
/* Its name, as the options gave it. Lent. */
TUTTI_API const char *tutti_world_name(const tutti_world *world);
/* How this world was found: "options", "spawn", "tutti run", "torchrun", "Open MPI", "Hydra", "Slurm", "alone" or
 * "fake". */
TUTTI_API const char *tutti_world_launcher(const tutti_world *world);
/* The group of all ranks; lent, valid while the world lives. */
TUTTI_API tutti_group *tutti_world_group(const tutti_world *world);
/* The world's store, under a prefix of its own; lent. NULL for a fake world and for a world of one rank. */
TUTTI_API tutti_store *tutti_world_store(const tutti_world *world);

/* This host's address on the route to the meeting place, or as TUTTI_INTERFACE chose it; "" where all ranks met without
 * a network. */
TUTTI_API const char *tutti_world_address(const tutti_world *world);

/* Makes every wait in this world return TUTTI_ERROR_INTERRUPTED, now and until tutti_world_resume. Async-signal-safe,
 * so that Ctrl-C works. EINTR alone never ends a wait. A collective that waits ends, and its group with it, since this
 * rank is out of step with the others then; one that a helper thread runs as a work is no exception. A receive, a
 * signal and tutti_work_wait end only that wait. To keep its groups, a program waits for its works and its ranks meet
 * before one of them is interrupted. */
TUTTI_API void tutti_world_interrupt(tutti_world *world);
/* Ends the interruption: waits work again. */
TUTTI_API void tutti_world_resume(tutti_world *world);

/* ---- several ranks from one program, without a launcher ---- */

typedef enum tutti_spawn_kind {
    TUTTI_SPAWN_THREADS = 1,
    TUTTI_SPAWN_PROCESSES = 2 /* forks; refused while a world is open in this process */
} tutti_spawn_kind;

/* One rank's program: gets its open world, which it may close itself or leave to tutti_spawn. */
typedef tutti_status tutti_rank_main(tutti_world *world, void *argument);

/* Runs `main` as `ranks` ranks and returns when all have ended: TUTTI_OK, or the first failure, with its message. A
 * rank that returns a failure or dies makes the others' waits fail, as any death does; of several failures the one that
 * started it is returned, where it can be told. Processes that a rank started itself are not waited for. When ranks
 * have failed and all that are left are stopped by a signal, those are killed after two seconds; others that go on are
 * waited for, since they may have shrunk their group, and after two seconds a warning says who failed, why, and who is
 * waited for. A rank's program may open further worlds, under other names, with tutti_world_open. Processes end with
 * _exit after their main has returned and their standard streams are flushed: what the program registered with atexit
 * does not run in them. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_spawn(tutti_spawn_kind kind, int ranks, tutti_rank_main *main,
                                                 void *argument);

/* The whole of a program's main, for ranks that are processes. Under a launcher this process is a rank of the
 * launcher's job: its world is opened, rank_main runs, and what that left open is closed. Without one `ranks_if_alone`
 * processes are forked (0: one per processor that this process may use). An error is printed to stderr, with the
 * program's name. Returns what main should return: 0 when every rank that this process ran has succeeded, else 1. */
TUTTI_API int tutti_main(int ranks_if_alone, tutti_rank_main *rank_main, void *argument);

/* ---- time ---- */

/* Nanoseconds since some moment in the past, the same moment for all ranks of one host; never goes back. For measuring:
 * differences between hosts mean nothing. */
TUTTI_API int64_t tutti_clock(void);

/* ---- worlds without others ---- */

/* A world in which this process pretends to be one rank of many: no data moves, every call succeeds at once; arguments
 * are checked as in a real one. For shape-only runs of programs. */
typedef struct tutti_fake_options {
    size_t size;
    bool error_on_collective; /* every collective fails with "FakeProcessGroup collective operation error" */
} tutti_fake_options;
#define TUTTI_FAKE_OPTIONS_INIT TUTTI_DEFAULTS(tutti_fake_options)
/* TUTTI_FAKE_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_fake_options_init(tutti_fake_options *options, size_t size);
/* Opens such a world as one rank of rank_count. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_world_open_fake(int rank, int rank_count, const tutti_fake_options *options,
                                                           tutti_world **world);

#ifdef __cplusplus
}
#endif
#endif
