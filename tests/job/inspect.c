/* SPDX-License-Identifier: Apache-2.0
 *
 * Looking into jobs from outside: what is found, what is refused, and the publishing of exit statuses.
 */
#include "job/inspect.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <tutti/collective.h>
#include <unistd.h>

#include "../harness.h"
#include "job/dump.h"
#include "job/inner.h"
#include "job/recorder.h"
#include "world/world.h"

/* The view of this world's own job, found from outside. */
static const tu_job_view *own_view(const tu_job_list *list, tutti_world *world) {
    for (size_t i = 0; i < list->count; i++)
        if (strcmp(list->jobs[i].page->id, world->job->page->id) == 0)
            return &list->jobs[i];
    return NULL;
}

TEST_WORLD(a_job_is_found_in_any_of_its_processes_once, 2) {
    tu_job_list list = { 0 };
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    for (int round = 0; round < 2; round++) {
        CHECK_OK(tu_inspect_process(&list, getppid(), false)); /* of another process; it may be the same job */
        CHECK_OK(tu_inspect_process(&list, getpid(), false));
        CHECK_OK(tu_inspect_user(&list));
    }
    const tu_job_view *view = own_view(&list, world);
    CHECK(view != NULL);
    for (size_t i = 0; i < list.count; i++)
        CHECK(&list.jobs[i] == view || list.jobs[i].inode != view->inode || list.jobs[i].device != view->device);
    CHECK_EQ(view->page->size, 2);
    CHECK_EQ(view->page->world_size, 2);
    tu_record_view last;
    int rank = tutti_world_rank(world);
    tu_recorder recorder = tu_page_recorder(view->page, view->bytes, view->size, rank);
    CHECK(tu_recorder_last(&recorder, 0, &last));
    CHECK_EQ(last.info.operation, TU_OPERATION_BARRIER);
    CHECK_EQ(atomic_load(&tu_page_slot(view->page, rank)->state), TU_RANK_ALIVE);
    tu_inspect_free(&list);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST_WORLD_PROCESSES(a_published_status_reaches_the_others_and_the_first_one_stays, 2) {
    tu_job_list list = { 0 };
    int own = (int)getpid();
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    if (tutti_world_rank(world) == 0) {
        int peer = tu_page_slot(tu_job_page(world->job), 1)->pid;
        tu_death_publish(peer, 9, &own, 1);
        tu_death_publish(peer, 11, &own, 1);
        CHECK_EQ(atomic_load(&tu_page_slot(tu_job_page(world->job), 1)->wait_status), TU_SLOT_PUBLISHED | 9);
        CHECK_EQ(atomic_load(&tu_page_slot(tu_job_page(world->job), 0)->wait_status), 0);
    }
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    CHECK_EQ(atomic_load(&tu_page_slot(tu_job_page(world->job), 1)->wait_status), TU_SLOT_PUBLISHED | 9);
    CHECK_OK(tu_inspect_process(&list, own, false));
    CHECK(!tu_inspect_publish(&list, own, 0)); /* read-only views are not written */
    tu_inspect_free(&list);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

/* Makes a memfd that looks like a job segment from far away. */
static int pretend(const void *data, size_t bytes, bool sealed) {
    int descriptor = memfd_create(TU_PAGE_NAME "0123456789abcdef", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(descriptor >= 0);
    CHECK(write(descriptor, data, bytes) == (ssize_t)bytes);
    if (sealed)
        CHECK(fcntl(descriptor, F_ADD_SEALS, TU_PAGE_SEALS) == 0);
    return descriptor;
}

static void check_refused(int descriptor, const char *why) {
    tu_job_list list = { 0 };
    CHECK_OK(tu_inspect_process(&list, getpid(), false));
    CHECK_EQ(list.count, 0);
    CHECK(strstr(list.skipped, why) != NULL);
    tu_inspect_free(&list);
    close(descriptor);
}

TEST(what_only_looks_like_a_job_is_refused_with_a_reason) {
    _Alignas(tu_page) char garbage[8192];
    memset(garbage, 0xa5, sizeof garbage);
    check_refused(pretend(garbage, sizeof garbage, false), "not sealed");
    check_refused(pretend(garbage, sizeof garbage, true), "no magic number");
    check_refused(pretend(garbage, 8, true), "no magic number");
    tu_page *page = (tu_page *)garbage;
    atomic_store(&page->magic, TU_PAGE_MAGIC);
    page->version = TU_PAGE_VERSION + 1;
    check_refused(pretend(garbage, sizeof garbage, true), "layout version");
    page->version = TU_PAGE_VERSION;
    page->mutex_bytes = sizeof(pthread_mutex_t);
    page->size = 1 << 30; /* more ranks than the file has room for */
    check_refused(pretend(garbage, sizeof garbage, true), "claims");
    page->size = 1;
    check_refused(pretend(garbage, sizeof garbage, true), "claims flight recorders of");
    page->recorder_entries = 64;
    check_refused(pretend(garbage, sizeof garbage, true), "bytes");
}

TEST(a_process_that_is_gone_has_no_jobs) {
    pid_t pid = fork();
    if (pid == 0)
        _exit(0);
    CHECK(waitpid(pid, NULL, 0) == pid);
    tu_job_list list = { 0 };
    CHECK_OK(tu_inspect_process(&list, pid, true));
    CHECK_EQ(list.count, 0);
    tu_process_view view;
    CHECK(!tu_process_look(pid, &view));
    tu_inspect_free(&list);
}

TEST(a_zombie_is_on_its_way_out_and_a_stopped_process_is_not) {
    pid_t pid = fork();
    if (pid == 0) {
        raise(SIGSTOP);
        raise(SIGKILL);
    }
    tu_process_view view;
    CHECK(waitpid(pid, NULL, WUNTRACED) == pid);
    CHECK(tu_process_look(pid, &view));
    CHECK(view.state == 'T' && !view.exiting && view.parent == getpid());
    kill(pid, SIGCONT);
    siginfo_t information;
    CHECK(waitid(P_PID, (id_t)pid, &information, WEXITED | WNOWAIT) == 0);
    CHECK(tu_process_look(pid, &view));
    CHECK(view.exiting && view.state == 'Z');
    CHECK(waitpid(pid, NULL, 0) == pid);
}

static tutti_status look_and_dump(void *argument) {
    tutti_world *world = argument;
    tu_job_list list = { 0 };
    tutti_status status = tu_inspect_process(&list, getpid(), false);
    if (status == TUTTI_OK && list.count > 0)
        status = tu_dump_file(tu_job_page(world->job), 0, tu_job_recorder(world->job, 0), NULL, "/tmp");
    tu_inspect_free(&list);
    return status;
}

TEST_WORLD_PROCESSES(a_failure_of_any_call_while_looking_leaks_nothing, 1) {
    char path[128];
    snprintf(path, sizeof path, "/tmp/tutti-%s-rank-0.json", world->job->page->id);
    test_fail_each(NULL, look_and_dump, world);
    CHECK(unlink(path) == 0);
}
