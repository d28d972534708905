/* parting.pml: a program leaves a session while data move both ways (docs/decisions/0088-programs-that-leave.md;
 * Dysco, section 3).
 *
 * Three hosts: the left anchor, at which the session's lock is; the right one; and the program's. Direction 0 goes
 * from left to right, 1 back. Each end's program has BYTES bytes to send, the last of which is its FIN. A byte that
 * the program on the old way has *taken* is acknowledged: its sender has forgotten it. TCP repeats all else, so that
 * losses of data need no steps of their own.
 *
 * As in rsyn.pml, what is under way between the anchors is a set: a message that was sent once may be delivered at any
 * later time, any number of times, or never. ACTS orders want the session, one of them at a time. A timer of the left
 * anchor may run out at any time. The program may die (PROXY_DIES), and the agents of the ends may, DEATHS times
 * together.
 *
 * PATIENT: no timer runs out, as where the new way comes to stand in time. SUCCEEDS: then an attempt is to succeed.
 *
 * At some time all is quiet: nobody dies any more, and the timers of the left anchor run out only where nothing else
 * would ever come.
 */

#ifndef BYTES
#define BYTES 2
#endif
#ifndef ACTS
#define ACTS 2
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef PROXY_DIES
#define PROXY_DIES 0
#endif
#ifndef WHIMS
#define WHIMS 1
#endif

#define NONE 15

/* The left anchor (`leading.rs`). */
mtype = { IDLE, ASKING, SETTING, CONFIRMING, TWO_WAYS, LEFT, CANCELING };
mtype leading = IDLE;
byte act;             /* the number of what it leads */
byte second;          /* another one at the same time: only without the lock */
byte wanted = ACTS;   /* orders that have not had their turn */
/* The right one (`following.rs`). */
mtype = { ALONE, ASKED, READY, TURNED, FINISHED };
mtype following = ALONE;
byte number;          /* of what it follows */
byte last;            /* that it has heard of */

/* Under way. */
typedef Words { bit request; bit answer; bit syn; bit syn_ack; bit confirm; bit done; bit cut; bit finish;
                bit finished; bit cancel;
    bit canceled; bit unknown };
Words say[ACTS + 1];
byte said_cut[ACTS + 1]; /* with `done`: where the right anchor's cut is */

/* Data. By direction: bytes that the program has written, that the leaving one has taken, that the other end had of it;
 * as bits, those that the other end's program was given by the new way; where the sender's cut is, and where the
 * receiver thinks so. */
byte sent[2]; byte taken[2]; byte old[2]; byte given[2];
byte cut[2] = NONE; byte known[2] = NONE;
bit is_there = 1;     /* the program that leaves has its two sockets */
bit rst[2];           /* a RST of it is on its way to an end: 0 is the left one */
bit is_reset[2];      /* an end has told its own program that the connection is over */
bit hurt;             /* an agent has died in the phase */
bit quiet;
byte deaths = DEATHS;
byte whims = WHIMS;
bit dies = PROXY_DIES;
hidden byte i_;

/* What an end needs of the old way has come. */
#define OVER(d) (known[d] != NONE && old[d] >= known[d])
#define HAS(d, n) (old[d] > (n) || (given[d] >> (n)) & 1)
#define WHOLE(d) (HAS(d, 0) && HAS(d, 1) && (BYTES < 3 || HAS(d, 2)))
#define LIVE (!is_reset[0] && !is_reset[1])

mtype = { left, right, program, asks, agrees, sets_up, stands, confirms, turns, parts, finishes, cancels, goes_back,
          dies_, takes, passes, gives,
    resets };
#define SAY(who, what, n) printf("%e %e %d\n", who, what, n)

/* ---- The left anchor --------------------------------------------------------------------------------------------- */

inline back_left() { cut[0] = NONE; known[1] = NONE }

