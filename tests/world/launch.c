/* SPDX-License-Identifier: Apache-2.0
 *
 * Launch environments: which is found, and what is said about those that are incomplete or contradict themselves.
 */
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <tutti/world.h>
#include <unistd.h>

#include "../harness.h"
#include "base/clock.h"
#include "world/launch.h"

typedef struct variable {
    const char *name, *value;
} variable;

static void set(const variable *variables) {
    static const char *const all[] = { "TUTTI_RANK",
                                       "TUTTI_SIZE",
                                       "TUTTI_STORE",
                                       "TUTTI_LOCAL_RANK",
                                       "TUTTI_LOCAL_SIZE",
                                       "TUTTI_SECRET_FD",
                                       "RANK",
                                       "WORLD_SIZE",
                                       "LOCAL_RANK",
                                       "LOCAL_WORLD_SIZE",
                                       "MASTER_ADDR",
                                       "MASTER_PORT",
                                       "TORCHELASTIC_RUN_ID",
                                       "TORCHELASTIC_RESTART_COUNT",
                                       "TORCHELASTIC_USE_AGENT_STORE",
                                       "OMPI_COMM_WORLD_RANK",
                                       "OMPI_COMM_WORLD_SIZE",
                                       "OMPI_COMM_WORLD_LOCAL_RANK",
                                       "OMPI_COMM_WORLD_LOCAL_SIZE",
                                       "PMIX_NAMESPACE",
                                       "PMI_RANK",
                                       "PMI_SIZE",
                                       "PMI_FD",
                                       "PMI_PORT",
                                       "MPI_LOCALRANKID",
                                       "MPI_LOCALNRANKS",
                                       "SLURM_PROCID",
                                       "SLURM_STEP_NUM_TASKS",
                                       "SLURM_STEP_NUM_NODES",
                                       "SLURM_JOB_ID",
                                       "SLURM_STEP_ID" };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        unsetenv(all[i]);
    for (; variables->name != NULL; variables++)
        setenv(variables->name, variables->value, 1);
}

static tutti_status find(const variable *variables, tu_launch *launch) {
    tutti_world_options options = TUTTI_WORLD_OPTIONS_INIT;
    tu_settings settings;
    set(variables);
    tutti_status status = tu_settings_load(&settings);
    if (status != TUTTI_OK)
        return status;
    status = tu_launch_find(&options, &settings, NULL, launch);
    tu_settings_free(&settings);
    return status;
}
#define SET(...) ((const variable[]){ __VA_ARGS__, { NULL, NULL } })

