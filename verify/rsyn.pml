/* rsyn.pml: the exchange by which a host moves (docs/decisions/0018-moving.md), as state machines of hosts and a network.
 *
 * Included by the models, which add a world that makes the hosts move, and say what must hold at the end.
 *
 * Two sides, A's and B's. Each has up to three addresses, and the attacker has one more, which it can show as either side's. A
 * pair of addresses is one small number, so that a set of pairs is one word.
 *
 * What is under way is a set: a message that was sent once may be delivered at any later time, any number of times, or never.
 * That is loss, disorder, doubling and retransmission at once. A message is delivered to whoever is at its address *then*.
 * Sending is no choice, since what was sent need not arrive; and since an RSYN changes nothing at the peer, neither is the answer to it.
 * So the only steps are those that change a host: RSYN-ACK, DONE or CONFIRM taken, a move begun, a move given up.
 *
 * At some point the world falls quiet: it loses everything under way, and changes nothing from then on. From there only what a
 * host still says again can help. No step leads back to an earlier state, so each run ends, and where it ends is looked at.
 */

#define A 0
#define B 1
#define CLONE 2 /* another place with A's key */

#ifndef HOSTS
#define HOSTS 2
#endif
#ifndef LAST
#define LAST 4 /* the greatest number that a run may need; it is asserted that it suffices */
#endif

#define SIDE 4 /* addresses per side; the last is the attacker's */
#define STRANGER 3
#define PAIR(a, b) ((a) * SIDE + (b))
#define BIT(i) (1 << (i))
#define HAS(set, i) (((set) >> (i)) & 1)
#define A_END(pair) ((pair) / SIDE)
#define B_END(pair) ((pair) % SIDE)

/* All pairs with one of these addresses at A's end, and at B's. (The attacker is never both.) */
#define ROWS(set) (HAS(set, 0) * 15 | HAS(set, 1) * 240 | HAS(set, 2) * 3840 | HAS(set, 3) * 28672)
#define COLUMNS(set) (HAS(set, 0) * 4369 | HAS(set, 1) * 8738 | HAS(set, 2) * 17476 | HAS(set, 3) * 2184)
#define EVERY 32767

/* For people who read a trace: who, what, the number, the pair (of what begins: the one that is left). */
#define SAY(h, word, n, p) printf("%c: %e %d: a%d-b%d\n", 65 + (h), word, n, A_END(p), B_END(p))

mtype = { STILL, ASKING, PROVING, begins, sends_done, is_confirmed, commits };

typedef Host {
    byte own;     /* the addresses that it has now: a set */
    mtype phase;  /* ASKING: RSYN sent; PROVING: DONE sent, no CONFIRM yet */
    byte asks;    /* the number of that exchange; 0 if there is none */
    byte spent;   /* the last number with which it sent DONE */
    byte over;    /* the pair over which it sent DONE: one for each number */
    byte token;   /* the pair in the token that it brings back: another than `over` only through an attacker */
    byte number;  /* the location in force: its number, who moved, the pair */
    bit mover;
    byte pair;
    byte known;   /* number and pair of the last move of the peer that it committed to: of use where each counts alone */
    byte place;
    byte since;   /* how often its addresses changed; and how often those of the peer had, when it was last known to be where it is
                   * taken to be: for the assertions alone */
    byte met
};

/* What was sent with one number of one host and can still arrive: sets of pairs. */
typedef Wire { short rsyn; short ack; short done; short confirm };

Host host[HOSTS];
Wire wire[HOSTS * (LAST + 1)];
short cut;          /* pairs that carry nothing now */
bit quiet;          /* nothing changes and nothing is lost any more */
byte registered[2]; /* where the rendezvous router knows them to be: a set of addresses */
byte whims = WHIMS; /* how often a host moves, or gives an exchange up, although all is well */

#define WIRE(h, n) wire[(h) * (LAST + 1) + (n)]
#define KEY(h) ((h) == B -> B : A)
#define PEER(h) ((h) == B -> A : B)
#define SENT_BY(h) ((h) == B -> COLUMNS(host[B].own) : ROWS(host[h].own))
#define REACHES(h) (SENT_BY(h) & ~cut)
#define WORKS(h) HAS(REACHES(h) & REACHES(PEER(h)), host[h].pair)

