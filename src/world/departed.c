/* SPDX-License-Identifier: Apache-2.0
 *
 * How a rank of the world fares, wherever it is: on this host the job knows, elsewhere the launcher's news tell.
 */
#include <stdio.h>

#include "base/clock.h"
#include "base/error.h"
#include "store/store.h"
#include "world/world.h"

/* A process of another host that ended well may have closed its world, and what it sent last may still be on its way:
 * those that wait for it learn that it has gone when that had time to come. */
#define GONE_AFTER (1 * TU_SECOND)

tu_rank_state tu_world_rank_state(const tutti_world *world, int rank, bool probe) {
    int job_rank = world->job_rank_of[rank];
    if (job_rank >= 0)
        return probe ? tu_rank_probe(world->job, job_rank) : tu_rank_state_of(world->job, job_rank);
    switch (world->news != NULL ? tu_news_of(world->news, rank) : TU_NEWS_RUNS) {
    case TU_NEWS_DEAD:
    case TU_NEWS_LOST:
        return TU_RANK_DEAD;
    case TU_NEWS_ENDED:
        return tu_clock_now() - tu_news_when(world->news, rank) > GONE_AFTER ? TU_RANK_CLOSED : TU_RANK_ALIVE;
    default:
        return TU_RANK_ALIVE;
    }
}

void tu_world_rank_text(const tutti_world *world, int rank, char *text, size_t bytes) {
    int job_rank = world->job_rank_of[rank];
    if (job_rank >= 0) {
        tu_death death;
        tu_death_describe(world->job, job_rank, &death);
        snprintf(text, bytes, "%s", death.text);
    } else if (world->news != NULL) {
        tu_news_text(world->news, rank, text, bytes);
    } else {
        snprintf(text, bytes, "rank %d on %s", rank, tu_job_host(world->job, rank));
    }
}

tutti_status tu_world_departed_error(const tutti_world *world, int rank, const char *doing) {
    int job_rank = world->job_rank_of[rank];
    if (job_rank >= 0)
        return tu_death_error(world->job, job_rank, doing);
    char text[384];
    tu_world_rank_text(world, rank, text, sizeof text);
    bool dead = tu_world_rank_state(world, rank, false) == TU_RANK_DEAD;
    return tu_error(dead ? TUTTI_ERROR_DEAD : TUTTI_ERROR_GONE, "%s, seen %s%s", text, doing,
                    dead ? "" : TU_LEFT_EARLY);
}

tutti_status tu_world_follow(tutti_world *world) {
    char host[128];
    int port;
    uint32_t moves = world->news != NULL ? tu_news_store(world->news, host, sizeof host, &port) : 0;
    uint32_t followed = atomic_load_explicit(&world->moves, memory_order_acquire);
    /* One thread goes; others that come meanwhile find the old place closed, and come again. */
    if (moves == followed || world->store == NULL ||
        !atomic_compare_exchange_strong_explicit(&world->moves, &followed, moves, memory_order_acq_rel,
                                                 memory_order_acquire))
        return TUTTI_OK;
    tutti_status status =
        tu_store_move(world->store, host, port, tu_settings_number(&world->settings, TU_SETTING_HOST_TIMEOUT));
    /* Pairs with the release of whoever opened the network. */
    tutti_status (*publish)(tutti_world *) = atomic_load_explicit(&world->publish_hosts, memory_order_acquire);
    if (status == TUTTI_OK && publish != NULL)
        status = publish(world);
    if (status != TUTTI_OK)
        atomic_store_explicit(&world->moves, followed, memory_order_release); /* again next time */
    else
        TU_LOG(TUTTI_LOG_INFO, world->log, "world", "the store of the job is at %s port %d now", host, port);
    return status;
}

int tu_world_first_dead(const tutti_world *world, const int *ranks, int count, const _Atomic bool *but, bool probe) {
    int first = -1;
    for (int i = 0; i < count; i++) {
        int rank = ranks != NULL ? ranks[i] : i;
        if (rank == world->rank || (but != NULL && atomic_load_explicit(&but[rank], memory_order_relaxed)) ||
            tu_world_rank_state(world, rank, probe) != TU_RANK_DEAD)
            continue;
        if (world->job_rank_of[rank] >= 0)
            return i;
        int earliest = first >= 0 && ranks != NULL ? ranks[first] : first;
        if (first < 0 || tu_news_when(world->news, rank) < tu_news_when(world->news, earliest))
            first = i;
    }
    return first;
}
