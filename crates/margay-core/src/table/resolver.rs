//! Who answers for names that the table delays.

/// Names a resolver; whoever answers [`Question`]s knows what it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ResolverId(pub u32);
