//! Where the process takes its memory from.
#![allow(unsafe_code)]

/// One arena for all threads. Flows are set up by whichever thread has the packet, and their tables grow and shrink
/// under several hands: with an arena for each, what one frees is of no use to the others, which cost a quarter more
/// memory per flow. To be called before there are other threads.
pub fn share() {
    // SAFETY: mallopt has no preconditions; this parameter takes any positive number.
    let is_set = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    debug_assert_eq!(is_set, 1);
}

/// Gives memory that is free back to the system, also what lies between pieces that are in use. Takes some
/// milliseconds, during which nobody gets any.
pub fn give_back() {
    // SAFETY: malloc_trim has no preconditions.
    unsafe { libc::malloc_trim(0) };
}
