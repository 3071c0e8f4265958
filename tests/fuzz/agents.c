/* SPDX-License-Identifier: Apache-2.0
 *
 * What may come to a launcher from another host: any bytes, in any pieces, before and after the greeting.
 * rooms: base store hosts
 *
 * The first byte chooses: bit 0 a secret, bit 1 the hub's side, bit 2 a link that is open already. Then pieces: one
 * byte for the length, and the bytes.
 */
#include "fuzz.h"
#include "hosts/link.h"

static void fuzz_one(const uint8_t *data, size_t bytes) {
    if (bytes == 0)
        return;
    tu_secret secret = { .bytes = data[0] & 1 ? 32 : 0 };
    tu_link link;
    FUZZ_CHECK(tu_link_init(&link, (data[0] & 2) != 0, &secret) == TUTTI_OK);
    if (data[0] & 4)
        link.state = TU_LINK_OPEN;
    for (size_t at = 1; at < bytes && link.state != TU_LINK_BROKEN;) {
        size_t length = data[at++], room;
        length = length < bytes - at ? length : bytes - at;
        uint8_t *to = tu_link_room(&link, &room);
        FUZZ_CHECK(room > 0); /* whole frames are taken, so there is room for more */
        length = length < room ? length : room;
        memcpy(to, data + at, length);
        at += length;
        tu_link_came(&link, length);
        for (tu_frame frame, again; tu_link_take(&link, &frame);) {
            FUZZ_CHECK(frame.kind > 0 && frame.kind < TU_FRAME_KINDS);
            uint8_t written[TU_FRAME_MOST];
            size_t length_again = tu_frame_write(&frame, written);
            FUZZ_CHECK(tu_frame_read(written, length_again, &again) == (int)length_again);
            FUZZ_CHECK(memcmp(&frame, &again, sizeof frame) == 0);
            tu_link_put(&link, &frame);
        }
        if (link.out_used > 0)
            tu_link_sent(&link, link.out_used / 2 + 1);
    }
    FUZZ_CHECK(link.state != TU_LINK_BROKEN || link.why[0] != 0);
    tu_link_end(&link);
}

FUZZ_TARGET(agents)