static void refused(const variable *variables, const char *fragment) {
    tu_launch launch;
    CHECK_STATUS(find(variables, &launch), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE(fragment);
}

TEST(tutti_run_is_found) {
    tu_launch launch;
    CHECK_OK(find(SET({ "TUTTI_RANK", "1" }, { "TUTTI_SIZE", "4" }, { "TUTTI_STORE", "unix:@x" }), &launch));
    CHECK_TEXT(launch.launcher, "tutti run");
    CHECK(launch.rank == 1 && launch.size == 4 && !launch.rank_0_hosts);
    CHECK_TEXT(launch.url, "unix:@x");
    refused(SET({ "TUTTI_RANK", "1" }), "TUTTI_SIZE is not");
    refused(SET({ "TUTTI_SIZE", "2" }), "TUTTI_RANK is not");
    refused(SET({ "TUTTI_RANK", "1" }, { "TUTTI_SIZE", "4" }), "TUTTI_STORE is not");
    refused(SET({ "TUTTI_RANK", "4" }, { "TUTTI_SIZE", "4" }, { "TUTTI_STORE", "unix:@x" }), "TUTTI_RANK is 4");
    refused(SET({ "TUTTI_RANK", "-1" }, { "TUTTI_SIZE", "4" }, { "TUTTI_STORE", "unix:@x" }), "TUTTI_RANK is -1");
    refused(SET({ "TUTTI_RANK", "one" }, { "TUTTI_SIZE", "4" }), "TUTTI_RANK");
    refused(SET({ "TUTTI_RANK", "1" }, { "TUTTI_SIZE", "4" }, { "TUTTI_STORE", "unix:@x" }, { "TUTTI_LOCAL_RANK", "3" },
                { "TUTTI_LOCAL_SIZE", "2" }),
            "TUTTI_LOCAL_RANK is 3");
}

TEST(torchrun_is_found) {
    tu_launch launch;
    CHECK_OK(find(SET({ "RANK", "3" }, { "WORLD_SIZE", "4" }, { "MASTER_ADDR", "node1" }, { "MASTER_PORT", "29500" },
                      { "TORCHELASTIC_RUN_ID", "run" }, { "TORCHELASTIC_RESTART_COUNT", "2" }),
                  &launch));
    CHECK_TEXT(launch.launcher, "torchrun");
    CHECK_TEXT(launch.url, "tcp://node1:29500");
    CHECK_TEXT(launch.prefix, "run/2");
    CHECK(launch.rank == 3 && launch.size == 4 && launch.rank_0_hosts);
    CHECK_OK(find(SET({ "RANK", "3" }, { "WORLD_SIZE", "4" }, { "MASTER_ADDR", "::1" }, { "MASTER_PORT", "29500" },
                      { "TORCHELASTIC_USE_AGENT_STORE", "True" }),
                  &launch));
    CHECK_TEXT(launch.url, "tcp://[::1]:29500");
    CHECK(!launch.rank_0_hosts);
    CHECK_OK(find(SET({ "RANK", "0" }, { "WORLD_SIZE", "1" }), &launch)); /* one rank meets nobody */
    CHECK_TEXT(launch.url, "");
    refused(SET({ "RANK", "0" }), "WORLD_SIZE is not");
    refused(SET({ "WORLD_SIZE", "2" }), "RANK is not");
    refused(SET({ "RANK", "0" }, { "WORLD_SIZE", "2" }), "MASTER_ADDR is not set");
    refused(SET({ "RANK", "0" }, { "WORLD_SIZE", "2" }, { "MASTER_ADDR", "x" }), "MASTER_PORT is not set");
    refused(SET({ "RANK", "0" }, { "WORLD_SIZE", "2" }, { "MASTER_ADDR", "x" }, { "MASTER_PORT", "99999" }),
            "MASTER_PORT is 99999");
    refused(SET({ "RANK", "2" }, { "WORLD_SIZE", "2" }, { "MASTER_ADDR", "x" }, { "MASTER_PORT", "1" }), "RANK is 2");
    refused(SET({ "RANK", "0" }, { "WORLD_SIZE", "2" }, { "LOCAL_RANK", "0" }, { "LOCAL_WORLD_SIZE", "3" }),
            "LOCAL_WORLD_SIZE is 3");
}

TEST(open_mpi_is_found) {
    tu_launch launch;
    CHECK_OK(find(SET({ "OMPI_COMM_WORLD_RANK", "1" }, { "OMPI_COMM_WORLD_SIZE", "2" },
                      { "OMPI_COMM_WORLD_LOCAL_RANK", "1" }, { "OMPI_COMM_WORLD_LOCAL_SIZE", "2" },
                      { "PMIX_NAMESPACE", "prte/vm@1" }, { "MASTER_ADDR", "left over" }),
                  &launch));
    CHECK_TEXT(launch.launcher, "Open MPI");
    char expected[64];
    snprintf(expected, sizeof expected, "unix:@tutti-%u-prte_vm_1", (unsigned)geteuid());
    CHECK_TEXT(launch.url, expected);
    CHECK(launch.rank_0_hosts && launch.per_opening);
    refused(SET({ "OMPI_COMM_WORLD_RANK", "1" }, { "OMPI_COMM_WORLD_SIZE", "2" }), "PMIX_NAMESPACE is not");
    refused(SET({ "OMPI_COMM_WORLD_RANK", "1" }), "OMPI_COMM_WORLD_SIZE is not");
    /* Across hosts somebody must say where. */
    refused(SET({ "OMPI_COMM_WORLD_RANK", "1" }, { "OMPI_COMM_WORLD_SIZE", "4" }, { "OMPI_COMM_WORLD_LOCAL_RANK", "1" },
                { "OMPI_COMM_WORLD_LOCAL_SIZE", "2" }, { "PMIX_NAMESPACE", "x" }),
            "MASTER_ADDR is not set");
    CHECK_OK(find(SET({ "OMPI_COMM_WORLD_RANK", "1" }, { "OMPI_COMM_WORLD_SIZE", "4" },
                      { "OMPI_COMM_WORLD_LOCAL_RANK", "1" }, { "OMPI_COMM_WORLD_LOCAL_SIZE", "2" },
                      { "MASTER_ADDR", "node1" }, { "MASTER_PORT", "5000" }),
                  &launch));
    CHECK_TEXT(launch.url, "tcp://node1:5000");
    CHECK_OK(find(SET({ "OMPI_COMM_WORLD_RANK", "1" }, { "OMPI_COMM_WORLD_SIZE", "4" },
                      { "OMPI_COMM_WORLD_LOCAL_RANK", "1" }, { "OMPI_COMM_WORLD_LOCAL_SIZE", "2" },
                      { "TUTTI_STORE", "tcp://node7:7" }),
                  &launch));
    CHECK_TEXT(launch.url, "tcp://node7:7");
}

TEST(hydra_is_found_by_the_process_behind_its_socket) {
    int pair[2];
    char fd[16], expected[64];
    tu_launch launch;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    snprintf(fd, sizeof fd, "%d", pair[0]);
    CHECK_OK(find(SET({ "PMI_RANK", "1" }, { "PMI_SIZE", "2" }, { "PMI_FD", fd }), &launch));
    CHECK_TEXT(launch.launcher, "Hydra");
    snprintf(expected, sizeof expected, "unix:@tutti-%u-hydra-%d", (unsigned)geteuid(), (int)getpid());
    CHECK_TEXT(launch.url, expected);
    close(pair[0]);
    close(pair[1]);
    CHECK_OK(find(SET({ "PMI_RANK", "1" }, { "PMI_SIZE", "2" }, { "PMI_PORT", "node1:7777" }), &launch));
    CHECK(strstr(launch.url, "-node1_7777") != NULL);
    refused(SET({ "PMI_RANK", "1" }, { "PMI_SIZE", "2" }), "PMI_FD is not");
    refused(SET({ "PMI_RANK", "1" }), "PMI_SIZE is not");
    refused(SET({ "PMI_RANK", "1" }, { "PMI_SIZE", "4" }, { "MPI_LOCALRANKID", "0" }, { "MPI_LOCALNRANKS", "2" }),
            "MASTER_ADDR is not set");
}

TEST(a_step_of_slurm_is_found_and_a_batch_script_is_none) {
    tu_launch launch;
    CHECK_OK(find(SET({ "SLURM_PROCID", "1" }, { "SLURM_STEP_NUM_TASKS", "2" }, { "SLURM_JOB_ID", "77" },
                      { "SLURM_STEP_ID", "3" }),
                  &launch));
    CHECK_TEXT(launch.launcher, "Slurm");
    CHECK(strstr(launch.url, "-slurm-77.3") != NULL);
    CHECK_OK(find(SET({ "SLURM_PROCID", "0" }, { "SLURM_JOB_ID", "77" }), &launch));
    CHECK_TEXT(launch.launcher, "alone");
    CHECK_EQ(launch.size, 1);
    refused(SET({ "SLURM_STEP_NUM_TASKS", "2" }), "SLURM_PROCID is not");
    refused(SET({ "SLURM_PROCID", "1" }, { "SLURM_STEP_NUM_TASKS", "2" }, { "SLURM_JOB_ID", "7" }),
            "SLURM_STEP_ID is not");
    refused(SET({ "SLURM_PROCID", "1" }, { "SLURM_STEP_NUM_TASKS", "2" }, { "SLURM_JOB_ID", "7" },
                { "SLURM_STEP_ID", "0" }, { "SLURM_STEP_NUM_NODES", "2" }),
            "MASTER_ADDR is not set");
}

TEST(the_first_complete_set_wins) {
    tu_launch launch;
    CHECK_OK(find(SET({ "RANK", "5" }, { "SLURM_PROCID", "1" }, { "SLURM_STEP_NUM_TASKS", "2" },
                      { "SLURM_JOB_ID", "77" }, { "SLURM_STEP_ID", "3" }),
                  &launch));
    CHECK_TEXT(launch.launcher, "Slurm"); /* somebody's stray RANK is passed over */
    CHECK_OK(find(SET({ "TUTTI_RANK", "0" }, { "TUTTI_SIZE", "2" }, { "TUTTI_STORE", "unix:@x" }, { "RANK", "1" },
                      { "WORLD_SIZE", "2" }, { "MASTER_ADDR", "x" }, { "MASTER_PORT", "1" }),
                  &launch));
    CHECK_TEXT(launch.launcher, "tutti run");
}

/* ---- really meeting ---- */

static void in_processes(int ranks, int (*body)(int rank)) {
    pid_t children[8];
    fflush(NULL);
    for (int rank = 0; rank < ranks; rank++) {
        children[rank] = fork();
        if (children[rank] == 0)
            exit(body(rank));
    }
    for (int rank = 0; rank < ranks; rank++) {
        int status;
        CHECK(waitpid(children[rank], &status, 0) == children[rank]);
        CHECK_EQ(status, 0);
    }
}

static pid_t test_pid; /* names of sockets and jobs of this run */

/* Opens, opens a second world beside it, closes, and opens again: with rank 0's server coming and going. */
static int open_often(void) {
    for (int i = 0; i < 3; i++) {
        tutti_world *world, *second;
        CHECK_OK(tutti_world_open(NULL, &world));
        CHECK_EQ(tutti_world_size(world), 3);
        CHECK_OK(tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .name = "second"), &second));
        CHECK_OK(tutti_world_close(second));
        CHECK_OK(tutti_world_close(world));
    }
    return 0;
}

