/* SPDX-License-Identifier: Apache-2.0
 *
 * Jobs of one rank, done by several threads while one communicates: see team.h.
 */
#include "fused/team.h"

#include <sched.h>

#include "base/pool.h"
#include "collective/arrival.h"

enum {
    LEFT,
    TAKEN,
    DONE
};

tutti_status tu_team_open(tu_team *team, int room) {
    size_t bytes = (size_t)room * sizeof *team->jobs;
    team->jobs = tu_block_alloc(tu_self(), bytes);
    if (team->jobs == NULL)
        return tu_error_memory("the jobs of a fused operation", bytes);
    pthread_mutex_init(&team->lock, NULL);
    team->caller = tu_self();
    team->room = room;
    return TUTTI_OK;
}

void tu_team_close(tu_team *team) {
    if (!tu_team_is_open(team))
        return;
    pthread_mutex_destroy(&team->lock);
    tu_block_free(tu_self(), team->jobs, (size_t)team->room * sizeof *team->jobs);
    team->jobs = NULL;
}

void tu_team_reset(tu_team *team) {
    pthread_mutex_lock(&team->lock);
    team->count = team->next = 0;
    pthread_mutex_unlock(&team->lock);
}

int tu_team_add(tu_team *team, const tu_team_job *job) {
    pthread_mutex_lock(&team->lock);
    int number = team->count++;
    team->jobs[number] = *job;
    team->jobs[number].state = LEFT;
    pthread_mutex_unlock(&team->lock);
    return number;
}

bool tu_team_is_done(tu_team *team, int group) {
    bool done = true;
    pthread_mutex_lock(&team->lock);
    for (int i = 0; i < team->count && done; i++)
        done = team->jobs[i].group != group || team->jobs[i].state == DONE;
    done = done && team->status == TUTTI_OK;
    pthread_mutex_unlock(&team->lock);
    return done;
}

/* ---- jobs ---- */

/* With the lock held: the first job that can be begun, or NULL. */
static tu_team_job *find_job(tu_team *team) {
    if (team->status != TUTTI_OK || (team->by_library && tu_self() != team->caller))
        return NULL;
    for (int i = team->next; i < team->count; i++) {
        tu_team_job *job = &team->jobs[i];
        if (job->state == LEFT && (job->after < 0 || team->jobs[job->after].state == DONE))
            return job;
    }
    return NULL;
}

static bool do_job(tu_team *team) {
    pthread_mutex_lock(&team->lock);
    tu_team_job *job = find_job(team);
    if (job != NULL) {
        job->state = TAKEN;
        team->running++;
        if (team->talks)
            atomic_fetch_add_explicit(team->apart, 1, memory_order_relaxed);
        while (team->next < team->count && team->jobs[team->next].state != LEFT)
            team->next++;
    }
    pthread_mutex_unlock(&team->lock);
    if (job == NULL)
        return false;
    tutti_status status = team->work(team->context, job);
    pthread_mutex_lock(&team->lock);
    job->state = DONE;
    team->running--;
    if (status != TUTTI_OK && team->status == TUTTI_OK) {
        team->status = status;
        tu_error_save(&team->error);
    }
    pthread_mutex_unlock(&team->lock);
    return true;
}

static void set_talks(tu_team *team, bool talks) {
    pthread_mutex_lock(&team->lock);
    team->talks = talks;
    pthread_mutex_unlock(&team->lock);
}

/* Whether there are jobs for several threads, and this one is alone with them: it had better call the others. */
static bool is_deserted(tu_team *team) {
    int left = 0;
    pthread_mutex_lock(&team->lock);
    for (int i = team->next; i < team->count && left < 2; i++)
        left += team->jobs[i].state == LEFT;
    bool deserted = left > 1 && team->visitors == 0 && !team->by_library && team->threads > 1;
    pthread_mutex_unlock(&team->lock);
    return deserted;
}