active proctype Left() {
end:
    do
    :: d_step {
        leading == IDLE && wanted > 0 && LIVE && is_there && !quiet ->
        wanted--; act++; leading = ASKING; say[act].request = 1; SAY(left, asks, act)
    }
#ifdef NO_LOCK
    /* Wrong on purpose: another order does not wait for its turn. */
    :: d_step { leading != IDLE && leading != LEFT && wanted > 0 && !second -> wanted--; second = 1; assert(act==0) }
#endif
    :: d_step { leading == ASKING && say[act].answer -> leading = SETTING; say[act].syn = 1; SAY(left, sets_up, act) }
    :: d_step { leading == SETTING && say[act].syn_ack ->
        leading = CONFIRMING; say[act].confirm = 1; SAY(left, confirms, act) }
    /* The right anchor has turned at its cut: so does this end. */
    :: d_step {
        leading == CONFIRMING && say[act].done && LIVE ->
        leading = TWO_WAYS; known[1] = said_cut[act];
#ifdef CUT_TOO_LOW
        /* Wrong on purpose: it does not ask the program's TCP what was sent. */
        cut[0] = (sent[0] > 0 -> sent[0] - 1 : 0);
#else
        cut[0] = sent[0];
#endif
        say[act].cut = 1; SAY(left, parts, cut[0])
    }
#ifdef FINISHES_EARLY
    :: d_step { leading == TWO_WAYS -> say[act].finish = 1 }
#else
    :: d_step { leading == TWO_WAYS && OVER(1) && !say[act].finish -> say[act].finish = 1; SAY(left, finishes, act) }
#endif
    /* The program's sockets are reset; nothing that it says counts any more. */
    :: d_step { leading == TWO_WAYS && say[act].finished -> leading = LEFT; is_there = 0 }
#ifndef PATIENT
    /* A timer runs out, or the set-up fails. */
    :: d_step {
        (leading == ASKING || leading == SETTING || leading == CONFIRMING) && (whims > 0 || quiet && !say[act].done) ->
        if
        :: !quiet -> whims--
        :: else
        fi;
        leading = CANCELING; say[act].cancel = 1; SAY(left, cancels, act)
    }
#endif
#ifdef CANCELS_LATE
    /* Wrong on purpose: it takes back what it has told. */
    :: d_step { leading == TWO_WAYS && whims > 0 -> whims--; leading = CANCELING; say[act].cancel = 1; back_left() }
#endif
    :: d_step { leading == CANCELING && (say[act].canceled || quiet && following != TURNED) ->
        leading = IDLE; back_left() }
    /* The right anchor speaks of what this end has forgotten. */
    :: d_step {
        number && say[number].done && !say[number].unknown && (leading == IDLE || act != number) ->
            say[number].unknown = 1
    }
    od
}

/* ---- The right anchor -------------------------------------------------------------------------------------------- */

inline back_right() { following = ALONE; cut[1] = NONE; known[0] = NONE; SAY(right, goes_back, number); number = 0 }

proctype Right(byte t) {
end:
    do
    :: d_step {
        say[t].request && following != FINISHED && t > last && (following == ALONE || following == ASKED) ->
        following = ASKED; number = t; last = t; say[t].answer = 1; SAY(right, agrees, t)
    }
    :: d_step { following == ASKED && number == t && say[t].syn ->
        following = READY; say[t].syn_ack = 1; SAY(right, stands, t) }
    :: d_step {
        following == READY && number == t && say[t].confirm && LIVE ->
        following = TURNED; cut[1] = sent[1]; said_cut[t] = cut[1]; say[t].done = 1; SAY(right, turns, cut[1])
    }
    :: d_step { following == TURNED && number == t && say[t].cut && known[0] == NONE && LIVE -> known[0] = cut[0] }
    :: d_step {
        following == TURNED && number == t && say[t].finish && OVER(0) -> following = FINISHED; say[t].finished = 1
    }
#ifdef NUMBERS_IGNORED
    :: d_step { say[t].cancel && following != FINISHED && number && cut[1] != NONE ->
        back_right(); say[t].canceled = 1 }
#endif
    :: d_step {
        say[t].cancel && !say[t].canceled && !(number == t && known[0] != NONE) ->
        if
        :: number == t -> back_right()
        :: else
        fi;
        last = (t > last -> t : last);
        say[t].canceled = 1
    }
    :: d_step {
        say[t].unknown && number == t && following != FINISHED && known[0] == NONE -> back_right()
    }
    /* Nothing comes any more. It has not turned: the new way is nobody's. */
    :: d_step { quiet && number == t && (following == ASKED || following == READY) && (leading == IDLE || act != t) ->
        back_right() }
    od
}

/* ---- Data -------------------------------------------------------------------------------------------------------- */

/* Whether what comes by the new way in a direction is given to the program there, and so acknowledged. */
#ifdef GIVES_EARLY
#define MAY_GIVE(d) (cut[d] != NONE)
#else
#define MAY_GIVE(d) (cut[d] != NONE && ((d) == 0 -> known[0] != NONE : leading == TWO_WAYS || leading == LEFT))
#endif