static int as_slurm(int rank) {
    char number[16], job[16];
    snprintf(number, sizeof number, "%d", rank);
    snprintf(job, sizeof job, "t%d", (int)test_pid);
    set(SET({ "SLURM_PROCID", number }, { "SLURM_STEP_NUM_TASKS", "3" }, { "SLURM_JOB_ID", job },
            { "SLURM_STEP_ID", "0" }, { "TUTTI_TIMEOUT", "60s" }));
    return open_often();
}

TEST(ranks_of_srun_meet_on_one_host_again_and_again) {
    test_pid = getpid();
    in_processes(3, as_slurm);
}

static char test_port[16];

static int as_torchrun(int rank) {
    char number[16];
    snprintf(number, sizeof number, "%d", rank);
    set(SET({ "RANK", number }, { "WORLD_SIZE", "3" }, { "MASTER_ADDR", "127.0.0.1" }, { "MASTER_PORT", test_port },
            { "TUTTI_TIMEOUT", "60s" }));
    return open_often();
}

static void pick_port(void) {
    tutti_store *server;
    CHECK_OK(tutti_store_serve("127.0.0.1", 0, NULL, &server));
    snprintf(test_port, sizeof test_port, "%d", tutti_store_port(server));
    tutti_store_release(server);
}

TEST(rank_0_serves_the_store_of_torchrun_without_an_agent) {
    pick_port();
    in_processes(3, as_torchrun);
}

