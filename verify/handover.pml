/* handover.pml: a connection goes to another host (docs/decisions/0069-a-connection-goes-to-another-host.md).
 *
 * Three hosts: the giver, the client, which is the home of the session's lock, and the taker. The giver may hand over ACTS times, one
 * after the other, each with a ticket of its own; the requests for one of them may arrive during another one, or after it.
 *
 * As in rsyn.pml, what is under way between two hosts is a set: a message that was sent once may be delivered at any later time, any
 * number of times, or never. Answers that change nothing at the client follow from what it was asked (`settle`). The record goes by
 * a stream, which loses nothing while both agents live. A timer may run out at any time, WHIMS times in a run; each agent may be killed
 * and started again, together RESTARTS times.
 *
 * At some time all is quiet: what is under way is lost, nobody is killed, and a timer runs out only where nothing else would ever come. */

#ifndef ACTS
#define ACTS 2
#endif
#ifndef WHIMS
#define WHIMS 1
#endif
#ifndef RESTARTS
#define RESTARTS 0
#endif

#define TICKETS (ACTS + 1) /* the first is 1 */

/* The giver: its connection, and the states of `giver.rs`. */
mtype = { OPEN, FROZEN, CLOSED };
mtype = { OVER, ASKING, SENDING, WAITING, CANCELLING, PARTED };
mtype socket = OPEN;
mtype giving = OVER;
byte ticket;          /* of the present hand-over */
byte begun;           /* hand-overs so far */

/* The client: where its connection is, and the hand-over that it fetches. */
mtype = { AT_GIVER, AT_TAKER, NOWHERE };
mtype place = AT_GIVER;
mtype written = AT_GIVER; /* what its next start takes up */
byte fetches;         /* the ticket; 0: the lock is free */
byte second;          /* another one at the same time: only without the lock */
byte gone_to;         /* the ticket by which the connection went to the taker */
bit reborn;           /* it has started again, and the giver has not heard so yet */
bit is_ready;         /* the taker has answered; the program's packets wait */

typedef Ticket {
    /* Under way. From the giver to the client; from the client to the giver; */
    bit request; bit word; bit cancel;
    bit granted; bit refused; bit stays; bit gone;
    /* from the client to the taker: the end of the set-up, also of a flow that the client has forgotten since; then back. */
    bit proof; bit late_proof; bit confirm; bit end;
    bit ready; bit no;
    /* On the stream between giver and taker. */
    bit record; bit restored; bit broken;
    /* The client has given its word: the ticket is worth nothing any more. */
    bit spent;
    /* The taker: the flow waits for a connection; the connection is here, frozen; the agent waits for a record; the program has it. */
    bit awaits; bit has; bit offered; bit live;
    /* The client has forgotten the flow that waits. */
    bit stale
};
Ticket act[TICKETS];

bit quiet;
byte whims = WHIMS;
byte restarts = RESTARTS;
bit hurt;             /* an agent was killed, or has heard nothing of the client for a lease: a clean failure is right, too */
byte ends;            /* live ends of the connection, for the assertion alone */
hidden byte i_;

mtype = { giver, client, taker, gives, freezes, sends, thaws, parts, gives_up, cancels, fetches_it, hears_the_taker, commits, stays_there, abandons, fails,
    has_a_flow, restores, goes_on, drops_it, starts_again };
#define SAY(who, what, t) printf("%e %e %d\n", who, what, t)

/* ---- Messages that follow from the state of the hosts ---------------------------------------------------------------- */

#define IS_FETCHED(t) (fetches == (t) || second == (t))
#ifdef NO_LOCK
#define CAN_FETCH(t) (place == AT_GIVER && !act[t].spent && !IS_FETCHED(t) && (!fetches || !second))
#else
#define CAN_FETCH(t) (place == AT_GIVER && !act[t].spent && !fetches)
#endif

inline settle_one(t) {
    if
    :: giving == ASKING && ticket == t && !reborn -> act[t].request = 1
    :: giving == WAITING && ticket == t && !reborn -> act[t].word = 1
    :: giving == CANCELLING && ticket == t && !reborn -> act[t].cancel = 1
    :: else
    fi;
    if
    :: fetches == t && is_ready -> act[t].granted = 1; act[t].proof = 1
    :: else
    fi;
    if
    :: act[t].request && !IS_FETCHED(t) && !CAN_FETCH(t) -> act[t].refused = 1
    :: else
    fi;
#ifndef WORD_ONCE
    /* The client's word, as often as it is asked for. */
    if
    :: (act[t].word || act[t].cancel) && !IS_FETCHED(t) && place != AT_GIVER -> act[t].gone = 1
    :: (act[t].word || act[t].cancel) && act[t].spent && place == AT_GIVER -> act[t].stays = 1
    :: else
    fi;
#endif
    if
    :: act[t].awaits && act[t].has -> act[t].ready = 1
    :: else
    fi;
    if
    :: act[t].ready && !IS_FETCHED(t) ->
        if
        :: place == AT_TAKER && gone_to == t && !act[t].stale ->
#ifndef WORD_ONCE
            act[t].confirm = 1
#else
            skip
#endif
        :: else -> act[t].end = 1
        fi
    :: else
    fi
}