/* Is `n` of `mover` a later location than the one that the host `h` has in force? There is one count of locations for both ends; of two
 * equal numbers the smaller key's is the later. */
#ifdef TIES_LEFT
#define LATER(n, key, than, than_key) ((n) > (than))
#else
#define LATER(n, key, than, than_key) ((n) > (than) || ((n) == (than) && (key) < (than_key)))
#endif
#ifdef COUNT_EACH
#define NEWER(n, key, h) ((n) > host[h].known)
#else
#define NEWER(n, key, h) LATER(n, key, host[h].number, host[h].mover)
#endif

/* Does `h` answer and commit to it? Not if it has sent a later DONE itself, which may have arrived. */
#if defined(COUNT_EACH) || defined(SPENT_FORGOTTEN)
#define WELCOME(n, key, h) NEWER(n, key, h)
#else
#define WELCOME(n, key, h) (NEWER(n, key, h) && LATER(n, key, host[h].spent, KEY(h)))
#endif

/* ---- What is remembered for the assertions alone --------------------------------------------------------------------- */

/* For each number of each host: the place at which it was proved, plus one; how old the mover's addresses were then, and those of the peer
 * when it committed. */
typedef Proof { byte place; byte mover_since; byte peer_since; bit peer_commits };
Proof proof[HOSTS * (LAST + 1)];
#define PROOF(h, n) proof[(h) * (LAST + 1) + (n)]

inline proved_at(h, p) {
    host[h].spent = host[h].asks;
#ifndef DONE_EVERYWHERE
    assert(PROOF(h, host[h].asks).place == 0); /* one number, one place */
#endif
    PROOF(h, host[h].asks).place = p + 1;
    PROOF(h, host[h].asks).mover_since = host[h].since
}

/* A peer only ever goes to where the mover itself said DONE with this number; and from there never back to where the mover was before. */
inline committed_at(h, n, p) {
    assert(PROOF(h, n).place == p + 1);
#if HOSTS == 2
    assert(PROOF(h, n).mover_since >= host[PEER(h)].met);
#else
    /* Of two places with one key, one number leads to one. */
    assert(PROOF(A, n).peer_commits + PROOF(CLONE, n).peer_commits == 0);
#endif
    host[PEER(h)].met = PROOF(h, n).mover_since;
    PROOF(h, n).peer_commits = 1;
    PROOF(h, n).peer_since = host[PEER(h)].since
}

/* A mover takes for confirmed only what the peer committed to; and what it learns by its own move never takes it back to where the peer
 * was before. */
inline confirmed_at(h) {
    assert(PROOF(h, host[h].asks).peer_commits);
    assert(PROOF(h, host[h].asks).peer_since >= host[h].met);
    host[h].met = PROOF(h, host[h].asks).peer_since
}

/* Nobody can ask for it any more. (With a clone, the other place may.) */
inline forget_proof(h, n) {
#if HOSTS == 2
    PROOF(h, n).mover_since = 0;
    PROOF(h, n).peer_since = 0;
    PROOF(h, n).peer_commits = 0
#else
    skip
#endif
}

/* ---- Messages that follow from the state of the hosts ---------------------------------------------------------------- */

/* RSYN: from every address of its own; to the peer's address in force; to where the router knows the peer; and to wherever something of
 * the peer comes from, even an RSYN or a DONE that is not welcome. Until all is quiet, to any address: it may have been known once. */
#ifdef NO_ROUTER
#define VIA_ROUTER(h) 0
#else
#define VIA_ROUTER(h) ((h) == B -> ROWS(registered[A]) : COLUMNS(registered[B]))
#endif
#ifdef NO_ECHO
#define ECHO(h) 0
#else
#ifdef ECHO_OF_RSYN
#define SPEAKS(h) (host[h].phase == ASKING -> WIRE(h, host[h].asks).rsyn : 0)
#else
#define SPEAKS(h) (host[h].phase == ASKING -> WIRE(h, host[h].asks).rsyn : \
    (host[h].phase == PROVING -> BIT(host[h].over) : BIT(host[h].pair) & SENT_BY(h)))