static int with_agent(int rank) {
    char number[16];
    snprintf(number, sizeof number, "%d", rank);
    set(SET({ "RANK", number }, { "WORLD_SIZE", "3" }, { "MASTER_ADDR", "localhost" }, { "MASTER_PORT", test_port },
            { "TORCHELASTIC_USE_AGENT_STORE", "True" }, { "TORCHELASTIC_RUN_ID", "r" },
            { "TORCHELASTIC_RESTART_COUNT", "0" }, { "TUTTI_TIMEOUT", "60s" }));
    usleep(20000);
    return open_often();
}

TEST(the_agent_serves_the_store_of_torchrun) {
    tutti_store *server;
    pick_port();
    fflush(NULL);
    pid_t child = fork(); /* the agent; the ranks are its siblings' children here */
    if (child == 0) {
        in_processes(3, with_agent);
        exit(0);
    }
    CHECK_OK(tutti_store_serve("127.0.0.1", atoi(test_port), NULL, &server));
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_EQ(status, 0);
    tutti_store_release(server);
}

static int by_url(int rank) {
    char url[64];
    snprintf(url, sizeof url, "unix:@tutti-test-%d", (int)test_pid);
    tutti_world *world;
    CHECK_OK(tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .rank = rank, .rank_count = 3, .store_url = url,
                                            .timeout_ns = 60 * TU_SECOND),
                              &world));
    CHECK_TEXT(tutti_world_launcher(world), "options");
    CHECK_OK(tutti_world_close(world));
    return 0;
}

