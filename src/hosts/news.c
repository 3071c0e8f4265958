/* SPDX-License-Identifier: Apache-2.0
 *
 * The news page; see news.h. Every word has one writer, the agent's process, which tells of a rank by writing the
 * details first and the state last; readers load the state first.
 */
#include "hosts/news.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"

#define MAGIC UINT64_C(0x3153574e49545554) /* "TUTINWS1" */
#define VERSION 5
#define HOST_BYTES 64
#define WHY_BYTES 160
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)

typedef struct rank_news {
    int32_t node;
    _Atomic uint32_t state; /* tu_news_state; release, pairs with the acquire in tu_news_of */
    int32_t pid, wait_status;
    int64_t at; /* on the clock of this host: when the agent heard of it */
} rank_news;

typedef struct node_news {
    char host[HOST_BYTES];
    char why[WHY_BYTES];         /* it is lost; complete before its ranks are */
    char store_host[HOST_BYTES]; /* where its store is; complete before it is the hub */
    int32_t store_port, reserved;
} node_news;

typedef struct page {
    uint64_t magic;
    uint32_t version;
    int32_t ranks, nodes, node;
    int64_t silence_ns;
    _Alignas(64) _Atomic uint32_t departures; /* release, pairs with the acquire in tu_news_departures */
    _Atomic int64_t beat;                     /* tu_clock_now of the agent; a hint about time, relaxed */
    _Atomic uint32_t alone;                   /* release, pairs with tu_news_cut_off: then why_alone is there */
    char why_alone[WHY_BYTES];
    _Atomic uint32_t electing;
    _Atomic uint32_t hub;        /* node that took the place of the first; release, pairs with tu_news_store; grows */
    _Atomic int64_t clock_ahead; /* before the next */
    _Atomic int64_t clock_error_plus1;   /* 0: not known; release, pairs with tu_news_clock */
    _Alignas(64) unsigned char tables[]; /* nodes, then ranks */
} page;

struct tu_news {
    page *page;
    size_t bytes;
    node_news *nodes;
    rank_news *ranks;
    /* Of this process alone, hints about time, relaxed: when it last looked at the agent's beat, and until when it
     * forgives silence, since it stood still itself. */
    _Atomic int64_t looked, lenient_until;
};

static size_t bytes_of(int nodes, int ranks) {
    return sizeof(page) + (size_t)nodes * sizeof(node_news) + (size_t)ranks * sizeof(rank_news);
}

static tutti_status take(page *mapped, size_t bytes, tu_news **news) {
    tu_news *made = malloc(sizeof *made);
    if (made == NULL) {
        munmap(mapped, bytes);
        return tu_error_memory("the news page", sizeof *made);
    }
    node_news *nodes = (node_news *)(void *)mapped->tables;
    *made = (tu_news){ mapped, bytes, nodes, (rank_news *)(void *)(nodes + mapped->nodes) };
    atomic_init(&made->looked, tu_clock_now());
    *news = made;
    return TUTTI_OK;
}

/* ---- the agent ---- */

static void fill(tu_news *news, const tu_news_plan *plan) {
    int rank = 0;
    for (int node = 0; node < plan->nodes; node++) {
        snprintf(news->nodes[node].host, HOST_BYTES, "%s", plan->hosts[node]);
        for (int i = 0; i < plan->ranks[node]; i++)
            news->ranks[rank++].node = node;
    }
}