#endif
#define ECHO(h) (SPEAKS(PEER(h)) & REACHES(h))
#endif
#ifdef ALL_KNOWN
#define KNOWN(h) EVERY
#else
#define KNOWN(h) ((h) == B -> ROWS(BIT(A_END(host[B].pair))) : COLUMNS(BIT(B_END(host[h].pair))))
#endif
#define TARGETS(h) (quiet -> KNOWN(h) | VIA_ROUTER(h) : EVERY)

inline ask(h) {
    if
    :: host[h].phase == ASKING ->
        WIRE(h, host[h].asks).rsyn = WIRE(h, host[h].asks).rsyn | (SENT_BY(h) & TARGETS(h))
    :: else
    fi
}

inline echo(h) {
    if
    :: host[h].phase == ASKING -> WIRE(h, host[h].asks).rsyn = WIRE(h, host[h].asks).rsyn | ECHO(h)
    :: else
    fi
}

/* RSYN-ACK: back to where the RSYN came from, with a token for that pair; nothing is kept. An attacker can have sent the RSYN on from
 * its own address. */
#ifdef ATTACKER
#define SENT_ON(h) ((h) == B -> COLUMNS(BIT(STRANGER)) : ROWS(BIT(STRANGER)))
#else
#define SENT_ON(h) 0
#endif

inline answer(h) {
    if
    :: host[h].phase == ASKING && WELCOME(host[h].asks, KEY(h), PEER(h)) ->
        WIRE(h, host[h].asks).ack = WIRE(h, host[h].asks).ack |
            ((WIRE(h, host[h].asks).rsyn | SENT_ON(h)) & REACHES(PEER(h)))
    :: else
    fi
}

/* DONE is said again until there is CONFIRM; CONFIRM answers every DONE of the number and pair that the peer is committed to. */
#ifdef COUNT_EACH
#define COMMITTED(h) (host[PEER(h)].known == host[h].asks)
#define COMMITTED_TO(h) host[PEER(h)].place
#else
#define COMMITTED(h) (host[PEER(h)].number == host[h].asks && host[PEER(h)].mover == KEY(h))
#define COMMITTED_TO(h) host[PEER(h)].pair
#endif

inline prove(h) {
    if
    :: host[h].phase == PROVING ->
        WIRE(h, host[h].asks).done = WIRE(h, host[h].asks).done | BIT(host[h].token);
#ifndef CONFIRM_ONCE
        if
        :: COMMITTED(h) && HAS(WIRE(h, host[h].asks).done & REACHES(PEER(h)), COMMITTED_TO(h)) ->
            WIRE(h, host[h].asks).confirm = WIRE(h, host[h].asks).confirm | BIT(COMMITTED_TO(h))
        :: else
        fi
#endif
    :: else
    fi
}

/* What nobody would act upon any more is forgotten, or the same state would be visited once for each such message. */
inline forget(h) {
#ifndef COMMIT_ON_RSYN
    n_ = 1;
    do
    :: n_ <= LAST ->
        if
        :: host[h].phase != ASKING || host[h].asks != n_ -> WIRE(h, n_).rsyn = 0; WIRE(h, n_).ack = 0
        :: else
        fi;
        if
        :: host[h].phase != PROVING || host[h].asks != n_ -> WIRE(h, n_).confirm = 0
        :: else
        fi;
#ifndef NUMBERS_IGNORED
        if
        :: !WELCOME(n_, KEY(h), PEER(h)) ->
            WIRE(h, n_).done = 0;
            if
            :: host[h].phase != PROVING || host[h].asks != n_ -> forget_proof(h, n_)
            :: else
            fi
        :: else
        fi;
#endif
        n_++
    :: else -> break
    od;
    n_ = 0;
#endif
    /* What belongs to an exchange that is over means nothing. */
    if
    :: host[h].phase != PROVING -> host[h].over = 0; host[h].token = 0
    :: else
    fi;
    if
    :: host[h].phase == STILL -> host[h].asks = 0
    :: else
    fi
}

hidden byte n_;

inline settle_messages() {
    ask(A);
    ask(B);
    echo(A);
    echo(B);
    answer(A);
    answer(B);
    prove(A);
    prove(B);
#if HOSTS == 3
    ask(CLONE);
    answer(CLONE);
    prove(CLONE);
    forget(CLONE);
#endif
    forget(A);
    forget(B)
}

