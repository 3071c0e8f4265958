/* SPDX-License-Identifier: Apache-2.0
 *
 * For loops that are written at run time and run on the CPU: what src/loops/device.cuh has of CUDA else. A block's
 * phases run one after the other, each for all lanes of a team.
 */
#include <cstddef>
#include <cstdint>
#include <cstring>

struct tu_places;
#define HERE static inline
/* Where it runs comes as arguments, not in words of the thread: what address sanitizer guesses of these is wrong now
 * and then in libraries that are loaded late, and it ends the process then. */
#define LOOP(name)                                               \
    extern "C" __attribute__((visibility("default"))) void name( \
        const tu_places &args, [[maybe_unused]] int64_t standin_block, [[maybe_unused]] int64_t standin_blocks)
#define EACH_ELEMENT(i, first, total, step) \
    for (int64_t i = (first) + standin_block * (step); i < (total); i += standin_blocks * (step))
#define EACH_PACK(i, total, width, packs)                                                                   \
    for (int64_t block = standin_block; block * 256 * (packs) * (width) < (total); block += standin_blocks) \
        for (int64_t i = block * 256 * (packs) * (width), end = i + 256 * (width); i < end; i += (width))
#define EACH_ROW(row, count, lanes) for (int64_t row = standin_block; row < (count); row += standin_blocks)
#define EACH_LANE(lane, lanes) for (int lane = 0; lane < (lanes); lane++)
#define HELD(type, name, count) type name[32][count]
#define HAD(name) name[lane]
#define UNROLL

template <class Fold, int LANES, class Type> static inline Type tu_folded(const Type (&held)[32][1]) {
    Type lanes[LANES];
    for (int lane = 0; lane < LANES; lane++)
        lanes[lane] = held[lane][0];
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++)
            lanes[lane] = Fold::step(lanes[lane], lanes[lane + half]);
    return lanes[0];
}
#define FOLDED(fold, lanes, name) tu_folded<fold, lanes>(name)
