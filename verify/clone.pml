/* clone.pml: one key in two places, as after a copy of a virtual machine: both have the same location in force when they begin, and may
 * use the same numbers. B must be with exactly one of them.
 *
 * MOVES: how often A changes its address. WHIMS: how often one of the two moves, or gives up, without need. */

#ifndef MOVES
#define MOVES 1
#endif
#ifndef WHIMS
#define WHIMS 1
#endif
#define HOSTS 3
#define NO_ROUTER

#include "rsyn.pml"

byte moves = MOVES;

proctype World() {
end:
    do
    :: d_step {
        moves > 0 && !quiet ->
        host[A].own = 3 & ~host[A].own;
        printf("A is at a%d\n", host[A].own >> 1);
        moves--;
        settle_messages()
    }
    :: d_step { !quiet -> moves = 0; fall_quiet() }
    od
}

#define IS_WITH_B(h) (host[h].phase == STILL && host[h].number == host[B].number && host[h].pair == host[B].pair)

/* The other one may still ask: nobody answers it. */
active proctype End() {
    timeout ->
    assert(quiet);
    assert(IS_WITH_B(A) + IS_WITH_B(CLONE) == 1);
    assert(HAS(ROWS(host[A].own | host[CLONE].own), host[B].pair))
}

init {
    atomic {
        start_host(A, BIT(0), PAIR(0, 0));
        start_host(CLONE, BIT(2), PAIR(0, 0));
        start_host(B, BIT(0), PAIR(0, 0));
        run_host(A);
        run_host(CLONE);
        run World()
    }
}
