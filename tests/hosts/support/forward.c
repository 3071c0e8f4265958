/* SPDX-License-Identifier: Apache-2.0
 *
 * A cable with faults, for tests: two TAP devices in two network namespaces, and this process between them, which
 * delays, reorders, drops and repeats frames. For kernels without netem.
 *
 *     forward NAMESPACE DEVICE NAMESPACE DEVICE [--delay MS] [--jitter MS] [--reorder PERCENT] [--loss PERCENT]
 *             [--repeat PERCENT] [--seed N]
 *
 * Namespaces are names of `ip netns`. A frame takes `delay` and up to `jitter` more, but keeps its place; of `reorder`
 * percent it is taken out, and comes a delay (at least 1 ms) later than its neighbours. Prints "ready" when the devices
 * are there, and ends with its parent.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define FRAME 2048  /* bytes, at most */
#define FRAMES 8192 /* that are under way in one direction; more are lost, as in a switch */

typedef struct frame {
    int64_t due; /* ns */
    uint64_t number;
    size_t bytes;
    unsigned char data[FRAME];
} frame;

/* One direction: a heap of frames by the time at which they are due. */
typedef struct way {
    int from, to;
    frame *frames[FRAMES];
    int count;
    int64_t last; /* when the last frame that kept its place is due */
} way;

static double delay_ms, jitter_ms, reorder, loss, repeat;
static uint64_t state = 1, numbers;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* In [0, 1). */
static double chance(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (double)(state >> 11) * 0x1p-53;
}

/* ---- devices ---- */

static int fail(const char *what, const char *name) {
    fprintf(stderr, "forward: %s %s: %s\n", what, name, strerror(errno));
    exit(1);
}

static int open_device(const char *name_of_namespace, const char *device) {
    char path[256];
    snprintf(path, sizeof path, "/run/netns/%s", name_of_namespace);
    int namespace = open(path, O_RDONLY | O_CLOEXEC);
    if (namespace < 0 || setns(namespace, CLONE_NEWNET) != 0)
        fail("namespace", path);
    close(namespace);
    int made = open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK);
    struct ifreq request = { .ifr_flags = IFF_TAP | IFF_NO_PI };
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", device);
    if (made < 0 || ioctl(made, TUNSETIFF, &request) != 0)
        fail("device", device);
    return made;
}

/* ---- frames ---- */

static bool sooner(const frame *one, const frame *other) {
    return one->due != other->due ? one->due < other->due : one->number < other->number;
}

static void add(way *way, const unsigned char *data, size_t bytes, int64_t due) {
    frame *made = way->count < FRAMES ? malloc(sizeof *made) : NULL;
    if (made == NULL)
        return;
    made->due = due;
    made->number = numbers++;
    made->bytes = bytes;
    memcpy(made->data, data, bytes);
    int at = way->count++;
    for (; at > 0 && sooner(made, way->frames[(at - 1) / 2]); at = (at - 1) / 2)
        way->frames[at] = way->frames[(at - 1) / 2];
    way->frames[at] = made;
}

static frame *take(way *way) {
    frame *first = way->frames[0], *last = way->frames[--way->count];
    int at = 0;
    for (int child; (child = 2 * at + 1) < way->count; at = child) {
        if (child + 1 < way->count && sooner(way->frames[child + 1], way->frames[child]))
            child++;
        if (!sooner(way->frames[child], last))
            break;
        way->frames[at] = way->frames[child];
    }
    way->frames[at] = last;
    return first;
}

static void accept_frame(way *way, const unsigned char *data, size_t bytes) {
    if (chance() < loss)
        return;
    int64_t delay = (int64_t)(1e6 * (delay_ms + jitter_ms * chance())), due = now() + delay;
    if (chance() < reorder) {
        due += (int64_t)(1e6 * (delay_ms > 1 ? delay_ms : 1));
    } else {
        due = due > way->last ? due : way->last;
        way->last = due;
    }
    add(way, data, bytes, due);
    if (chance() < repeat)
        add(way, data, bytes, due);
}

static void read_frames(way *way) {
    unsigned char data[FRAME];
    ssize_t bytes;
    while ((bytes = read(way->from, data, sizeof data)) > 0)
        accept_frame(way, data, (size_t)bytes);
}

static void write_frames(way *way) {
    while (way->count > 0 && way->frames[0]->due <= now()) {
        frame *due = take(way);
        (void)!write(way->to, due->data, due->bytes); /* a device that is down loses it */
        free(due);
    }
}

static void wait_for_frames(way ways[2]) {
    struct pollfd polled[2] = { { .fd = ways[0].from, .events = POLLIN }, { .fd = ways[1].from, .events = POLLIN } };
    int64_t due = INT64_MAX;
    for (int i = 0; i < 2; i++)
        if (ways[i].count > 0 && ways[i].frames[0]->due < due)
            due = ways[i].frames[0]->due;
    int64_t left = due == INT64_MAX ? INT64_C(1000000000) : due - now();
    left = left > 0 ? left : 0;
    ppoll(polled, 2, &(struct timespec){ left / 1000000000, left % 1000000000 }, NULL);
}

static bool read_options(int count, char **arguments) {
    double seed = 1;
    struct {
        const char *name;
        double *value, scale;
    } known[] = { { "--delay", &delay_ms, 1 }, { "--jitter", &jitter_ms, 1 }, { "--reorder", &reorder, 0.01 },
                  { "--loss", &loss, 0.01 },   { "--repeat", &repeat, 0.01 }, { "--seed", &seed, 1 } };
    for (int i = 0; i + 1 < count; i += 2) {
        size_t option = 0;
        while (option < sizeof known / sizeof *known && strcmp(known[option].name, arguments[i]) != 0)
            option++;
        if (option == sizeof known / sizeof *known)
            return false;
        *known[option].value = atof(arguments[i + 1]) * known[option].scale;
    }
    state = (uint64_t)seed * 0x9e3779b97f4a7c15u + 1;
    return count % 2 == 0;
}

int main(int count, char **arguments) {
    static way ways[2];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_TIMERSLACK, 1000);
    if (count < 5 || !read_options(count - 5, arguments + 5)) {
        fprintf(stderr,
                "usage: forward NAMESPACE DEVICE NAMESPACE DEVICE [--delay MS] [--jitter MS] [--reorder PERCENT] "
                "[--loss PERCENT] [--repeat PERCENT] [--seed N]\n");
        return 2;
    }
    int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    ways[0].from = ways[1].to = open_device(arguments[1], arguments[2]);
    ways[1].from = ways[0].to = open_device(arguments[3], arguments[4]);
    if (home < 0 || setns(home, CLONE_NEWNET) != 0) /* nobody finds it among the processes of a host */
        fail("namespace", "of this process");
    puts("ready");
    fflush(stdout);
    for (;;) {
        wait_for_frames(ways);
        for (int i = 0; i < 2; i++) {
            read_frames(&ways[i]);
            write_frames(&ways[i]);
        }
    }
}