bool tu_team_help(tu_team *team) {
    set_talks(team, false);
    bool did = do_job(team);
    bool deserted = did && is_deserted(team);
    set_talks(team, true);
    return did && !deserted;
}

/* ---- a run ---- */

typedef struct team_run {
    tu_team *team;
    tu_team_talk *talk; /* NULL from when a thread calls it; under the team's lock */
    void *context;
    atomic_bool begun; /* the caller's thread has come (release); the others leave behind it (acquire) */
    tutti_status status;
    tutti_error_copy error; /* of talk */
} team_run;

static uint64_t begin_span(const tu_team *team) {
    return team->group != NULL ? tu_fused_span_begin(team->group) : 0;
}

static void end_span(const tu_team *team, uint64_t began, int jobs) {
    if (team->group != NULL)
        tu_fused_span_end(team->group, began, jobs);
}

/* Communicates, unless another thread does or has. */
static void talk_once(team_run *run) {
    tu_team *team = run->team;
    pthread_mutex_lock(&team->lock);
    tu_team_talk *talk = run->talk;
    run->talk = NULL;
    team->talks = team->talks || talk != NULL;
    if (talk != NULL)
        atomic_fetch_add_explicit(team->apart, team->running, memory_order_relaxed);
    pthread_mutex_unlock(&team->lock);
    if (talk == NULL)
        return;
    uint64_t began = begin_span(team);
    run->status = talk(run->context);
    end_span(team, began, 0);
    if (run->status != TUTTI_OK)
        tu_error_save(&run->error);
    set_talks(team, false);
}

/* Jobs one after the other, as one entry of the flight recorder: until there is none, or, for the caller's thread,
 * until it is alone with them. */
static void do_jobs(tu_team *team, bool caller) {
    uint64_t began = begin_span(team);
    int jobs = 0;
    while (do_job(team)) {
        jobs++;
        if (caller && is_deserted(team))
            break;
    }
    if (jobs > 0)
        end_span(team, began, jobs);
}

/* At least one job, so that every stay brings the run further. */
static void work_as_caller(team_run *run) {
    tu_team *team = run->team;
    if (!team->by_library)
        talk_once(run);
    do_jobs(team, true);
    talk_once(run);
}

static void count_visitor(tu_team *team, int change) {
    pthread_mutex_lock(&team->lock);
    team->visitors += change;
    pthread_mutex_unlock(&team->lock);
}

/* One item of the pool's loop is one thread's stay. There are as many items as threads, and a thread of the pool takes
 * no second one before the caller's has one. */
static void stay(void *context, int64_t begin, int64_t end) {
    team_run *run = context;
    tu_team *team = run->team;
    (void)begin, (void)end;
    if (tu_self() == team->caller) {
        atomic_store_explicit(&run->begun, true, memory_order_release);
        work_as_caller(run);
        return;
    }
    count_visitor(team, 1);
    if (team->by_library)
        talk_once(run);
    do_jobs(team, false);
    count_visitor(team, -1);
    while (!atomic_load_explicit(&run->begun, memory_order_acquire))
        sched_yield();
}

static bool is_over(tu_team *team) {
    pthread_mutex_lock(&team->lock);
    bool over = team->status != TUTTI_OK || team->next == team->count;
    pthread_mutex_unlock(&team->lock);
    return over;
}

tutti_status tu_team_run(tu_team *team, tu_team_talk *talk, void *context) {
    team_run run = { .team = team, .talk = talk, .context = context };
    do {
        atomic_store_explicit(&run.begun, false, memory_order_relaxed);
        tu_pool_run(&(tu_pool_loop){ stay, &run, team->threads, 1, team->threads });
    } while (!is_over(team));
    return run.status != TUTTI_OK     ? tu_error_restore(&run.error)
           : team->status != TUTTI_OK ? tu_error_restore(&team->error)
                                      : TUTTI_OK;
}
