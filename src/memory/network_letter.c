/* SPDX-License-Identifier: Apache-2.0
 *
 * Letters: what a member tells another beside the operations that all members do alike.
 *
 * Whoever writes one is at most a window ahead of what the other has taken, member by member: one that takes nothing,
 * because it is busy with something else, holds up nobody but those who write to it, and its memory does not fill.
 */
#include <stdlib.h>
#include <string.h>

#include "memory/network_inner.h"

#define WINDOW ((uint64_t)4 << 20) /* bytes that a writer may be ahead of a member */
#define COST ((uint64_t)256)       /* of a letter, besides its bytes */

tutti_status tu_network_letters_make(tu_network_group *side) {
    size_t size = (size_t)side->group->size;
    side->letters = calloc(size, sizeof *side->letters);
    if (side->letters == NULL)
        return TUTTI_ERROR_MEMORY;
    for (size_t member = 0; member < size; member++)
        side->letters[member].end = &side->letters[member].first;
    return TUTTI_OK;
}

void tu_network_letters_free(tu_network_group *side) {
    for (int member = 0; side->letters != NULL && member < side->group->size; member++)
        for (tu_network_kept *kept = side->letters[member].first, *next; kept != NULL; kept = next) {
            next = kept->next;
            tu_network_free_kept(side->network, kept);
        }
    free(side->letters);
}

/* ---- writing ---- */

bool tu_network_write(tu_network_group *side, int member, const void *head, size_t head_bytes, tu_letter_fill *fill,
                      void *argument, uint64_t offset, size_t bytes) {
    tu_network *network = side->network;
    tu_network_letters *letters = &side->letters[member];
    size_t all = head_bytes + bytes;
    int peer = side->group->ranks[member];
    pthread_mutex_lock(&network->lock);
    bool room = letters->sent - letters->taken + all + COST <= WINDOW;
    tu_dispatch *dispatch = room ? tu_network_own_begin(network, peer, all) : NULL;
    if (dispatch != NULL) {
        unsigned char *data = (unsigned char *)(dispatch + 1);
        memcpy(data, head, head_bytes);
        if (bytes > 0)
            fill(argument, data + head_bytes, offset, bytes);
        tu_network_header header = { .magic = TU_NETWORK_MAGIC,
                                     .version = TU_NETWORK_VERSION,
                                     .door = network->peers[peer].door,
                                     .key = side->group->key,
                                     .total = all,
                                     .kind = TU_NETWORK_LETTER,
                                     .from = network->world->rank };
        letters->sent += all + COST;
        tu_network_own_send(network, dispatch, &header);
    }
    pthread_mutex_unlock(&network->lock);
    return dispatch != NULL;
}

void tu_network_letter_read(tu_network_group *side, int member, uint64_t bytes) {
    tu_network_letters *letters = &side->letters[member];
    uint64_t ahead = letters->sent - letters->taken;
    letters->taken += bytes < ahead ? bytes : ahead; /* more than was sent is no room */
    tu_network_wake(side->network);
}

/* ---- taking ---- */

/* How much of a member's letters was taken, if there is a way to it. */
static void tell_read(tu_network_group *side, int member) {
    tu_network_letters *letters = &side->letters[member];
    int rank = side->group->ranks[member];
    if (!side->network->peers[rank].connected)
        return;
    tu_network_own(side->network, rank, TU_NETWORK_READ, side->group->key, 0, letters->owed, NULL, NULL, 0);
    letters->owed = 0;
}

void tu_network_letters_settle(tu_network_group *side, int rank) {
    int member = side->member_of[rank];
    if (member >= 0 && side->letters[member].owed >= WINDOW / 4)
        tell_read(side, member);
}

void tu_network_letter_keep(tu_network_group *side, int member, tu_network_kept *kept) {
    tu_network_letters *letters = &side->letters[member];
    kept->next = NULL;
    *letters->end = kept;
    letters->end = &kept->next;
    /* Pairs with tu_network_has_letters; the letter itself is read with the lock held. */
    atomic_fetch_add_explicit(&side->letter_count, 1, memory_order_release);
    tu_network_wake(side->network);
}

bool tu_network_letter_arrived(tu_network_group *side, int member, const tu_network_header *header, const void *data,
                               size_t bytes, void *parcel) {
    tu_network_kept *kept = tu_network_keep(header, data, bytes, parcel);
    if (kept == NULL) {
        tu_network_cut(side->network, side->group->ranks[member], "there was no memory for its messages");
        return false;
    }
    tu_network_letter_keep(side, member, kept);
    return true;
}

bool tu_network_has_letters(const tu_network_group *side) {
    return atomic_load_explicit(&side->letter_count, memory_order_acquire) != 0; /* pairs with tu_network_letter_keep */
}

const void *tu_network_letter(tu_network_group *side, int member, size_t *bytes) {
    pthread_mutex_lock(&side->network->lock);
    const tu_network_kept *kept = side->letters[member].first;
    pthread_mutex_unlock(&side->network->lock);
    *bytes = kept != NULL ? kept->bytes : 0;
    return kept != NULL ? kept->data : NULL;
}

void tu_network_letter_taken(tu_network_group *side, int member) {
    tu_network *network = side->network;
    tu_network_letters *letters = &side->letters[member];
    pthread_mutex_lock(&network->lock);
    tu_network_kept *kept = letters->first;
    letters->first = kept->next;
    if (kept->next == NULL)
        letters->end = &letters->first;
    letters->owed += kept->bytes + COST;
    tu_network_free_kept(network, kept);
    atomic_fetch_sub_explicit(&side->letter_count, 1, memory_order_relaxed);
    if (letters->owed >= WINDOW / 4)
        tell_read(side, member);
    pthread_mutex_unlock(&network->lock);
}