/* Any one element of `left`, which is not empty. (An argument of Promela's inline may not be long.) */
short left;
inline pick(i) {
    i = 0;
    do
    :: left & 1 -> break
    :: left > 1 -> left = left >> 1; i++
    od;
    left = 0
}

/* ---- What a host does ------------------------------------------------------------------------------------------------ */

#ifdef NUMBERS_REUSED
/* Wrong on purpose: a number counts as used only when it was confirmed. */
#define NEXT(h) (host[h].number + 1)
#elif defined(COUNT_EACH)
#define NEXT(h) (host[h].spent + 1)
#else
#define NEXT(h) ((host[h].spent > host[h].number -> host[h].spent : host[h].number) + 1)
#endif

inline begin(h) {
    host[h].asks = NEXT(h);
    assert(host[h].asks <= LAST);
    host[h].phase = ASKING;
    SAY(h, begins, host[h].asks, host[h].pair)
}

/* The pair over which the mover takes itself to be heard. Without an attacker it is the token's. With one, the RSYN-ACK may have come to it
 * from anywhere; unless the mover compares the addresses that the RSYN-ACK names under its tag. */
#if defined(ATTACKER) && defined(ADDRESSES_TRUSTED)
#define ACKS(h) WIRE(h, host[h].asks).ack
#define SEEN_OVER(h, token) SENT_BY(h)
#else
#define ACKS(h) (WIRE(h, host[h].asks).ack & REACHES(h))
#define SEEN_OVER(h, token) BIT(token)
#endif

/* CONFIRM for this host's exchange. One that carries no token tells an attacker's victim nothing of the pair. */
#if defined(CONFIRM_BARE) && defined(ATTACKER) && HOSTS == 3
#define CONFIRMED(h) (WIRE(h, host[h].asks).confirm || ((h) != B && \
    (WIRE(A, host[h].asks).confirm || WIRE(CLONE, host[h].asks).confirm)))
#elif defined(ATTACKER)
#define CONFIRMED(h) HAS(WIRE(h, host[h].asks).confirm, host[h].token)
#else
#define CONFIRMED(h) HAS(WIRE(h, host[h].asks).confirm & REACHES(h), host[h].over)
#endif

inline take_location(h, n, key, p) {
    host[h].number = n;
    host[h].mover = key;
    host[h].pair = p
}

/* Its DONE arrives. Once all is quiet a timer is taken to be longer than what is under way, or two hosts could outbid each other for ever. (Of
 * two places with one key, the one that came second with a number waits for ever here; in truth both would outbid each other.) */
#define ARRIVES(h) HAS(REACHES(h) & REACHES(PEER(h)), host[h].over)

proctype Mover(byte h) {
    byte p, t;

end:
    do
    /* It suspects its pair, or lost its address: it begins to move. */
    :: atomic {
        host[h].phase == STILL && !WORKS(h) ->
        d_step { begin(h); settle_messages() }
    }
    /* It moves because it wants to. */
    :: atomic {
        host[h].phase == STILL && WORKS(h) && whims > 0 && !quiet ->
        d_step { whims--; begin(h); settle_messages() }
    }
    /* RSYN-ACK: of all pairs that were asked over, DONE goes over the first that answered. */
    :: atomic {
        host[h].phase == ASKING && ACKS(h) ->
        left = ACKS(h);
        pick(t);
        left = SEEN_OVER(h, t);
        pick(p);
        d_step {
#ifdef NO_CONFIRM
            /* Wrong on purpose: the mover takes its DONE for received. */
            take_location(h, host[h].asks, KEY(h), p);
            WIRE(h, host[h].asks).done = WIRE(h, host[h].asks).done | BIT(t);
            host[h].phase = STILL;
#else
            host[h].phase = PROVING;
            host[h].over = p;
            host[h].token = t;
#endif
#ifdef DONE_EVERYWHERE
            /* Wrong on purpose: DONE over every pair that answered. */
            WIRE(h, host[h].asks).done = WIRE(h, host[h].asks).done | ACKS(h);
#endif
            proved_at(h, p);
            SAY(h, sends_done, host[h].asks, p);
            p = 0;
            t = 0;
            settle_messages()
        }
    }
    /* CONFIRM: the new location is in force. */
    :: atomic {
        host[h].phase == PROVING && CONFIRMED(h) ->
        d_step {
#ifndef COUNT_EACH
            assert(NEWER(host[h].asks, KEY(h), h));
#endif
            confirmed_at(h);
            SAY(h, is_confirmed, host[h].asks, host[h].over);
            take_location(h, host[h].asks, KEY(h), host[h].over);
            host[h].phase = STILL;
            settle_messages()
        }
    }
    /* No CONFIRM comes, and the timer of the host is at its end. DONE was sent for this number, so another place needs another. */
    :: atomic {
        host[h].phase == PROVING && !ARRIVES(h) -> d_step { begin(h); settle_messages() }
    }
    /* Its timer was too short. */
    :: atomic {
        host[h].phase == PROVING && ARRIVES(h) && whims > 0 && !quiet ->
        d_step { whims--; begin(h); settle_messages() }
    }
    od
}

