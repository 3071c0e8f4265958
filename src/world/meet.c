/* SPDX-License-Identifier: Apache-2.0
 *
 * The meeting place of a world: its store, with keys that no other world and no other opening of this one shares.
 *
 * Keys are tutti/<run>/<world>/<opening>/… The opening is counted in the store, per rank and process: a rank that opens
 * a world again meets the others' second opening, and a second process with the same rank is seen as what it is.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "world/launch.h"
#include "world/sha1.h"

/* How often this process opened the worlds whose sockets carry the opening in their names: rank and address, world,
 * count. Only launchers without a meeting place of their own need it, so a handful of entries; they stay until the
 * process ends. */
typedef struct opening {
    struct opening *next;
    unsigned count;
    char place[];
} opening;
static pthread_mutex_t openings_lock = PTHREAD_MUTEX_INITIALIZER;
static opening *openings;

static tutti_status count_opening(const char *place, unsigned *count) {
    tutti_status status = TUTTI_OK;
    pthread_mutex_lock(&openings_lock);
    opening *found = openings;
    while (found != NULL && strcmp(found->place, place) != 0)
        found = found->next;
    if (found == NULL && (found = calloc(1, sizeof *found + strlen(place) + 1)) != NULL) {
        strcpy(found->place, place);
        found->next = openings;
        openings = found;
    }
    if (found != NULL)
        *count = ++found->count;
    else
        status = tu_error_memory("a meeting place", strlen(place));
    pthread_mutex_unlock(&openings_lock);
    return status;
}

void tu_launch_place(const tu_launch *launch, char *text, size_t bytes) {
    if (launch->size == 1)
        snprintf(text, bytes, "none");
    else if (launch->store != NULL)
        snprintf(text, bytes, "%s store %p", tutti_store_kind(launch->store), (void *)launch->store);
    else
        snprintf(text, bytes, "%s%s%s", launch->url, launch->prefix[0] != 0 ? " " : "", launch->prefix);
}

/* The address of this opening. */
static tutti_status complete_url(const tu_launch *launch, const tutti_world *world, char url[256]) {
    snprintf(url, 256, "%s", launch->url);
    if (!launch->per_opening)
        return TUTTI_OK;
    char place[384], digest[41];
    unsigned count = 0;
    snprintf(place, sizeof place, "%d %s %s", launch->rank, launch->url, world->name);
    tutti_status status = count_opening(place, &count);
    if (status != TUTTI_OK)
        return status;
    snprintf(place, sizeof place, "%s %u", world->name, count);
    tu_sha1_text(place, strlen(place), digest);
    snprintf(url, 256, "%s-%.12s", launch->url, digest);
    return TUTTI_OK;
}

/* A secret in a file, for ranks that another launcher started: spaces and newlines at its end do not count. */
static tutti_status read_secret_file(const char *path, unsigned char secret[64], size_t *bytes) {
    struct stat about;
    unsigned char text[80];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd >= 0 && fstat(fd, &about) == 0 ? pread(fd, text, sizeof text, 0) : -1;
    int error = errno;
    if (fd >= 0)
        close(fd);
    if (got < 0)
        return tu_error_system(error, "the job's secret cannot be read from %s (TUTTI_SECRET_FILE)", path);
    if (S_ISREG(about.st_mode) && (about.st_mode & 077) != 0)
        return tu_error(TUTTI_ERROR_REFUSED, "others may read the job's secret in %s (TUTTI_SECRET_FILE): chmod 600 %s",
                        path, path);
    while (got > 0 && strchr(" \r\n", text[got - 1]) != NULL)
        got--;
    if (got < 16 || got > 64)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "the job's secret in %s (TUTTI_SECRET_FILE) has %zd bytes; it needs 16 to 64", path, got);
    memcpy(secret, text, (size_t)got);
    explicit_bzero(text, sizeof text);
    *bytes = (size_t)got;
    return TUTTI_OK;
}

/* The job's secret, from the descriptor that the launcher left open: 16 to 64 bytes, read from its start, so that every
 * world can. */
static tutti_status read_secret(const tu_settings *settings, unsigned char secret[64], size_t *bytes) {
    *bytes = 0;
    if (tu_settings_text(settings, TU_SETTING_SECRET_FD)[0] == 0) {
        const char *path = tu_settings_text(settings, TU_SETTING_SECRET_FILE);
        return path[0] != 0 ? read_secret_file(path, secret, bytes) : TUTTI_OK;
    }
    int fd = (int)tu_settings_number(settings, TU_SETTING_SECRET_FD);
    ssize_t got = pread(fd, secret, 64, 0);
    if (got < 0)
        return tu_error_system(errno, "the job's secret cannot be read from descriptor %d (TUTTI_SECRET_FD)", fd);
    if (got < 16)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "the job's secret on descriptor %d (TUTTI_SECRET_FD) has %zd bytes; it needs 16 to 64", fd,
                        got);
    *bytes = (size_t)got;
    return TUTTI_OK;
}

static bool address_in_use(void) {
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    return tutti_error_detail(&info) == TUTTI_OK && info.system_error == EADDRINUSE;
}

