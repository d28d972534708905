/* choice.pml: two hosts with two addresses each. Pairs stop working and work again; each end may suspect the pair in force, both may at
 * once, and each may prefer another although it works. The ends must choose one pair together.
 *
 * CHANGES: how often a pair stops or starts. WHIMS: how often a host moves, or gives up, without need. */

#ifndef CHANGES
#define CHANGES 1
#endif
#ifndef WHIMS
#define WHIMS 1
#endif
#define ALL_KNOWN
#define NO_ROUTER

#include "rsyn.pml"

byte changes = CHANGES;
#define PAIRS (ROWS(3) & COLUMNS(3))

proctype World() {
    byte p;

end:
    do
    :: atomic {
        changes > 0 && !quiet ->
        left = PAIRS;
        pick(p);
        d_step {
            cut = cut ^ BIT(p);
            /* Some pair always works. */
            if
            :: cut == PAIRS -> cut = cut ^ BIT(p)
            :: else
            fi;
            printf("pairs that do not work: %d\n", cut);
            p = 0;
            changes--;
            settle_messages()
        }
    }
    :: d_step { restarts > 0 && !quiet -> restart(0) }
    :: d_step { restarts > 0 && !quiet -> restart(1) }
    :: d_step { !quiet -> changes = 0; restarts = 0; fall_quiet() }
    od
}

active proctype End() {
    timeout ->
    assert(quiet);
    assert(host[A].phase == STILL && host[B].phase == STILL);
    assert(host[A].pair == host[B].pair);
    assert(HAS(PAIRS & ~cut, host[A].pair))
}

init {
    atomic {
        start_host(A, 3, PAIR(0, 0));
        start_host(B, 3, PAIR(0, 0));
        run_host(A);
        run_host(B);
        run World()
    }
}