tutti_status tu_news_create(const tu_news_plan *plan, tu_news **news, int *descriptor) {
    int ranks = 0;
    for (int node = 0; node < plan->nodes; node++)
        ranks += plan->ranks[node];
    size_t bytes = bytes_of(plan->nodes, ranks);
    int fd = memfd_create("tutti-news", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return tu_error_system(errno, "cannot make the news page (memfd_create)");
    void *mapped = posix_fallocate(fd, 0, (off_t)bytes) == 0
                       ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                       : MAP_FAILED;
    /* Sealed after this mapping was made: no other can be written through. */
    if (mapped == MAP_FAILED || fcntl(fd, F_ADD_SEALS, SEALS) != 0) {
        tutti_status status = tu_error_system(errno, "cannot make the news page of %zu bytes", bytes);
        if (mapped != MAP_FAILED)
            munmap(mapped, bytes);
        close(fd);
        return status;
    }
    page *page = mapped;
    page->magic = MAGIC;
    page->version = VERSION;
    page->ranks = ranks;
    page->nodes = plan->nodes;
    page->node = plan->node;
    page->silence_ns = plan->silence_ns;
    tutti_status status = take(page, bytes, news);
    if (status != TUTTI_OK) {
        close(fd);
        return status;
    }
    fill(*news, plan);
    tu_news_beat(*news);
    *descriptor = fd;
    return TUTTI_OK;
}

void tu_news_beat(tu_news *news) {
    atomic_store_explicit(&news->page->beat, tu_clock_now(), memory_order_relaxed);
}

int64_t tu_news_silence(const tu_news *news) {
    return tu_clock_now() - atomic_load_explicit(&news->page->beat, memory_order_relaxed);
}

static void depart(tu_news *news, rank_news *of, tu_news_state state) {
    of->at = tu_clock_now();
    /* Release: pairs with the acquire in tu_news_of; what was written before is there. */
    atomic_store_explicit(&of->state, (uint32_t)state, memory_order_release);
    atomic_fetch_add_explicit(&news->page->departures, 1, memory_order_release);
}

void tu_news_rank_ended(tu_news *news, int rank, int pid, int wait_status) {
    rank_news *of = &news->ranks[rank];
    if (atomic_load_explicit(&of->state, memory_order_relaxed) != TU_NEWS_RUNS)
        return;
    of->pid = pid;
    of->wait_status = wait_status;
    depart(news, of, wait_status == 0 ? TU_NEWS_ENDED : TU_NEWS_DEAD);
}

void tu_news_node_lost(tu_news *news, int node, const char *why) {
    snprintf(news->nodes[node].why, WHY_BYTES, "%s", why);
    for (int rank = 0; rank < news->page->ranks; rank++)
        if (news->ranks[rank].node == node &&
            atomic_load_explicit(&news->ranks[rank].state, memory_order_relaxed) == TU_NEWS_RUNS)
            depart(news, &news->ranks[rank], TU_NEWS_LOST);
}

void tu_news_elect(tu_news *news) {
    atomic_store_explicit(&news->page->electing, 1, memory_order_release); /* pairs with tu_news_electing */
}

void tu_news_moved(tu_news *news, int node, const char *host, int port) {
    snprintf(news->nodes[node].store_host, HOST_BYTES, "%s", host);
    news->nodes[node].store_port = port;
    atomic_store_explicit(&news->page->hub, (uint32_t)node, memory_order_release); /* pairs with tu_news_store */
    atomic_store_explicit(&news->page->electing, 0, memory_order_release);
}

void tu_news_set_clock(tu_news *news, int64_t ahead_ns, int64_t error_ns) {
    atomic_store_explicit(&news->page->clock_ahead, ahead_ns, memory_order_relaxed);
    atomic_store_explicit(&news->page->clock_error_plus1, error_ns + 1, memory_order_release);
}

bool tu_news_clock(const tu_news *news, int64_t *ahead_ns, int64_t *error_ns) {
    int64_t error = atomic_load_explicit(&news->page->clock_error_plus1, memory_order_acquire);
    *error_ns = error - 1;
    *ahead_ns = atomic_load_explicit(&news->page->clock_ahead, memory_order_relaxed);
    return error > 0;
}

void tu_news_alone(tu_news *news, const char *why) {
    snprintf(news->page->why_alone, WHY_BYTES, "%s", why);
    atomic_store_explicit(&news->page->alone, 1, memory_order_release); /* pairs with tu_news_cut_off */
    atomic_store_explicit(&news->page->electing, 0, memory_order_release);
}

/* ---- ranks ---- */

static tutti_status not_ours(int descriptor, const char *why) {
    return tu_error(
        TUTTI_ERROR_ARGUMENT,
        "descriptor %d (TUTTI_NEWS_FD) holds no news of the launcher that this rank can read: %s. It is set "
        "by tutti run; do not pass it on to another job",
        descriptor, why);
}

static tutti_status check(const page *page, size_t bytes, int descriptor, int rank, int ranks) {
    if (page->magic != MAGIC || page->version != VERSION)
        return not_ours(descriptor, "the launcher is of another version of Tutti");
    if (page->nodes < 1 || page->ranks != ranks || page->node < 0 || page->node >= page->nodes ||
        bytes < bytes_of(page->nodes, ranks))
        return not_ours(descriptor, "it is about another number of ranks");
    const rank_news *table = (const rank_news *)(const void *)(page->tables + (size_t)page->nodes * sizeof(node_news));
    for (int i = 0; i < ranks; i++)
        if (table[i].node < 0 || table[i].node >= page->nodes || (i == rank && table[i].node != page->node))
            return not_ours(descriptor, "its table of ranks is wrong");
    return TUTTI_OK;
}

tutti_status tu_news_open(int descriptor, int rank, int ranks, tu_news **news) {
    struct stat file;
    if (fstat(descriptor, &file) != 0 || (fcntl(descriptor, F_GET_SEALS) & SEALS) != SEALS ||
        (size_t)file.st_size < sizeof(page))
        return not_ours(descriptor, "it is no sealed page");
    size_t bytes = (size_t)file.st_size;
    void *mapped = mmap(NULL, bytes, PROT_READ, MAP_SHARED, descriptor, 0);
    if (mapped == MAP_FAILED)
        return tu_error_system(errno, "the news of the launcher cannot be mapped (TUTTI_NEWS_FD)");
    tutti_status status = check(mapped, bytes, descriptor, rank, ranks);
    if (status != TUTTI_OK) {
        munmap(mapped, bytes);
        return status;
    }
    return take(mapped, bytes, news);
}

void tu_news_close(tu_news *news) {
    if (news == NULL)
        return;
    munmap(news->page, news->bytes);
    free(news);
}

uint32_t tu_news_departures(const tu_news *news) {
    return atomic_load_explicit(&news->page->departures, memory_order_acquire); /* pairs with depart() */
}

bool tu_news_electing(const tu_news *news) {
    return atomic_load_explicit(&news->page->electing, memory_order_acquire) != 0; /* pairs with its writers */
}

uint32_t tu_news_store(const tu_news *news, char *host, size_t bytes, int *port) {
    uint32_t hub = atomic_load_explicit(&news->page->hub, memory_order_acquire); /* pairs with tu_news_moved */
    if (hub >= (uint32_t)news->page->nodes)
        return 0;
    if (hub > 0) {
        snprintf(host, bytes, "%.*s", HOST_BYTES - 1, news->nodes[hub].store_host);
        *port = news->nodes[hub].store_port;
    }
    return hub;
}

/* Whoever waits looks many times a second. One that has not looked for long may have stood still together with the
 * agent, as when the machine slept: that one then gets some time to say something. */
static bool silent(const tu_news *news) {
    tu_news *own = (tu_news *)(uintptr_t)news;
    int64_t now = tu_clock_now(), some = news->page->silence_ns / 4;
    if (now - atomic_exchange_explicit(&own->looked, now, memory_order_relaxed) > some)
        atomic_store_explicit(&own->lenient_until, now + some, memory_order_relaxed);
    return tu_news_silence(news) > news->page->silence_ns &&
           now >= atomic_load_explicit(&own->lenient_until, memory_order_relaxed);
}

tu_news_state tu_news_of(const tu_news *news, int rank) {
    const rank_news *of = &news->ranks[rank];
    uint32_t state = atomic_load_explicit(&of->state, memory_order_acquire); /* pairs with depart() */
    if (state == TU_NEWS_RUNS && of->node != news->page->node && silent(news))
        return TU_NEWS_LOST;
    return (tu_news_state)state;
}

int64_t tu_news_when(const tu_news *news, int rank) {
    return news->ranks[rank].at;
}

int tu_news_node(const tu_news *news, int rank) {
    return news->ranks[rank].node;
}

int tu_news_wait_status(const tu_news *news, int rank) {
    return news->ranks[rank].wait_status;
}

static void silence_text(const tu_news *news, char *text, size_t bytes) {
    snprintf(text, bytes,
             "the launcher of this host (%s) has been silent for %.1f s, so the other hosts have given it up "
             "(TUTTI_HOST_TIMEOUT)",
             news->nodes[news->page->node].host, (double)tu_news_silence(news) / 1e9);
}

bool tu_news_cut_off(const tu_news *news, char *why, size_t bytes) {
    bool alone = atomic_load_explicit(&news->page->alone, memory_order_acquire) != 0; /* pairs with tu_news_alone */
    if (alone)
        snprintf(why, bytes, "the launcher of this host (%s) has lost the others: %s",
                 news->nodes[news->page->node].host, news->page->why_alone);
    else if (silent(news))
        silence_text(news, why, bytes);
    return alone || silent(news);
}

static void lost_text(const tu_news *news, const rank_news *of, char *text, size_t bytes) {
    char silence[224];
    if (news->nodes[of->node].why[0] != 0) {
        snprintf(text, bytes, "is lost with its host: %s", news->nodes[of->node].why);
        return;
    }
    silence_text(news, silence, sizeof silence);
    snprintf(text, bytes, "is lost: %s", silence);
}

void tu_news_text(const tu_news *news, int rank, char *text, size_t bytes) {
    const rank_news *of = &news->ranks[rank];
    const char *host = news->nodes[of->node].host;
    tu_news_state state = tu_news_of(news, rank);
    char how[WHY_BYTES + 96];
    if (state == TU_NEWS_RUNS || state == TU_NEWS_LOST) {
        if (state == TU_NEWS_LOST)
            lost_text(news, of, how, sizeof how);
        snprintf(text, bytes, "rank %d on %s %s", rank, host, state == TU_NEWS_LOST ? how : "runs");
        return;
    }
    const char *name = WIFSIGNALED(of->wait_status) ? sigdescr_np(WTERMSIG(of->wait_status)) : NULL;
    if (WIFSIGNALED(of->wait_status))
        snprintf(how, sizeof how, "was killed by signal %d (%s)", WTERMSIG(of->wait_status),
                 name != NULL ? name : "unknown");
    else
        snprintf(how, sizeof how, "exited with status %d", WEXITSTATUS(of->wait_status));
    snprintf(text, bytes, "rank %d on %s (pid %d) %s", rank, host, of->pid, how);
}
