/* SPDX-License-Identifier: Apache-2.0
 *
 * For loops that are written at run time and run on the CPU: what src/loops/device.cuh has of CUDA else. A block's
 * phases run one after the other, each for all lanes of a team.
 */
#include <cstddef>
#include <cstdint>
#include <cstring>

static thread_local int64_t standin_block, standin_blocks;
static thread_local int standin_threads;
extern "C" __attribute__((visibility("default"))) void standin_here(int64_t block, int64_t blocks, int threads) {
    standin_block = block;
    standin_blocks = blocks;
    standin_threads = threads;
}

struct tu_places;
#define HERE static inline
#define LOOP(name) extern "C" __attribute__((visibility("default"))) void name(const tu_places &args)
#define EACH_ELEMENT(i, first, total, step) \
    for (int64_t i = (first) + standin_block * (step); i < (total); i += standin_blocks * (step))
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
