/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti doctor --hosts`: whether this host can start launchers on others, and whether they can reach it: names,
 * the address and interface that are chosen and why, MTU, ssh, the other host's version of Tutti, firewalls.
 */
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/settings.h"
#include "base/thread.h"
#include "doctor.h"
#include "machine.h"
#include "remote.h"
#include "store/address.h"
#include "tool.h"
#include "world/launch.h"

#define PATIENCE (REMOTE_PATIENCE_S * TU_SECOND)

/* ---- commands there ---- */

typedef struct answer {
    char text[512]; /* the first line that it printed */
    int status;     /* wait status; -1: it did not end in time */
} answer;

static void ask(const char *rsh, const char *host, const char *line, answer *answer) {
    remote_command command;
    *answer = (struct answer){ .status = -1 };
    if (!remote_start(&command, rsh, host, line, false, true))
        return;
    (void)remote_line(&command, answer->text, sizeof answer->text);
    answer->status = remote_end(&command);
}

/* ---- the checks ---- */

/* Name of the interface that has this address, and its MTU. */
static void find_interface(const char *address, char *name, size_t bytes, int64_t *mtu) {
    struct ifaddrs *all, *at;
    snprintf(name, bytes, "?");
    *mtu = -1;
    if (getifaddrs(&all) != 0)
        return;
    for (at = all; at != NULL; at = at->ifa_next) {
        char text[64] = "", path[128];
        socklen_t length = 0;
        if (at->ifa_addr != NULL && at->ifa_addr->sa_family == AF_INET)
            length = sizeof(struct sockaddr_in);
        else if (at->ifa_addr != NULL && at->ifa_addr->sa_family == AF_INET6)
            length = sizeof(struct sockaddr_in6);
        if (length == 0 || getnameinfo(at->ifa_addr, length, text, sizeof text, NULL, 0, NI_NUMERICHOST) != 0 ||
            strcmp(text, address) != 0)
            continue;
        snprintf(name, bytes, "%s", at->ifa_name);
        snprintf(path, sizeof path, "/sys/class/net/%s/mtu", at->ifa_name);
        if (machine_first_line(path, text, sizeof text))
            *mtu = strtoll(text, NULL, 10);
        break;
    }
    freeifaddrs(all);
}

/* This host's address for that one; false when there is none. */
static bool check_route(report *to, const char *subject, const char *host, char *address, size_t bytes) {
    const char *interface = getenv("TUTTI_INTERFACE");
    bool chosen = interface != NULL && interface[0] != 0;
    if (tu_address_choose(host, chosen ? interface : "", address, bytes) != TUTTI_OK) {
        doctor_put(to, DOCTOR_FAILURE, subject,
                   chosen ? "correct TUTTI_INTERFACE" : "add the name to DNS or /etc/hosts, or give its address", "%s",
                   tutti_error_message());
        return false;
    }
    char name[64];
    int64_t mtu;
    find_interface(address, name, sizeof name, &mtu);
    bool loopback = strncmp(address, "127.", 4) == 0 || strcmp(address, "::1") == 0;
    doctor_put(to, loopback ? DOCTOR_NOTE : DOCTOR_GOOD, subject, NULL,
               "it would reach this host at %s, on %s (MTU %lld), chosen by %s%s", address, name, (long long)mtu,
               chosen ? "TUTTI_INTERFACE" : "the route to it", loopback ? ": it is this host itself" : "");
    return true;
}

static bool check_version(report *to, const char *subject, const char *rsh, const char *host, const char *self) {
    answer answer;
    char line[4352];
    snprintf(line, sizeof line, "%s --version", self);
    ask(rsh, host, line, &answer);
    char own[64];
    snprintf(own, sizeof own, "%s", TUTTI_VERSION_STRING);
    if (answer.status == 0 && strstr(answer.text, own) != NULL) {
        doctor_put(to, DOCTOR_GOOD, subject, NULL, "%s gets there, and %s there is of the same version, %s",
                   remote_name(rsh), self, own);
        return true;
    }
    if (answer.status == 0)
        doctor_put(to, DOCTOR_FAILURE, subject, "install the same version on all hosts",
                   "%s there says \"%s\", here it is %s", self, answer.text, own);
    else if (answer.status == -1)
        doctor_put(to, DOCTOR_FAILURE, subject, "try it by hand; does it ask for a password?",
                   "%s does not get there in %d s", remote_name(rsh), (int)(PATIENCE / TU_SECOND));
    else
        doctor_put(to, DOCTOR_FAILURE, subject, "try it by hand: a key without a password, and tutti at the same place",
                   "%s %s %s fails: %s", remote_name(rsh), host, line, answer.text);
    return false;
}

/* ---- the way back ---- */

#define ECHO_BYTES ((size_t)64 << 10) /* more than any packet has */
#define ECHO_SECONDS 3

typedef struct echo {
    tu_listeners listeners;
    _Atomic bool over;
} echo;

static bool move_all(int descriptor, char *bytes, bool reads) {
    for (size_t done = 0; done < ECHO_BYTES;) {
        ssize_t count = reads ? recv(descriptor, bytes + done, ECHO_BYTES - done, 0)
                              : send(descriptor, bytes + done, ECHO_BYTES - done, MSG_NOSIGNAL);
        if (count <= 0)
            return false;
        done += (size_t)count;
    }
    return true;
}

static void limit_time(int descriptor) {
    struct timeval limit = { .tv_sec = ECHO_SECONDS };
    setsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(descriptor, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

/* Sends back what comes, connection by connection. */
static void *send_back(void *argument) {
    echo *this = argument;
    static char bytes[ECHO_BYTES];
    while (!atomic_load_explicit(&this->over, memory_order_acquire)) { /* pairs with the end of check_way_back */
        struct pollfd polled[TU_LISTENERS];
        for (int i = 0; i < this->listeners.count; i++)
            polled[i] = (struct pollfd){ .fd = this->listeners.descriptor[i], .events = POLLIN };
        poll(polled, (nfds_t)this->listeners.count, 50);
        for (int i = 0; i < this->listeners.count; i++) {
            int descriptor = polled[i].revents != 0 ? accept4(polled[i].fd, NULL, NULL, SOCK_CLOEXEC) : -1;
            if (descriptor < 0)
                continue;
            limit_time(descriptor);
            if (move_all(descriptor, bytes, true))
                (void)!move_all(descriptor, bytes, false);
            close(descriptor);
        }
    }
    return NULL;
}

/* What the other end has said of its interface, and of UCX there. */
static void compare_ends(report *to, const char *subject, const char *address, const char *said) {
    char own_name[64], name[64] = "?", own_ucx[256];
    int64_t own_mtu;
    long mtu = -1, path = -1;
    find_interface(address, own_name, sizeof own_name, &own_mtu);
    int used = 0;
    if (sscanf(said, "mtu %ld path %ld on %63s ucx %n", &mtu, &path, name, &used) < 3 || used == 0)
        return;
    long least = mtu < own_mtu ? mtu : (long)own_mtu;
    if (mtu != own_mtu)
        doctor_put(to, DOCTOR_WARNING, subject, "give both ends one MTU: ip link set dev INTERFACE mtu N",
                   "its end has MTU %ld (%s), this one %lld (%s): packets that one sends may be too long for the other",
                   mtu, name, (long long)own_mtu, own_name);
    else if (path < least)
        doctor_put(to, DOCTOR_WARNING, subject, "look at the MTU of what lies between",
                   "both ends have MTU %ld, but the way between them takes %ld alone", mtu, path);
    else
        doctor_put(to, DOCTOR_GOOD, subject, NULL, "its end has MTU %ld (%s) as this one has, and so does the way", mtu,
                   name);
    doctor_ucx(own_ucx, sizeof own_ucx);
    if (strcmp(own_ucx, said + used) != 0)
        doctor_put(to, DOCTOR_WARNING, subject, "install one version of UCX on all hosts", "there it is %s, here %s",
                   said + used, own_ucx);
    else
        doctor_put(to, DOCTOR_GOOD, subject, NULL, "there it is %s as here", own_ucx);
}

/* A connection from there to a port of this host. */
static void check_way_back(report *to, const char *subject, const char *rsh, const char *host, const char *self,
                           const char *address) {
    tu_address any;
    echo echo = { 0 };
    answer answer;
    char line[4600];
    pthread_t thread;
    if (tu_address_set(&any, "", 0) != TUTTI_OK ||
        tu_store_listen(&any, true, tu_deadline(PATIENCE), &echo.listeners) != TUTTI_OK) {
        doctor_put(to, DOCTOR_FAILURE, subject, "free some ports", "cannot listen here: %s", tutti_error_message());
        return;
    }
    int error = tu_thread_start("tutti-doctor", send_back, &echo, &thread);
    snprintf(line, sizeof line, "%s doctor --reach '%s' --port %d", self, address, echo.listeners.port);
    if (error == 0)
        ask(rsh, host, line, &answer);
    else
        answer = (struct answer){ .status = -1, .text = "no thread can be started here" };
    /* Acquired by the thread. */
    atomic_store_explicit(&echo.over, true, memory_order_release);
    if (error == 0)
        pthread_join(thread, NULL);
    tu_store_listen_end(&echo.listeners);
    if (answer.status == 0) {
        doctor_put(to, DOCTOR_GOOD, subject, NULL, "it reaches a port of this host at %s, also with long packets",
                   address);
        compare_ends(to, subject, address, answer.text);
    } else
        doctor_put(
            to, DOCTOR_FAILURE, subject,
            "let that host reach all ports of this one (firewall), or choose another interface with TUTTI_INTERFACE",
            "it cannot reach a port of this host at %s: %s", address, answer.text);
}

void doctor_hosts(report *to, const char *hosts, const char *rsh) {
    char self[4200], *list = strdup(hosts), *rest = list;
    remote_self(self, sizeof self);
    for (const char *item; list != NULL && (item = remote_next_host(&rest)) != NULL;) {
        char subject[300], address[256];
        const char *at = strrchr(item, '@');
        snprintf(subject, sizeof subject, "host %s", item);
        if (check_route(to, subject, at != NULL ? at + 1 : item, address, sizeof address) &&
            check_version(to, subject, rsh, item, self))
            check_way_back(to, subject, rsh, item, self, address);
    }
    free(list);
}

/* Of a connection: whether long packets get through it, and what it has for an MTU. 0, or what to exit with. */
static int try_long_packets(int descriptor, const char *host) {
    static char bytes[ECHO_BYTES];
    char own[64] = "", name[64], ucx[256];
    tu_socket_address address;
    socklen_t length = sizeof address;
    int path = 0;
    int64_t mtu;
    fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) & ~O_NONBLOCK);
    limit_time(descriptor);
    if (!move_all(descriptor, bytes, false) || !move_all(descriptor, bytes, true))
        return tool_fail("doctor: connects to %s, but long packets get lost on the way: compare the MTUs, and let ICMP "
                         "pass (firewall)",
                         host);
    if (getsockname(descriptor, &address.any, &length) == 0)
        (void)getnameinfo(&address.any, length, own, sizeof own, NULL, 0, NI_NUMERICHOST);
    find_interface(own, name, sizeof name, &mtu);
    bool six = address.any.sa_family == AF_INET6;
    length = sizeof path;
    if (getsockopt(descriptor, six ? IPPROTO_IPV6 : IPPROTO_IP, six ? IPV6_MTU : IP_MTU, &path, &length) != 0)
        path = (int)mtu;
    doctor_ucx(ucx, sizeof ucx);
    printf("mtu %lld path %d on %s ucx %s\n", (long long)mtu, path, name, ucx);
    return 0;
}

int doctor_reach(const char *host, int port) {
    tu_address address;
    tu_address_list list;
    if (tu_address_set(&address, host, port) != TUTTI_OK ||
        tu_address_resolve(&address, tu_deadline(5 * TU_SECOND), &list) != TUTTI_OK)
        return tool_fail("doctor: %s", tutti_error_message());
    int error = EADDRNOTAVAIL;
    for (size_t i = 0; i < list.count; i++) {
        int descriptor = socket(list.address[i].any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        error = descriptor < 0 || connect(descriptor, &list.address[i].any, list.length[i]) != 0 ? errno : 0;
        struct pollfd polled = { .fd = descriptor, .events = POLLOUT };
        socklen_t size = sizeof error;
        if (error == EINPROGRESS &&
            (poll(&polled, 1, 5000) <= 0 || getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &size) != 0))
            error = ETIMEDOUT;
        int result = error == 0 ? try_long_packets(descriptor, host) : -1;
        if (descriptor >= 0)
            close(descriptor);
        if (result >= 0)
            return result;
    }
    return tool_fail("doctor: cannot connect to %s port %d: %s", host, port, strerror(error));
}
