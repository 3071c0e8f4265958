/* SPDX-License-Identifier: Apache-2.0
 *
 * Making a group (src/world/create.c): an exchange of messages, then a vote in the new group's page, to which a rank comes that got all
 * messages; one that saw a death before says in its slot of the job that it refuses, and leaves. Any rank may die before and after each of its
 * steps, between two of its messages too.
 *
 * Proved: whoever gets an answer gets the same one, so that all survivors have the group or nobody has it; and nobody waits for ever.
 * With -DNO_REFUSAL a rank may wait in the vote for one that has left: the check must find that.
 */
#define RANKS 3

bool dead[RANKS];
bool sent[9];       /* from * RANKS + to */
bool arrived[RANKS]; /* in the vote */
bool refused[RANKS];
byte decided = 0;   /* 0 no, 1 all have it, 2 nobody */
byte answers = 0;   /* what was answered, for the proof: 1 the group, 2 an error */
byte deaths = 0;    /* one rank is left */

#define MAY_DIE if :: atomic { deaths < RANKS - 1 -> deaths++; dead[me] = true; goto end } :: skip fi

inline answer(what) {
    atomic { assert(answers == 0 || answers == what); answers = what }
}

proctype rank(byte me) {
    byte other = 0;
    bool lost = false, all;
    do /* the messages, one by one */
    :: other < RANKS && other != me -> MAY_DIE; sent[me * RANKS + other] = true; other++
    :: other < RANKS && other == me -> other++
    :: other == RANKS -> break
    od;
    MAY_DIE;
    other = 0;
    do /* a death ends the exchange, whether that one's message has come or not, unless all have come */
    :: atomic { other < RANKS && (other == me || sent[other * RANKS + me]) -> other++ }
    :: atomic { other < RANKS && other != me && !sent[other * RANKS + me] && (dead[0] || dead[1] || dead[2]) ->
             lost = true; break }
    :: other == RANKS -> break
    od;
    MAY_DIE;
    if
    :: lost ->
#ifndef NO_REFUSAL
        refused[me] = true;
#endif
        answer(2);
        goto end
    :: else
    fi;
    arrived[me] = true;
    MAY_DIE;
    /* Until all have come, have refused or are dead, or one has decided. */
    (decided != 0 || ((arrived[0] || dead[0] || refused[0]) && (arrived[1] || dead[1] || refused[1]) &&
                      (arrived[2] || dead[2] || refused[2])));
    atomic { all = arrived[0] && arrived[1] && arrived[2] }; /* the proposal */
    MAY_DIE;
    atomic { if :: decided == 0 -> decided = (all -> 1 : 2) :: else fi }; /* compare-and-swap */
    MAY_DIE;
    answer(decided);
end:
    skip
}

init {
    atomic { run rank(0); run rank(1); run rank(2) }
    (_nr_pr == 1)
}