TEST(rank_0_serves_a_store_that_the_options_name) {
    test_pid = getpid();
    set(SET({ "TUTTI_TIMEOUT", "60s" }));
    in_processes(3, by_url);
}

static int by_file(int rank) {
    char url[96];
    snprintf(url, sizeof url, "file:///tmp/tutti-test-%d", (int)test_pid);
    tutti_world *world;
    CHECK_OK(tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .rank = rank, .rank_count = 2, .store_url = url,
                                            .timeout_ns = 60 * TU_SECOND),
                              &world));
    CHECK_OK(tutti_world_close(world));
    return 0;
}

TEST(ranks_meet_in_a_file) {
    test_pid = getpid();
    set(SET({ "TUTTI_TIMEOUT", "60s" }));
    in_processes(2, by_file);
    char path[64];
    snprintf(path, sizeof path, "/tmp/tutti-test-%d", (int)test_pid);
    unlink(path);
}

#if TUTTI_HAVE_SODIUM
static int secret_fd;

static int with_secret(int rank) {
    char number[16], fd[16], store[64];
    snprintf(number, sizeof number, "%d", rank);
    snprintf(fd, sizeof fd, "%d", secret_fd);
    snprintf(store, sizeof store, "tcp://127.0.0.1:%s", test_port);
    set(SET({ "TUTTI_RANK", number }, { "TUTTI_SIZE", "3" }, { "TUTTI_STORE", store }, { "TUTTI_SECRET_FD", fd },
            { "TUTTI_TIMEOUT", "60s" }));
    usleep(20000);
    int status = open_often(); /* the secret can be read again and again */
    if (rank == 0) {
        int other = memfd_create("another", MFD_CLOEXEC);
        CHECK(dup2(other, secret_fd) == secret_fd &&
              pwrite(secret_fd, "another secret, of 32 characters", 32, 0) == 32);
        tutti_world *world;
        CHECK_STATUS(tutti_world_open(NULL, &world), TUTTI_ERROR_REFUSED);
        CHECK(ftruncate(secret_fd, 3) == 0);
        CHECK_STATUS(tutti_world_open(NULL, &world), TUTTI_ERROR_ARGUMENT);
        CHECK_MESSAGE("TUTTI_SECRET_FD");
        setenv("TUTTI_SECRET_FD", "987", 1);
        CHECK_STATUS(tutti_world_open(NULL, &world), TUTTI_ERROR_SYSTEM);
        CHECK_MESSAGE("TUTTI_SECRET_FD");
    }
    return status;
}