proctype Direction(byte d) {
end:
    do
    :: d_step { sent[d] < BYTES && LIVE -> sent[d]++ }
    /* By the old way: the program takes the next byte, if its sender has not heard from the other end that the byte
     * is there. */
    :: d_step {
        is_there && taken[d] < sent[d] && (cut[d] == NONE || taken[d] < cut[d]) &&
        !((given[d] >> taken[d]) & 1) && LIVE ->
        taken[d]++; SAY(program, takes, taken[d])
    }
    :: d_step { is_there && old[d] < taken[d] && LIVE -> old[d]++; SAY(program, passes, old[d]) }
    /* By the new one: what the sender has not forgotten. */
#define CAN_GIVE(d, n) (MAY_GIVE(d) && (n) >= cut[d] && (n) < sent[d] && (n) >= taken[d] && LIVE && \
                        !((given[d] >> (n)) & 1))
    :: d_step { CAN_GIVE(d, 0) -> given[d] = given[d] | 1; SAY(d, gives, 0) }
    :: d_step { CAN_GIVE(d, 1) -> given[d] = given[d] | 2; SAY(d, gives, 1) }
#if BYTES > 2
    :: d_step { CAN_GIVE(d, 2) -> given[d] = given[d] | 4; SAY(d, gives, 2) }
#endif
    od
}

/* ---- Ends, and what goes wrong ----------------------------------------------------------------------------------- */

/* A RST of the program counts until all that an end awaits of it has come. Below, `e` is the end, 1 - e the direction
 * to it. */
#ifdef RST_IGNORED
#define COUNTS(e) (cut[0] == NONE && cut[1] == NONE)
#else
#ifdef RST_COUNTS
#define COUNTS(e) 1
#else
#define COUNTS(e) (!OVER(1 - (e)))
#endif
#endif

inline reset(e) {
    /* A connection that wants nothing more of the program is left alone. */
    assert(known[1 - e] == NONE || old[1 - e] < known[1 - e] || hurt);
    is_reset[e] = 1; SAY(e, resets, 0)
}

proctype World(byte e) {
end:
    do
    :: d_step { rst[e] && !is_reset[e] ->
        rst[e] = 0; if :: COUNTS(e) && !(WHOLE(0) && WHOLE(1)) -> reset(e) :: else fi }
    /* An end that is reset tells the other one. */
    :: d_step { is_reset[1 - e] && !is_reset[e] -> is_reset[e] = 1 }
    :: d_step {
        /* Only of the left end: of the program. */
        e == 0 && dies && is_there && !quiet -> dies = 0; is_there = 0; rst[0] = 1; rst[1] = 1; SAY(program, dies_, 0)
    }
    /* The left agent dies. The cuts are not written down. */
    :: d_step {
        e == 0 && deaths > 0 && !quiet && leading != LEFT ->
        deaths--; SAY(left, dies_, act);
        if
        :: cut[0] != NONE -> hurt = 1; is_reset[0] = 1
        :: else
        fi;
        leading = IDLE; back_left()
    }
    :: d_step {
        e == 1 && deaths > 0 && !quiet && following != FINISHED ->
        deaths--; SAY(right, dies_, number);
        if
#ifdef CUT_FORGOTTEN
        /* Wrong on purpose: it goes on as if it had not turned. */
#else
        :: cut[1] != NONE -> hurt = 1; is_reset[1] = 1
#endif
        :: else
        fi;
        following = ALONE; cut[1] = NONE; known[0] = NONE; number = 0
    }
    :: d_step { e == 0 && !quiet -> quiet = 1; deaths = 0; whims = 0; dies = 0 }
    od
}

/* All is quiet and nobody has anything left to do. */
active proctype End() {
    timeout ->
    assert(quiet);
    /* Both ends think the same of the connection, and it is whole or they have heard of its end. */
    assert(is_reset[0] == is_reset[1]);
    assert(is_reset[0] || WHOLE(0) && WHOLE(1));
    assert(!is_reset[0] || hurt || PROXY_DIES); /* an end that nobody has caused */
    /* The lock is free, and nobody is left between two ways. */
    assert(is_reset[0] || leading == IDLE || leading == LEFT);
    assert(is_reset[0] || following == ALONE || following == FINISHED);
    assert(is_reset[0] || (leading == LEFT) == (following == FINISHED));
#ifdef SUCCEEDS
    /* What was begun is done: all that can go wrong is that the new way does not come to stand in time, which no
     * timer says with PATIENT (Dysco, section 3.6).
     */
    assert(act == 0 || leading == LEFT)
#endif
}

init {
    atomic {
        run Right(1);
#if ACTS > 1
        run Right(2);
#endif
        run Direction(0);
        run Direction(1);
        run World(0);
        run World(1)
    }
}
