/* SPDX-License-Identifier: Apache-2.0
 *
 * The signal mailbox of src/backend/shm/mailbox.c: two single-writer counts, sent and taken, that wrap (here modulo 3, so
 * that it happens; there modulo 256). Two threads of the sending rank share its lock, two of the receiving rank share theirs. The data that a
 * signal announces lie in a buffer that is written again before the next one, as the memory model allows.
 *
 * The sending rank may die at any step. The receiver then either finds the signal or learns of the death.
 *
 * Proved: the counts never differ by more than one; every signal is taken once; the data are those of the signal; nobody waits for
 * ever, unless for a rank that lives and does not signal (which is what deadlines are for). Orders weaker than one after the other are not modelled: the
 * release and acquire pairs are named in the source.
 */
#define COUNT 3      /* counts are modulo this */
#define SIGNALS 3    /* in all: as many as COUNT, so that they wrap */
#define SENDERS 2
#define TAKERS 2

byte sent, taken;    /* the two words */
bool sending, taking;/* the two locks */
byte data;           /* what the sender wrote before it signalled: the number of the signal */
bool dead;           /* the sending rank */

byte claimed;        /* signals that the sender's threads have set out to send */
byte delivered;      /* signals that were sent: for the proof only */
byte received;       /* signals that were taken: for the proof only */

inline lock(held) { atomic { !held -> held = true } }
inline unlock(held) { held = false }

/* A rank dies as a whole: every thread of it stops before its next step. */
#define ALIVE (!dead)

proctype sender() {
    byte count;
    bool done;
    do
    :: atomic { ALIVE && claimed < SIGNALS -> claimed++ };
        done = false;
        do
        :: ALIVE && !done ->
            atomic { (ALIVE && !sending) || dead -> if :: dead -> goto end :: else -> sending = true fi };
            count = sent;
            if
            :: ALIVE && taken == count ->
                if :: ALIVE -> data = delivered :: dead -> goto end fi; /* put: under the lock here, because two threads share the buffer */
                atomic { if :: ALIVE -> sent = (count + 1) % COUNT; delivered++ :: dead -> goto end fi };
                done = true
            :: ALIVE && taken != count -> skip
            :: dead -> goto end
            fi;
            if :: ALIVE -> unlock(sending) :: dead -> goto end fi
        :: ALIVE && done -> break
        :: dead -> goto end
        od
    :: claimed == SIGNALS || dead -> break
    od;
end:
    skip
}

proctype taker() {
    byte count;
    byte seen;
    do
    :: sent != taken ->
        lock(taking);
        count = taken;
        if
        :: sent != count ->
            seen = data;
            assert(seen == received);      /* the data of this signal, not of an older or a newer one */
            received++;
            taken = (count + 1) % COUNT
        :: else -> skip
        fi;
        unlock(taking)
    :: sent == taken && received == SIGNALS -> break
    :: dead && sent == taken -> break      /* the look after the death: the last store is visible by then */
    od
}

proctype reaper() {
    if
    :: dead = true
    :: skip
    fi
}

/* The mailbox holds none or one. */
proctype watch() {
    byte difference;
    atomic { difference = (COUNT + sent - taken) % COUNT; assert(difference <= 1) }
}

init {
    atomic {
        run sender(); run sender();
        run taker(); run taker();
        run reaper(); run watch()
    }
    (_nr_pr == 1);
    assert(received == delivered);
    assert(dead || delivered == SIGNALS)
}