TEST(ranks_of_tutti_run_prove_the_secret_that_they_inherited) {
    static const char secret[] = "0123456789abcdef0123456789abcdef";
    secret_fd = memfd_create("secret", MFD_CLOEXEC);
    CHECK(pwrite(secret_fd, secret, 32, 0) == 32);
    pick_port();
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        in_processes(3, with_secret);
        exit(0);
    }
    tutti_store *server;
    CHECK_OK(tutti_store_serve("127.0.0.1", atoi(test_port),
                               TUTTI_OPTIONS(tutti_tcp_store_options, .secret = secret, .secret_bytes = 32), &server));
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_EQ(status, 0);
    tutti_store_release(server);
    close(secret_fd);
}
#endif

TEST(a_taken_port_is_named) {
    int taken = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); /* bound and listening, but no store */
    pick_port();
    close(taken);
    tutti_store *server;
    CHECK_OK(tutti_store_serve("127.0.0.1", atoi(test_port), NULL, &server));
    char moment[32];
    snprintf(moment, sizeof moment, "%lldms", (long long)(2 * test_moment() / 1000000));
    set(SET({ "RANK", "0" }, { "WORLD_SIZE", "2" }, { "MASTER_ADDR", "127.0.0.1" }, { "MASTER_PORT", test_port },
            { "TUTTI_TIMEOUT", moment }));
    tutti_world *world;
    /* The store that is there is used, and then the other rank is what is missing. */
    CHECK_STATUS(tutti_world_open(NULL, &world), TUTTI_ERROR_TIMEOUT);
    CHECK_MESSAGE("1");
    tutti_store_release(server);
}

/* ---- addresses ---- */

TEST(the_address_is_chosen_by_the_route_or_by_the_setting) {
    char address[64];
    CHECK_OK(tu_address_choose("127.0.0.1", "", address, sizeof address));
    CHECK_TEXT(address, "127.0.0.1");
    CHECK_OK(tu_address_choose("192.0.2.1", "lo", address, sizeof address));
    CHECK_TEXT(address, "127.0.0.1");
    CHECK_OK(tu_address_choose("192.0.2.1", "127.0.0.0/8", address, sizeof address));
    CHECK_TEXT(address, "127.0.0.1");
    CHECK_OK(tu_address_choose("192.0.2.1", "none,l", address, sizeof address));
    CHECK_STATUS(tu_address_choose("192.0.2.1", "none0", address, sizeof address), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("TUTTI_INTERFACE is \"none0\"");
    CHECK_STATUS(tu_address_choose("no-such-host.invalid", "", address, sizeof address), TUTTI_ERROR_NETWORK);
}

/* ---- addresses as PyTorch's programs write them ---- */

TEST(an_address_may_say_rank_and_size) {
    char folder[] = "/tmp/tutti-test-XXXXXX", url[96], path[64];
    CHECK(mkdtemp(folder) != NULL);
    snprintf(url, sizeof url, "file://%s/meet?rank=0&world_size=1", folder);
    tutti_world *world;
    CHECK_OK(tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .store_url = url), &world));
    CHECK_EQ(tutti_world_size(world), 1);
    CHECK_OK(tutti_world_close(world));
    snprintf(url, sizeof url, "file://%s/meet?colour=blue", folder);
    CHECK_STATUS(tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .store_url = url), &world), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("colour=blue");
    tutti_store *store;
    CHECK_STATUS(tutti_store_open_url(url, NULL, &store), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("query");
    snprintf(path, sizeof path, "%s/meet", folder);
    (void)unlink(path);
    CHECK_EQ(rmdir(folder), 0); /* nothing of another name was made */
}

TEST(env_means_the_environment) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .store_url = "env://"), &world));
    CHECK_EQ(tutti_world_size(world), 1);
    CHECK_TEXT(tutti_world_launcher(world), "alone");
    CHECK_OK(tutti_world_close(world));
}