inline settle() {
    i_ = 1;
    do
    :: i_ <= ACTS -> settle_one(i_); i_++
    :: else -> break
    od;
    i_ = 0;
    ends = (socket == OPEN) + act[1].live;
#if ACTS > 1
    ends = ends + act[2].live;
#endif
#if ACTS > 2
    ends = ends + act[3].live;
#endif
    assert(ends <= 1)
}

/* ---- The giver ------------------------------------------------------------------------------------------------------- */

#define BUSY(t) (ticket == (t) && giving != OVER && giving != PARTED)

inline cancel_it() { giving = CANCELLING; SAY(giver, cancels, ticket) }

/* Nobody says where the connection is. What was never frozen was never sent: it goes on. */
inline give_up() {
    giving = OVER;
    hurt = 1;
    if
    :: socket == FROZEN -> socket = CLOSED
    :: else
    fi;
    SAY(giver, gives_up, ticket)
}

inline thaw() {
    giving = OVER;
    if
    :: socket == FROZEN -> socket = OPEN; assert(place == AT_GIVER)
    :: else
    fi;
    SAY(giver, thaws, ticket)
}

active proctype Giver() {
end:
    do
    :: d_step {
        socket == OPEN && (giving == OVER) && begun < ACTS && !quiet ->
        begun++; ticket = begun; giving = ASKING; act[ticket].offered = 1;
        SAY(giver, gives, ticket); settle()
    }
    :: d_step {
        giving == ASKING && act[ticket].granted ->
        giving = SENDING; socket = FROZEN; SAY(giver, freezes, ticket); settle()
    }
    :: d_step { giving == ASKING && act[ticket].refused -> giving = OVER; settle() }
    :: d_step {
        giving == SENDING && !act[ticket].record && !act[ticket].restored && !act[ticket].broken ->
        act[ticket].record = 1; SAY(giver, sends, ticket); settle()
    }
    :: d_step { giving == SENDING && act[ticket].restored -> giving = WAITING; settle() }
    :: d_step {
        (giving == SENDING || giving == WAITING || giving == CANCELLING) && act[ticket].stays -> thaw(); settle()
    }
    :: d_step {
        (giving == SENDING || giving == WAITING || giving == CANCELLING) && act[ticket].gone ->
        giving = PARTED; socket = CLOSED; SAY(giver, parts, ticket); settle()
    }
    /* The taker refuses, or its agent has died; or the program, or a timer, wants an end. */
    :: d_step { (giving == ASKING || giving == SENDING || giving == WAITING) && act[ticket].broken -> cancel_it(); settle() }
    :: d_step {
        (giving == ASKING || giving == SENDING || giving == WAITING) && whims > 0 && !quiet ->
        whims--;
#ifdef THAWS_UNASKED
        /* Wrong on purpose: the giver goes on without the client's word. */
        giving = OVER;
        if
        :: socket == FROZEN -> socket = OPEN
        :: else
        fi;
#else
        cancel_it();
#endif
        settle()
    }
    :: d_step { (giving == WAITING || giving == CANCELLING) && whims > 0 && !quiet -> whims--; give_up(); settle() }
    /* FAIL of a client whose connection is not here. */
    :: d_step { socket == OPEN && giving == OVER && place != AT_GIVER -> socket = CLOSED; settle() }
    od
}

/* ---- The client ------------------------------------------------------------------------------------------------------ */

inline forget_fetch(t) {
    if
    :: second == t -> second = 0
    :: else -> fetches = second; second = 0; is_ready = 0
    fi;
    act[t].late_proof = act[t].late_proof | act[t].proof;
    act[t].proof = 0;
    act[t].stale = 1;
    act[t].ready = 0
}

#ifdef TICKET_TWICE
#define SPEND(t) skip
#else
#define SPEND(t) act[t].spent = 1
#endif

inline abandon(t) {
    if
    :: is_ready && fetches == t -> act[t].stays = 1
    :: else -> act[t].refused = 1
    fi;
    forget_fetch(t);
    SPEND(t);
    act[t].end = 1;
    SAY(client, abandons, t)
}

inline fetch(t) {
    if
    :: fetches -> second = t
    :: else -> fetches = t
    fi;
    is_ready = 0;
    /* A flow of its own: what was said of another one is not said of this. */
    act[t].ready = 0; act[t].end = 0; act[t].no = 0; act[t].proof = 0; act[t].confirm = 0;
    SAY(client, fetches_it, t);
    assert(second == 0) /* one act at a time */
}

