/* move.pml: two hosts with one address each, which move from place to place, in any order, also both at once and back again.
 *
 * MOVES: how often, together. The address of before is gone at once: there is no old pair to fall back on. */

#ifndef MOVES
#define MOVES 2
#endif
#ifndef WHIMS
#define WHIMS 0
#endif

#include "rsyn.pml"

byte moves = MOVES;

proctype World() {
    byte a;

end:
    do
    :: atomic {
        moves > 0 && !quiet ->
        if
        :: left = 7 & ~host[A].own; pick(a); host[A].own = BIT(a); host[A].since++; printf("A is at a%d\n", a)
        :: left = 7 & ~host[B].own; pick(a); host[B].own = BIT(a); host[B].since++; printf("B is at b%d\n", a)
        fi;
        d_step { a = 0; moves--; settle_messages() }
    }
    /* Registration with the router is an exchange of its own, with somebody who does not move: it happens at some time. */
#ifndef NO_ROUTER
    :: d_step { registered[A] != host[A].own -> registered[A] = host[A].own; settle_messages() }
#ifndef ONE_REGISTERS
    :: d_step { registered[B] != host[B].own -> registered[B] = host[B].own; settle_messages() }
#endif
#endif
    :: d_step { restarts > 0 && !quiet -> restart(0) }
    :: d_step { restarts > 0 && !quiet -> restart(1) }
    :: d_step { !quiet -> moves = 0; restarts = 0; fall_quiet() }
    od
}

/* All is quiet and nobody has anything left to do. */
active proctype End() {
    timeout ->
    assert(quiet);
    assert(host[A].phase == STILL && host[B].phase == STILL);
    assert(host[A].pair == host[B].pair);
    assert(host[A].pair == PAIR((host[A].own >> 1), (host[B].own >> 1)))
}

init {
    atomic {
        start_host(A, BIT(0), PAIR(0, 0));
        start_host(B, BIT(0), PAIR(0, 0));
        registered[A] = BIT(0);
        registered[B] = BIT(0);
        run_host(A);
        run_host(B);
        run World()
    }
}
