/* SPDX-License-Identifier: Apache-2.0
 *
 * Releases in a forked child: they return at once, whatever another thread had locked when the child was made.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tutti/tutti.h>

#include "../harness.h"

typedef struct objects {
    tutti_world *world;
    tutti_store *store;
    tutti_group *group;
    tutti_memory *memory;
    tutti_peers *peers;
    tutti_pool *pool;
    tutti_mesh *mesh;
    tutti_work *work;
    atomic_bool over;
    bool right;
} objects;

static void make(objects *all) {
    int64_t value = 1;
    CHECK_OK(tutti_world_open(NULL, &all->world));
    CHECK_OK(tutti_store_open_memory(&all->store));
    CHECK_OK(tutti_group_new(all->world, NULL, 0, NULL, &all->group));
    CHECK_OK(tutti_memory_alloc(all->world, 4096, NULL, &all->memory));
    CHECK_OK(tutti_memory_rendezvous(all->memory, all->group, &all->peers));
    CHECK_OK(tutti_pool_new(all->world, NULL, &all->pool));
    CHECK_OK(tutti_mesh_new(all->world, TUTTI_CPU, (int[]){ 1 }, 1, NULL, &all->mesh));
    CHECK_OK(tutti_all_reduce(all->group, &value, &value, 1, TUTTI_I64, TUTTI_SUM,
                              TUTTI_OPTIONS(tutti_call, .work = &all->work)));
    CHECK_OK(tutti_work_wait(all->work, 0));
}

static void release(objects *all) {
    tutti_work_release(all->work);
    tutti_mesh_release(all->mesh);
    tutti_pool_release(tutti_pool_keep(all->pool));
    tutti_pool_release(all->pool);
    tutti_peers_release(tutti_peers_keep(all->peers));
    tutti_peers_release(all->peers);
    tutti_memory_release(all->memory);
    tutti_group_release(all->group);
    tutti_store_release(all->store);
}

/* Takes every lock that a release may want, again and again. */
static void *keep_busy(void *argument) {
    objects *all = argument;
    all->right = true;
    while (!atomic_load(&all->over) && all->right) {
        tutti_memory *memory = NULL, *pooled = NULL;
        tutti_peers *peers = NULL;
        all->right = tutti_memory_alloc(all->world, 4096, NULL, &memory) == TUTTI_OK &&
                     tutti_memory_rendezvous(memory, all->group, &peers) == TUTTI_OK &&
                     tutti_pool_alloc(all->pool, 4096, &pooled) == TUTTI_OK;
        tutti_peers_release(peers);
        tutti_memory_release(memory);
        tutti_memory_release(pooled);
    }
    return NULL;
}

TEST(releases_in_a_forked_child_return_whatever_was_locked_at_the_fork) {
    objects all = { 0 };
    pthread_t busy;
    make(&all);
    CHECK_EQ(pthread_create(&busy, NULL, keep_busy, &all), 0);
    fflush(NULL);
    for (int i = 0; i < (test_sanitized() ? 10 : 100); i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(60); /* a child that hangs is killed, and found below */
            release(&all);
            _exit(tutti_world_close(all.world) == TUTTI_ERROR_FORKED ? 0 : 1);
        }
        int status;
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK_EQ(status, 0);
    }
    atomic_store(&all.over, true);
    pthread_join(busy, NULL);
    CHECK(all.right);
    release(&all); /* the parent's are all there */
    CHECK_OK(tutti_world_close(all.world));
}
