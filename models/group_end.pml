/* SPDX-License-Identifier: Apache-2.0
 *
 * How a group ends (src/world/operation.c): any rank may see a cause; the first to win the state word by compare-and-swap writes it
 * beside the word and marks it as told. Everybody else returns that cause. The winner may die between its two steps; then the
 * others say so instead of waiting.
 *
 * Proved: at most one winner; what a rank returns is complete, and the same for all that return a cause; a rank without a cause of its own
 * leaves too; nobody waits for ever.
 */
#define RANKS 3
#define NONE 255

byte state = 0;      /* 0 lives; rank + 1 once won; + TOLD once the cause is complete */
#define TOLD 128
byte cause = NONE;   /* written by the winner alone */
bool dead[RANKS];
byte told_by[RANKS] = NONE; /* what each rank returned: a cause, or RANKS for "it died before it could say why" */
byte winners = 0;

inline read_cause(me) {
    if
    :: state >= TOLD -> told_by[me] = cause
    :: state != 0 && state < TOLD && dead[state - 1] -> /* the bounded wait of told() has run out */
        if :: state >= TOLD -> told_by[me] = cause :: else -> told_by[me] = RANKS fi
    fi
}

proctype rank(byte me) {
    bool won = false;
    if
    :: /* sees something wrong by itself */
        atomic { if :: state == 0 -> state = me + 1; won = true; winners++ :: else fi };
        if
        :: won ->
            if :: dead[me] = true; goto end :: skip fi;
            cause = me;
            if :: dead[me] = true; goto end :: skip fi;
            state = (me + 1) + TOLD;
            told_by[me] = me
        :: else -> read_cause(me)
        fi
    :: /* only waits: for a word that never comes, so for the end of the group or for nothing */
        do
        :: state != 0 -> read_cause(me); break
        :: atomic { state == 0 -> break } /* what it waited for came */
        od
    :: dead[me] = true
    fi;
end:
    skip
}

init {
    byte i = 0, first = NONE;
    atomic {
        do :: i < RANKS -> run rank(i); i++ :: else -> break od
    }
    (_nr_pr == 1);
    assert(winners <= 1);
    i = 0;
    do
    :: i < RANKS ->
        if
        :: told_by[i] != NONE && told_by[i] != RANKS ->
            assert(first == NONE || first == told_by[i]);
            first = told_by[i]
        :: else -> skip
        fi;
        i++
    :: else -> break
    od
}
