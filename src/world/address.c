/* SPDX-License-Identifier: Apache-2.0
 *
 * Which of this host's addresses others should use. By default the one on the route to the meeting place: the kernel is
 * asked, by connecting a datagram socket, which sends nothing. Resolving one's own host name instead gives 127.0.x.x in
 * many containers.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"
#include "world/launch.h"

static void address_text(const struct sockaddr *address, char *text, size_t bytes) {
    if (address->sa_family == AF_INET6)
        inet_ntop(AF_INET6, &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr, text, (socklen_t)bytes);
    else
        inet_ntop(AF_INET, &((const struct sockaddr_in *)(const void *)address)->sin_addr, text, (socklen_t)bytes);
}

static tutti_status by_route(const char *host, char *text, size_t bytes) {
    struct addrinfo hints = { .ai_family = AF_UNSPEC, .ai_socktype = SOCK_DGRAM }, *found;
    int failed = getaddrinfo(host, "9", &hints, &found);
    if (failed != 0)
        return tu_error(TUTTI_ERROR_NETWORK, "the host %s cannot be resolved: %s", host, gai_strerror(failed));
    int error = 0;
    bool done = false;
    for (struct addrinfo *at = found; at != NULL && !done; at = at->ai_next) {
        struct sockaddr_storage own;
        socklen_t size = sizeof own;
        int fd = socket(at->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        if (fd < 0 || connect(fd, at->ai_addr, at->ai_addrlen) != 0 ||
            getsockname(fd, (struct sockaddr *)&own, &size) != 0) {
            error = errno;
        } else {
            address_text((struct sockaddr *)&own, text, bytes);
            done = true;
        }
        if (fd >= 0)
            close(fd);
    }
    freeaddrinfo(found);
    return done ? TUTTI_OK : tu_error_system(error, "there is no route to %s", host);
}

/* "10.1.0.0/16" holds this address. */
static bool in_network(const struct sockaddr *address, const char *network) {
    char text[64];
    const char *slash = strchr(network, '/');
    snprintf(text, sizeof text, "%.*s", (int)(slash - network), network);
    struct in_addr base;
    long bits = strtol(slash + 1, NULL, 10);
    if (address->sa_family != AF_INET || inet_pton(AF_INET, text, &base) != 1 || bits < 0 || bits > 32)
        return false;
    uint32_t mask = bits == 0 ? 0 : UINT32_MAX << (32 - bits);
    uint32_t own = ntohl(((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr);
    return (own & mask) == (ntohl(base.s_addr) & mask);
}

/* Whether one interface fits the setting: a comma list of names, prefixes and networks; with ^ in front, whether it
 * fits none. */
static bool fits(const struct ifaddrs *interface, const char *setting) {
    bool exclude = setting[0] == '^';
    char list[256];
    snprintf(list, sizeof list, "%s", setting + exclude);
    char *rest = list;
    for (char *item; (item = strsep(&rest, ",")) != NULL;) {
        bool match = strchr(item, '/') != NULL ? in_network(interface->ifa_addr, item)
                                               : strncmp(interface->ifa_name, item, strlen(item)) == 0;
        if (item[0] != 0 && match)
            return !exclude;
    }
    return exclude && (interface->ifa_flags & IFF_LOOPBACK) == 0;
}

static tutti_status by_interface(const char *setting, char *text, size_t bytes) {
    struct ifaddrs *all;
    if (getifaddrs(&all) != 0)
        return tu_error_system(errno, "the network interfaces cannot be listed");
    char names[256] = "";
    bool done = false;
    static const int families[] = { AF_INET, AF_INET6 };
    for (int i = 0; i < 2 && !done; i++)
        for (struct ifaddrs *at = all; at != NULL && !done; at = at->ifa_next) {
            if (at->ifa_addr == NULL || at->ifa_addr->sa_family != families[i] || (at->ifa_flags & IFF_UP) == 0)
                continue;
            size_t used = strlen(names);
            snprintf(names + used, sizeof names - used, "%s%s", used > 0 ? ", " : "", at->ifa_name);
            done = fits(at, setting);
            if (done)
                address_text(at->ifa_addr, text, bytes);
        }
    freeifaddrs(all);
    if (done)
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_ARGUMENT,
                    "TUTTI_INTERFACE is \"%s\", which fits no interface that is up; there are: %s", setting, names);
}

tutti_status tu_address_choose(const char *host, const char *interface, char *address, size_t bytes) {
    return interface[0] != 0 ? by_interface(interface, address, bytes) : by_route(host, address, bytes);
}
