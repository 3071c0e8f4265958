/* SPDX-License-Identifier: Apache-2.0
 *
 * Listening. Who may reach a server is decided here, by the address it listens on.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/log.h"
#include "store/address.h"

enum {
    BACKLOG = 4096 /* the kernel cuts it to net.core.somaxconn */
};

void tu_store_listen_end(tu_listeners *listeners) {
    for (int i = 0; i < listeners->count; i++)
        close(listeners->descriptor[i]);
    listeners->count = 0;
    if (listeners->unlink_path[0] != 0)
        unlink(listeners->unlink_path);
}

static tutti_status refuse_open(const tu_address *address) {
    return tu_error(
        TUTTI_ERROR_REFUSED,
        "a store server without a secret on \"%s\" would serve everybody who can reach this host; give it a secret, "
        "use a Unix socket or loopback, or say that the network is trusted (trust_network, TUTTI_TRUST_NETWORK=1)",
        address->host);
}

static tutti_status cannot_listen(const tu_address *address, int error) {
    struct stat status;
    bool file = strncmp(address->host, "unix:/", 6) == 0;
    const char *why = "";
    if (error == EADDRINUSE && file && lstat(address->host + 5, &status) == 0 && !S_ISSOCK(status.st_mode))
        why = "; what lies there is no socket, and is left alone: choose another path";
    else if (error == EADDRINUSE)
        why = file ? "; another server has it: choose another path"
                   : "; another server has it: choose another port, or 0 for a free one";
    return tu_error_system(
        error, "The server socket has failed to listen on any local network address: port %d, host \"%s\"%s",
        address->port, address->host, why);
}

/* ---- one socket ---- */

/* A socket file that nobody listens on is left from a server that was killed. */
static bool remove_stale(const tu_socket_address *address, socklen_t length) {
    if (address->local.sun_path[0] == 0)
        return false;
    int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe < 0)
        return false;
    bool stale = connect(probe, &address->any, length) != 0 && errno == ECONNREFUSED;
    close(probe);
    /* Connecting to a plain file is refused in the same way; only a socket is ever removed, and no link is followed. */
    struct stat found;
    return stale && lstat(address->local.sun_path, &found) == 0 && S_ISSOCK(found.st_mode) &&
           unlink(address->local.sun_path) == 0;
}