static tutti_status open_store(const tu_launch *launch, const tutti_world *world, int64_t deadline,
                               tutti_store **store) {
    char url[256];
    unsigned char secret[64];
    size_t secret_bytes;
    tutti_status status = complete_url(launch, world, url);
    if (status == TUTTI_OK)
        status = read_secret(&world->settings, secret, &secret_bytes);
    if (status != TUTTI_OK)
        return status;
    int64_t left = tu_deadline_left(deadline);
    tutti_tcp_store_options options = {
        .size = sizeof options,
        .timeout_ns = left > 0 ? left : 1,
        .server = launch->rank_0_hosts && launch->rank == 0,
        .secret = secret_bytes > 0 ? secret : NULL,
        .secret_bytes = secret_bytes,
        .trust_network = tu_settings_number(&world->settings, TU_SETTING_TRUST_NETWORK) != 0,
    };
    status = tutti_store_open_url(url, &options, store);
    bool taken = status != TUTTI_OK && options.server && address_in_use();
    if (taken) { /* by another world of ours, or by a store that was there first; if by something else, that will show
                  */
        TU_LOG(TUTTI_LOG_INFO, world->log, "world", "%s is taken; using the store that is there", url);
        options.server = false;
        status = tutti_store_open_url(url, &options, store);
    }
    memset(secret, 0, sizeof secret);
    if (status != TUTTI_OK && taken)
        tu_error_append(
            " (rank 0 could not serve the store itself, because %s is already in use: free it or choose another port)",
            url);
    else if (status != TUTTI_OK)
        tu_error_append(" (rank %d of %d, started by %s, tried to reach the meeting place %s)", launch->rank,
                        launch->size, launch->launcher, url);
    else
        TU_LOG(TUTTI_LOG_INFO, world->log, "world", "rank %d meets the others at %s%s", launch->rank, url,
               options.server ? ", which it serves" : "");
    return status;
}

/* Distinguishes this process from any other that ever used the store. */
static void process_text(char *text, size_t bytes) {
    char line[1024] = "", host[64] = "";
    unsigned long long start = 0;
    FILE *file = fopen("/proc/self/stat", "re");
    if (file != NULL) {
        if (fgets(line, sizeof line, file) != NULL) {
            const char *at = strrchr(line, ')');
            for (int field = 2; at != NULL && field < 22; field++)
                at = strchr(at + 1, ' ');
            if (at != NULL)
                start = strtoull(at + 1, NULL, 10);
        }
        fclose(file);
    }
    gethostname(host, sizeof host - 1);
    snprintf(text, bytes, "%s-%d-%llu", host, (int)getpid(), start);
}

/* Between "tcp://" and the port. False for other kinds of addresses. */
static bool host_of(const char *url, char *host, size_t bytes) {
    if (strncmp(url, "tcp://", 6) != 0)
        return false;
    const char *start = url + 6, *end = strrchr(url, ':');
    if (end == NULL || end <= start)
        return false;
    if (*start == '[' && end[-1] == ']') {
        start++;
        end--;
    }
    snprintf(host, bytes, "%.*s", (int)(end - start), start);
    return true;
}

/* What all keys of a world begin with; returns its length. Then comes the number of the opening. */
static int begin_key(const char *prefix, const char *world_name, char *key, size_t bytes) {
    return snprintf(key, bytes, "tutti/%s%s%s", prefix, prefix[0] != 0 ? "/" : "", world_name);
}

static void number_key(char *end, size_t bytes, int64_t number) {
    snprintf(end, bytes, "/%lld", (long long)number);
}

void tu_launch_cannot_meet(tutti_store *store, int rank, int size, int pid) {
    tutti_error_copy error;
    tu_error_save(&error);
    char key[64];
    int prefix = begin_key("", "default", key, sizeof key);
    number_key(key + prefix, sizeof key - (size_t)prefix, 1); /* the first opening of each rank */
    tutti_store *place;
    tutti_status status = tutti_store_open_prefix(key, store, &place);
    tu_error_restore(&error);
    if (status != TUTTI_OK)
        return;
    tu_job_options options = { .store = place, .name = "default", .world_rank = rank, .world_size = size };
    tu_job_cannot_open(&options, pid);
    tutti_store_release(place);
    tu_error_restore(&error);
}

tutti_status tu_launch_meet(const tu_launch *launch, tutti_world *world, int64_t deadline, tutti_store **out) {
    *out = NULL;
    if (launch->size == 1)
        return TUTTI_OK;
    tutti_store *base = launch->store;
    tutti_status status = TUTTI_OK;
    if (base == NULL)
        status = open_store(launch, world, deadline, &base);
    if (status != TUTTI_OK)
        return status;
    char key[640], process[128];
    process_text(process, sizeof process);
    int prefix = begin_key(launch->prefix, world->name, key, sizeof key);
    snprintf(key + prefix, sizeof key - (size_t)prefix, "/openings/%d/%s", launch->rank, process);
    int64_t number;
    status = tutti_store_add(base, key, 1, &number);
    if (status == TUTTI_OK) {
        number_key(key + prefix, sizeof key - (size_t)prefix, number);
        status = tutti_store_open_prefix(key, base, out);
    }
    if (launch->store == NULL)
        tutti_store_release(base); /* the prefix store keeps it */
    char host[128];
    if (status == TUTTI_OK && host_of(launch->url, host, sizeof host)) {
        status = tu_address_choose(host, tu_settings_text(&world->settings, TU_SETTING_INTERFACE), world->address,
                                   sizeof world->address);
        if (status != TUTTI_OK) {
            tutti_store_release(*out);
            *out = NULL;
        } else {
            TU_LOG(TUTTI_LOG_INFO, world->log, "world", "this host's address on the route to %s is %s", host,
                   world->address);
        }
    }
    return status;
}