inline commit(t) {
    place = AT_TAKER;
    gone_to = t;
    fetches = 0;
    is_ready = 0;
    act[t].proof = 0;
    act[t].gone = 1;
    act[t].confirm = 1;
#ifndef WORD_NOT_WRITTEN
    written = AT_TAKER;
#endif
    SAY(client, commits, t)
}

proctype Client(byte t) {
end:
    do
    :: d_step { act[t].request && CAN_FETCH(t) -> fetch(t); settle() }
    /* The taker answers the set-up of the flow. */
    :: d_step { fetches == t && !is_ready -> is_ready = 1; SAY(client, hears_the_taker, t); settle() }
    :: d_step { fetches == t && is_ready && act[t].ready && !act[t].stale -> commit(t); settle() }
    :: d_step { IS_FETCHED(t) && (act[t].no || act[t].cancel) -> abandon(t); settle() }
    /* It says that the connection stays: so it must, whatever is still asked for with this ticket. */
    :: d_step {
        (act[t].word || act[t].cancel) && !IS_FETCHED(t) && place == AT_GIVER && !act[t].stays ->
        act[t].stays = 1; SPEND(t); SAY(client, stays_there, t); settle()
    }
    /* The lease ends. Once all is quiet only where nobody else ends the hand-over. */
    :: d_step { IS_FETCHED(t) && whims > 0 && !quiet -> whims--; abandon(t); settle() }
    :: d_step { IS_FETCHED(t) && quiet && !BUSY(t) && !(act[t].awaits && act[t].has && !act[t].stale) -> abandon(t); settle() }
    od
}

/* The giver hears that the client has started again: what it hears from then on is of the client's present life, and so is what the client
 * hears. */
inline be_known() {
    i_ = 1;
    do
    :: i_ <= ACTS -> act[i_].granted = 0; act[i_].refused = 0; act[i_].stays = 0; act[i_].gone = 0; i_++
    :: else -> break
    od;
    reborn = 0
}

/* Nobody is where the connection was. */
#define IS_LOST ((place == AT_GIVER && socket == CLOSED && !fetches) || \
    (place == AT_TAKER && !act[gone_to].live && !act[gone_to].awaits))

active proctype Loss() {
end:
    do
    :: d_step { reborn -> be_known(); settle() }
    :: d_step { IS_LOST -> place = NOWHERE; written = NOWHERE; SAY(client, fails, 0); settle() }
#ifdef WORD_NOT_WRITTEN
    :: d_step { written != place && !quiet -> written = place }
#endif
    od
}

/* ---- The taker ------------------------------------------------------------------------------------------------------- */

inline drop_it(t) {
    act[t].awaits = 0; act[t].has = 0; act[t].offered = 0; act[t].record = 0; act[t].broken = 1; act[t].ready = 0; act[t].no = 1;
    act[t].stale = 0;
    SAY(taker, drops_it, t)
}

/* Never a live end that the client does not know. */
inline go_on(t) {
    act[t].awaits = 0; act[t].has = 0; act[t].live = 1; act[t].ready = 0; act[t].confirm = 0;
    SAY(taker, goes_on, t);
    assert(place == AT_TAKER && gone_to == t)
}

proctype Taker(byte t) {
end:
    do
    /* The client is proved; a second flow of one ticket is refused. */
    :: d_step {
        act[t].proof && !act[t].awaits && !act[t].live && !act[t].no ->
        act[t].awaits = 1; act[t].stale = 0; SAY(taker, has_a_flow, t); settle()
    }
    :: d_step { act[t].proof && act[t].awaits && act[t].stale && !act[t].no -> act[t].no = 1; settle() }
    :: d_step { act[t].late_proof && !act[t].awaits && !act[t].live -> act[t].late_proof = 0; act[t].awaits = 1; act[t].stale = 1; settle() }
    :: d_step {
        act[t].offered && act[t].awaits && act[t].record ->
        act[t].offered = 0; act[t].record = 0; act[t].has = 1; act[t].restored = 1;
        SAY(taker, restores, t);
#ifdef TAKER_GOES_ON
        /* Wrong on purpose: the taker does not wait for the client's word. */
        go_on(t);
#endif
        settle()
    }
    :: d_step {
        act[t].confirm && act[t].awaits && act[t].has && !act[t].stale ->
        go_on(t); settle()
    }
    /* FAIL of the client; the lease, or no record in time. */
    :: d_step { act[t].end && act[t].awaits -> drop_it(t); settle() }
    :: d_step {
        (act[t].awaits || act[t].offered) && whims > 0 && !quiet ->
        whims--; hurt = hurt | act[t].has; drop_it(t); settle()
    }
    :: d_step {
        quiet && !IS_FETCHED(t) && !(giving == ASKING && ticket == t) &&
            (act[t].offered || act[t].awaits && (act[t].stale || !act[t].has)) ->
        drop_it(t); settle()
    }
    :: d_step { act[t].live && !(place == AT_TAKER && gone_to == t) -> act[t].live = 0; settle() }
    od
}