/* The peer of `h` takes a DONE with the number `n`. */
#ifdef COMMIT_ON_RSYN
#define PROOFS(h, n) (WIRE(h, n).done | WIRE(h, n).rsyn | WIRE(h, n).ack)
#else
#define PROOFS(h, n) WIRE(h, n).done
#endif
#ifdef NUMBERS_IGNORED
#define ACCEPTED(n, who, peer) ((n) != host[peer].number || (who) != host[peer].mover)
#else
#define ACCEPTED(n, who, peer) WELCOME(n, who, peer)
#endif

proctype Committer(byte h; byte n) {
    byte p;

end:
    do
    :: atomic {
        ACCEPTED(n, KEY(h), PEER(h)) && (PROOFS(h, n) & REACHES(PEER(h))) ->
        left = PROOFS(h, n) & REACHES(PEER(h));
        pick(p);
        d_step {
            committed_at(h, n, p);
            SAY(PEER(h), commits, n, p);
            take_location(PEER(h), n, KEY(h), p);
#ifdef CONFIRM_ONCE
            /* Wrong on purpose: a DONE that says nothing new is not answered. */
            WIRE(h, n).confirm = BIT(p);
#endif
#ifdef COUNT_EACH
            host[PEER(h)].known = n;
            host[PEER(h)].place = p;
#else
            /* An own move that is older than this one is over. */
            if
            :: host[PEER(h)].phase != STILL && !NEWER(host[PEER(h)].asks, PEER(h), PEER(h)) -> host[PEER(h)].phase = STILL
            :: else
            fi;
#endif
            p = 0;
            settle_messages()
        }
    }
    od
}

/* ---- The world ------------------------------------------------------------------------------------------------------- */

/* A starts again. It forgets its open move and the number of its last DONE; of the location it knows at best what it had written down. So
 * it counts on far above, and says where it is. (Where both go back to 0 instead, and what was sent before is void, the new numbers
 * are as good as far above the old ones.) Its old messages are still under way. */
#ifndef RESTARTS
#define RESTARTS 0
#endif
#ifndef FAR_ABOVE
#define FAR_ABOVE 3 /* greater than what is used before: with fewer numbers to spare, `LAST` would not suffice */
#endif
byte restarts = RESTARTS;

inline restart(forgets_pair) {
    restarts--;
    assert(host[A].spent <= 3 && host[B].spent <= 3);
    host[A].phase = STILL;
    host[A].number = FAR_ABOVE;
    host[A].mover = A;
    host[A].spent = FAR_ABOVE;
    host[A].met = 0;
    host[A].pair = (forgets_pair -> PAIR(0, 0) : host[A].pair);
    printf("A starts again\n");
    begin(A);
    settle_messages()
}

inline fall_quiet() {
    quiet = 1;
    whims = 0;
    n_ = 0;
    do
    :: n_ < HOSTS * (LAST + 1) ->
        wire[n_].rsyn = 0;
        wire[n_].ack = 0;
        wire[n_].done = 0;
        wire[n_].confirm = 0;
        n_++
    :: else -> break
    od;
    n_ = 0;
    settle_messages()
}

inline start_host(h, addresses, p) {
    host[h].own = addresses;
    host[h].phase = STILL;
    host[h].pair = p;
    host[h].place = p
}

inline run_host(h) {
    run Mover(h);
    n_ = 1;
    do
    :: n_ <= LAST -> run Committer(h, n_); n_++
    :: else -> break
    od;
    n_ = 0
}
