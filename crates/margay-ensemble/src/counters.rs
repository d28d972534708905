//! What the switch dropped, and why.

macro_rules! dropped {
    ($($(#[$doc:meta])* $name:ident => $field:ident;)*) => {
        /// Why something was dropped. What is of worth the sender repeats.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Dropped {
            $($(#[$doc])* $name,)*
        }

        /// How often something was dropped, by reason.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct Counters {
            $($(#[$doc])* pub $field: u64,)*
        }

        impl Counters {
            pub(crate) fn note(&mut self, dropped: Dropped) {
                match dropped {
                    $(Dropped::$name => self.$field += 1,)*
                }
            }

            /// Adds those of another.
            pub fn add(&mut self, other: &Self) {
                $(self.$field += other.$field;)*
            }

            /// All of them, by name.
            pub fn all(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field),)*].into_iter()
            }
        }
    };
}

dropped! {
    /// A chunk that has been acknowledged for good.
    Duplicate => duplicate;
    /// A chunk beyond the window.
    BeyondWindow => beyond_window;
    /// A fragment before the first of its frame, or a frame of a stream that is nowhere before those that it follows.
    BeforeFirst => before_first;
    /// A repeated chunk that is not the same.
    Differs => differs;
    /// More streams, frames of several chunks at once, or numbers kept free than there is room for.
    Bound => bound;
    /// There is no member, or the plug-in named none that takes frames.
    NoMember => no_member;
    /// The plug-in dropped it.
    Plugin => plugin;
    /// An acknowledgement of what was never sent, or a confirmation of what was never told.
    Lie => lie;
    /// A chunk that cannot be read, or has no place here.
    Malformed => malformed;
}