/* ---- The world ------------------------------------------------------------------------------------------------------- */

/* What is under way to a host that starts again is of an association that it has no more. */
inline restart_givers() {
    i_ = 1;
    do
    :: i_ <= ACTS ->
        act[i_].granted = 0; act[i_].refused = 0; act[i_].stays = 0; act[i_].gone = 0; act[i_].restored = 0;
        i_++
    :: else -> break
    od;
    i_ = 0
}
inline restart_clients() {
    i_ = 1;
    do
    :: i_ <= ACTS ->
        act[i_].request = 0; act[i_].word = 0; act[i_].cancel = 0; act[i_].ready = 0; act[i_].no = 0;
        act[i_].late_proof = act[i_].late_proof | act[i_].proof;
        act[i_].proof = 0; act[i_].spent = 0;
        if
        :: !(written == AT_TAKER && gone_to == i_) -> act[i_].stale = 1
        :: else
        fi;
        i_++
    :: else -> break
    od;
    i_ = 0
}
inline restart_takers() {
    i_ = 1;
    do
    :: i_ <= ACTS ->
        act[i_].proof = 0; act[i_].late_proof = 0; act[i_].confirm = 0; act[i_].end = 0; act[i_].record = 0;
        if
        :: act[i_].awaits || act[i_].offered || act[i_].has -> act[i_].broken = 1
        :: else
        fi;
        act[i_].awaits = 0; act[i_].has = 0; act[i_].offered = 0; act[i_].stale = 0;
        i_++
    :: else -> break
    od;
    i_ = 0
}
inline lose_all() {
    i_ = 1;
    do
    :: i_ <= ACTS ->
        act[i_].request = 0; act[i_].word = 0; act[i_].cancel = 0; act[i_].granted = 0; act[i_].refused = 0; act[i_].stays = 0; act[i_].gone = 0;
        act[i_].proof = 0; act[i_].late_proof = 0; act[i_].confirm = 0; act[i_].end = 0; act[i_].ready = 0; act[i_].no = 0;
        i_++
    :: else -> break
    od;
    i_ = 0
}

proctype World() {
    bit kept;
end:
    do
    /* The program closes a socket that is frozen, without a word: nobody else can end it. */
    :: d_step {
        restarts > 0 && !quiet ->
        restarts--; hurt = 1; restart_givers();
        if
        :: BUSY(ticket) -> act[ticket].broken = 1
        :: else
        fi;
        giving = OVER;
        if
        :: socket == FROZEN -> socket = CLOSED
        :: else
        fi;
        SAY(giver, starts_again, 0); settle()
    }
    :: d_step {
        restarts > 0 && !quiet ->
        restarts--; hurt = 1; restart_clients();
        place = written; fetches = 0; second = 0; is_ready = 0; reborn = 1;
        SAY(client, starts_again, 0); settle()
    }
    /* A program keeps the connection that it has, or loses it. */
    :: atomic {
        restarts > 0 && !quiet ->
        if
        :: kept = 0
        :: kept = 1
        fi;
        d_step {
            restarts--; hurt = 1; restart_takers();
            if
            :: gone_to && !kept -> act[gone_to].live = 0
            :: else
            fi;
            kept = 0;
            SAY(taker, starts_again, 0); settle()
        }
    }
    :: d_step { !quiet -> quiet = 1; whims = 0; restarts = 0; lose_all(); settle() }
    od
}

/* All is quiet and nobody has anything left to do. */
active proctype End() {
    timeout ->
    assert(quiet);
    assert(fetches == 0 && second == 0); /* the lock is free */
    assert(giving == OVER || giving == PARTED);
    assert(socket != FROZEN);
    d_step {
        i_ = 1;
        do
        :: i_ <= ACTS -> assert(!act[i_].awaits && !act[i_].has && !act[i_].offered); i_++
        :: else -> break
        od;
        i_ = 0
    };
    assert(ends == (place != NOWHERE)); /* one live end, or a clean failure */
    assert((place == AT_GIVER) == (socket == OPEN));
    assert(place != NOWHERE || hurt)
}

init {
    atomic {
        run Client(1);
        run Taker(1);
#if ACTS > 1
        run Client(2);
        run Taker(2);
#endif
#if ACTS > 2
        run Client(3);
        run Taker(3);
#endif
        run World()
    }
}