/* Returns the descriptor, or minus an errno. */
static int listen_on(const tu_socket_address *address, socklen_t length) {
    int descriptor = socket(address->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (descriptor < 0)
        return -errno;
    int on = 1, off = 0, error;
    if (address->any.sa_family == AF_UNIX)
        fchmod(descriptor, S_IRUSR | S_IWUSR); /* what bind gives the file */
    else
        setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (address->any.sa_family == AF_INET6) /* every address includes those of IPv4 */
        setsockopt(descriptor, IPPROTO_IPV6, IPV6_V6ONLY,
                   IN6_IS_ADDR_UNSPECIFIED(&address->ipv6.sin6_addr) ? &off : &on, sizeof on);
    error = bind(descriptor, &address->any, length) == 0 ? 0 : errno;
    if (error == EADDRINUSE && address->any.sa_family == AF_UNIX && remove_stale(address, length))
        error = bind(descriptor, &address->any, length) == 0 ? 0 : errno;
    if (error == 0 && listen(descriptor, BACKLOG) != 0)
        error = errno;
    if (error == 0)
        return descriptor;
    close(descriptor);
    return -error;
}

/* The port and the address for ourselves, from the first socket. */
static tutti_status find_own(tu_listeners *listeners) {
    tu_socket_address *own = &listeners->own;
    listeners->own_length = sizeof *own;
    if (getsockname(listeners->descriptor[0], &own->any, &listeners->own_length) != 0)
        return tu_error_system(errno, "the store server cannot ask for its own address (getsockname)");
    listeners->port = tu_socket_port(own);
    if (own->any.sa_family == AF_INET && own->ipv4.sin_addr.s_addr == htonl(INADDR_ANY))
        own->ipv4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (own->any.sa_family == AF_INET6 && IN6_IS_ADDR_UNSPECIFIED(&own->ipv6.sin6_addr)) {
        int only = 0;
        socklen_t length = sizeof only;
        getsockopt(listeners->descriptor[0], IPPROTO_IPV6, IPV6_V6ONLY, &only, &length);
        if (only) {
            own->ipv6.sin6_addr = in6addr_loopback;
        } else { /* IPv4's loopback is there even where IPv6 was turned off */
            own->ipv4 = (struct sockaddr_in){ .sin_family = AF_INET,
                                              .sin_port = htons((uint16_t)listeners->port),
                                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
            listeners->own_length = sizeof own->ipv4;
        }
    }
    return TUTTI_OK;
}

/* ---- several ---- */

static void set_port(tu_socket_address *address, int port) {
    if (address->any.sa_family == AF_INET)
        address->ipv4.sin_port = htons((uint16_t)port);
    else if (address->any.sa_family == AF_INET6)
        address->ipv6.sin6_port = htons((uint16_t)port);
}

/* Listens on each of the list, all on the first one's port. An address family that this host does not have is left out.
 * Returns 0 or an errno. */
static int listen_on_each(const tu_address_list *list, tu_listeners *listeners) {
    int error = EADDRNOTAVAIL;
    for (size_t i = 0; i < list->count && listeners->count < TU_LISTENERS; i++) {
        tu_socket_address address = list->address[i];
        if (listeners->count > 0)
            set_port(&address, listeners->port);
        int descriptor = listen_on(&address, list->length[i]);
        if (descriptor < 0) {
            error = -descriptor;
            if (error == EADDRNOTAVAIL || error == EAFNOSUPPORT)
                continue;
            return error;
        }
        listeners->descriptor[listeners->count++] = descriptor;
        if (listeners->count == 1 && find_own(listeners) != TUTTI_OK)
            return ENOTSOCK;
    }
    return listeners->count > 0 ? 0 : error;
}

/* A free port of the first address may be taken on the second: then another is tried. */
static int listen_on_list(const tu_address_list *list, bool any_port, tu_listeners *listeners) {
    enum {
        TRIES = 16
    };
    int error = 0;
    for (int i = 0; i < TRIES; i++) {
        error = listen_on_each(list, listeners);
        if (error == 0)
            break;
        tu_store_listen_end(listeners);
        if (error != EADDRINUSE || !any_port)
            break;
    }
    return error;
}

static bool all_loopback(const tu_address_list *list) {
    for (size_t i = 0; i < list->count; i++) {
        if (!tu_socket_is_loopback(&list->address[i]))
            return false;
    }
    return true;
}

static bool not_ours(int error) {
    return error == EADDRNOTAVAIL || error == EAFNOSUPPORT;
}

static int listen_everywhere(int port, tu_listeners *listeners) {
    tu_address_list ipv6 = { .count = 1, .length = { sizeof(struct sockaddr_in6) } };
    ipv6.address[0].ipv6 = (struct sockaddr_in6){ .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port) };
    int error = listen_on_list(&ipv6, port == 0, listeners); /* covers IPv4 too */
    if (!not_ours(error))
        return error;
    tu_address_list ipv4 = { .count = 1, .length = { sizeof(struct sockaddr_in) } };
    ipv4.address[0].ipv4 = (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
    return listen_on_list(&ipv4, port == 0, listeners);
}

tutti_status tu_store_listen(const tu_address *address, bool may_be_open, int64_t deadline, tu_listeners *listeners) {
    *listeners = (tu_listeners){ 0 };
    tu_address_list list;
    tutti_status status = tu_address_resolve(address, deadline, &list);
    if (status != TUTTI_OK)
        return status;
    bool everywhere = address->host[0] == 0 || (list.named && may_be_open);
    bool open_to_others = everywhere || !all_loopback(&list);
    if (open_to_others && !may_be_open)
        return refuse_open(address);

    int error =
        everywhere ? listen_everywhere(address->port, listeners) : listen_on_list(&list, address->port == 0, listeners);
    if (!everywhere && open_to_others && not_ours(error)) {
        TU_LOG(TUTTI_LOG_INFO, NULL, "store", "%s is no address of this host: listening on all that it has",
               address->host);
        error = listen_everywhere(address->port, listeners);
    }
    if (error != 0)
        return cannot_listen(address, error);
    listeners->open_to_others = open_to_others;
    if (tu_address_is_unix(address) && address->host[5] == '/')
        memcpy(listeners->unlink_path, address->host + 5, strlen(address->host + 5) + 1);
    return TUTTI_OK;
}

tutti_status tu_store_listen_adopt(int descriptor, const tu_address *address, bool may_be_open,
                                   tu_listeners *listeners) {
    *listeners = (tu_listeners){ .count = 1, .descriptor = { descriptor } };
    int listening = 0;
    socklen_t length = sizeof listening;
    if (getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &listening, &length) != 0 || !listening)
        return tu_error(TUTTI_ERROR_ARGUMENT, "descriptor %d, given as listen_fd, is not a listening socket",
                        descriptor);
    tu_socket_address bound = { 0 };
    length = sizeof bound;
    if (getsockname(descriptor, &bound.any, &length) != 0)
        return tu_error_system(errno, "descriptor %d, given as listen_fd, has no address", descriptor);
    if (address->port != 0 && tu_socket_port(&bound) != address->port)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "descriptor %d, given as listen_fd, listens on port %d, not on the port asked for, %d",
                        descriptor, tu_socket_port(&bound), address->port);
    listeners->open_to_others = !tu_socket_is_loopback(&bound);
    if (listeners->open_to_others && !may_be_open)
        return refuse_open(address);
    tutti_status status = find_own(listeners);
    if (status != TUTTI_OK)
        return status;
    int flags = fcntl(descriptor, F_GETFL);
    if (flags < 0 || fcntl(descriptor, F_SETFL, flags | O_NONBLOCK) != 0 || fcntl(descriptor, F_SETFD, FD_CLOEXEC) != 0)
        return tu_error_system(errno, "descriptor %d, given as listen_fd, cannot be set up", descriptor);
    return TUTTI_OK;
}
