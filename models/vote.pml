/* SPDX-License-Identifier: Apache-2.0
 *
 * A shrink (src/world/vote.c, src/world/shrink.c): a vote on who survives, an exchange among the survivors, a vote on whether all
 * have what they need; again without those that died meanwhile. Any rank may die before and after each of its steps. In the
 * exchange a rank that sees a death stops sending, so it ends the exchange for the others by the `abandoned` word.
 *
 * Proved: all ranks that get an answer get the same one, which is complete and holds them; a decision is still there when it is
 * read, although slots are written in turns of two; nobody waits for ever.
 *
 * With -DNO_ABANDON a rank may wait in the exchange for one that has left it: the check must find that.
 */
#define RANKS 3
#define bit(m) (1 << (m))

bool dead[RANKS];
byte arrived[RANKS];
bool made[2 * RANKS];           /* ballots of the second vote, in turns of two */
byte proposed[2 * RANKS];       /* attempt of each proposal; 0 while it is written */
byte set_of[2 * RANKS];         /* its survivors */
bool done_of[2 * RANKS];        /* its outcome */
byte decided = 0;               /* attempt */
byte decider = 0;
byte sent[RANKS * RANKS];       /* attempt whose record went from one to another */
bool abandoned = false;

/* What was answered, for the proof. */
byte answered_set[16];
byte answered_done[16];
byte result = 0;

byte deaths = 0; /* one rank is left */
#define MAY_DIE if :: atomic { deaths < RANKS - 1 -> deaths++; dead[me] = true; goto end } :: skip fi

#define here(m) (!(awaited & bit(m)) || arrived[m] >= attempt || dead[m])

inline propose(commit) {
    proposed[2 * me + (attempt & 1)] = 0;
    atomic { set = 0; all = true; m = 0 };
    do
    :: m < RANKS && (awaited & bit(m)) ->
        gone = dead[m]; /* first whether it departed, then whether it came */
        atomic {
            came = arrived[m] >= attempt;
            if
            :: came && !gone -> set = set | bit(m)
            :: else
            fi;
            if
            :: commit && !came -> all = false
            :: commit && came && !made[2 * m + (attempt & 1)] -> all = false
            :: else
            fi;
            came = false; gone = false; m++
        }
    :: m < RANKS && !(awaited & bit(m)) -> m++
    :: m == RANKS -> break
    od;
    atomic { /* nobody looks at it before it is chosen */
        set_of[2 * me + (attempt & 1)] = set;
        done_of[2 * me + (attempt & 1)] = all;
        proposed[2 * me + (attempt & 1)] = attempt;
        set = 0; all = false; m = 0
    }
}

inline vote(commit, mine) {
    atomic {
        attempt++;
        made[2 * me + (attempt & 1)] = mine;
        arrived[me] = attempt
    };
    MAY_DIE;
    (decided >= attempt || (here(0) && here(1) && here(2)));
    if
    :: decided < attempt ->
        propose(commit);
        MAY_DIE;
        atomic { if :: decided < attempt -> decided = attempt; decider = me :: else fi };
        MAY_DIE
    :: else
    fi;
    atomic {
        assert(decided == attempt); /* nobody is two votes ahead */
        m = 2 * decider + (attempt & 1)
    };
    atomic {
        set = set_of[m];
        all = done_of[m];
        assert(proposed[m] == attempt);
        m = 0;
        assert(answered_set[attempt] == 0 || (answered_set[attempt] == set && answered_done[attempt] == all));
        answered_set[attempt] = set;
        answered_done[attempt] = all
    }
}

/* Everybody's record to everybody; fails when one dies that has not sent, or when somebody has abandoned it. */
inline exchange() {
    ok = true; m = 0;
    do
    :: m < RANKS && ok ->
        if
        :: (survivors & bit(m)) && m != me ->
            MAY_DIE;
            if
            :: sent[RANKS * me + m] = attempt
            :: dead[0] || dead[1] || dead[2] -> /* it may look around before it has sent everything */
                if
                :: (survivors & bit(0)) && dead[0] && sent[RANKS * 0 + me] != attempt -> ok = false
                :: (survivors & bit(1)) && dead[1] && sent[RANKS * 1 + me] != attempt -> ok = false
                :: (survivors & bit(2)) && dead[2] && sent[RANKS * 2 + me] != attempt -> ok = false
                :: else -> sent[RANKS * me + m] = attempt
                fi
            fi
        :: else
        fi;
        m++
    :: else -> break
    od;
    m = 0;
    do
    :: m < RANKS && ok ->
        if
        :: (survivors & bit(m)) && m != me ->
            if
            :: sent[RANKS * m + me] == attempt
            :: dead[m] -> if :: sent[RANKS * m + me] == attempt :: else -> ok = false fi
#ifndef NO_ABANDON
            :: abandoned -> if :: sent[RANKS * m + me] == attempt :: else -> ok = false fi
#endif
            fi
        :: else
        fi;
        m++
    :: else -> break
    od;
    m = 0;
    if :: !ok -> abandoned = true :: else fi
}

proctype rank(byte me) {
    byte attempt = 0, m, set, survivors, awaited;
    bool all, came, gone, ok = true;
again:
    abandoned = false;
    awaited = 7;
    MAY_DIE;
    vote(false, true);
    assert(set & bit(me));
    survivors = set;
    exchange();
    MAY_DIE;
    awaited = survivors;
    vote(true, ok);
    if
    :: all ->
        atomic {
            assert(result == 0 || result == survivors);
            result = survivors
        }
    :: else -> goto again
    fi;
end:
    skip
}

init {
    atomic { run rank(0); run rank(1); run rank(2) }
}
