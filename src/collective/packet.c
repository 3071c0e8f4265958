/* SPDX-License-Identifier: Apache-2.0 */
#include "collective/packet.h"

#include <stdlib.h>
#include <string.h>

/* Where the channels lie: behind the page of the group, or of its part on this host. */
static unsigned char *find_area(tu_channels *channels, const tutti_group *group) {
    const tutti_group *of = channels->members == NULL ? group : group->here;
    if (of != NULL)
        return (unsigned char *)of->page + sizeof(tu_group_page);
    size_t bytes = tu_area_bytes(1); /* to itself a rank sends as to others */
    channels->own_area = aligned_alloc(TU_LINE, (bytes + TU_LINE - 1) / TU_LINE * TU_LINE);
    return channels->own_area != NULL ? memset(channels->own_area, 0, bytes) : NULL;
}

tutti_status tu_channels_open(tu_channels *channels, tu_collective *state, const int *members, int count) {
    channels->state = state;
    channels->members = members;
    channels->size = members == NULL ? state->size : count;
    channels->rank = state->rank;
    for (int place = 0; members != NULL && place < count; place++)
        if (members[place] == state->rank)
            channels->rank = place;
    channels->fragment_bytes = tu_area_fragment_bytes(channels->size);
    channels->cell_count = TU_AREA_FRAGMENTS * (int)(channels->fragment_bytes / TU_CELL_BYTES);
    channels->area = find_area(channels, state->group);
    size_t size = (size_t)channels->size;
    channels->sent = calloc(3 * size, sizeof(uint64_t));
    if (channels->sent == NULL || channels->area == NULL)
        return tu_error_memory("sends and receives", 3 * size * sizeof(uint64_t));
    channels->taken = channels->sent + size;
    channels->seen_taken = channels->taken + size;
    return TUTTI_OK;
}

void tu_channels_close(tu_channels *channels) {
    free(channels->sent);
    free(channels->own_area);
}

/* ---- posting ---- */

bool tu_packet_post_short(tu_channels *channels, int peer, tu_packet_kind kind, uint64_t message, uint32_t index,
                          uint64_t offset) {
    tu_packet *packet = tu_packet_next(channels, peer);
    if (packet == NULL)
        return false;
    packet->kind = kind;
    packet->message = message;
    packet->index = index;
    packet->offset = offset;
    tu_packet_post(channels, packet, peer);
    return true;
}

static bool is_free(tu_channels *channels, int cell) {
    int peer = channels->cells[cell].peer;
    uint64_t packet = channels->cells[cell].packet;
    if (channels->seen_taken[peer] >= packet)
        return true;
    /* Pairs with the release in tu_packet_taken: the cell has been read. */
    channels->seen_taken[peer] =
        atomic_load_explicit(&tu_channel_of(channels, channels->rank, peer)->taken, memory_order_acquire);
    return channels->seen_taken[peer] >= packet;
}

int tu_cell_find(tu_channels *channels) {
    for (int i = 0; i < channels->cell_count; i++) {
        int cell = (channels->next_cell + i) % channels->cell_count;
        if (is_free(channels, cell))
            return cell;
    }
    return -1;
}

void tu_cell_use(tu_channels *channels, int cell, int peer, uint64_t packet) {
    channels->cells[cell].peer = peer;
    channels->cells[cell].packet = packet;
    channels->next_cell = (cell + 1) % channels->cell_count;
}

/* Of a fragment. */
static int cells_of(const tu_channels *channels) {
    return channels->cell_count / TU_AREA_FRAGMENTS;
}

int tu_fragment_find(tu_channels *channels) {
    int cells = cells_of(channels);
    for (int fragment = 0; fragment < TU_AREA_FRAGMENTS; fragment++) {
        int cell = 0;
        while (cell < cells && is_free(channels, fragment * cells + cell))
            cell++;
        if (cell == cells)
            return fragment;
    }
    return -1;
}

void tu_fragment_use(tu_channels *channels, int fragment, int peer, uint64_t packet) {
    int cells = cells_of(channels);
    for (int cell = 0; cell < cells; cell++)
        tu_cell_use(channels, fragment * cells + cell, peer, packet);
}

bool tu_packet_post_fragment(tu_channels *channels, int peer, uint64_t message, uint64_t offset, size_t bytes,
                             void (*fill)(void *argument, void *to, uint64_t offset, size_t bytes), void *argument) {
    tu_packet *packet = tu_packet_next(channels, peer);
    int index = packet != NULL ? tu_fragment_find(channels) : -1;
    if (index < 0)
        return false;
    fill(argument, tu_fragment(channels, channels->rank, (uint32_t)index), offset, bytes);
    packet->kind = TU_PACKET_FRAGMENT;
    packet->message = message;
    packet->offset = offset;
    packet->bytes = bytes;
    packet->index = (uint32_t)index;
    tu_fragment_use(channels, index, peer, tu_packet_post(channels, packet, peer));
    return true;
}

/* ---- taking ---- */

bool tu_channel_empty(const tu_channels *channels, int sender, int receiver) {
    const tu_channel *channel = tu_channel_of(channels, sender, receiver);
    uint64_t taken = atomic_load_explicit(&channel->taken, memory_order_acquire); /* pairs with tu_packet_taken */
    return atomic_load_explicit(&channel->packets[taken % TU_PACKETS].number, memory_order_acquire) != taken + 1;
}
