//! The stacks by which the packets of a flow go (DESIGN §12; docs/decisions/0073, 0081, 0085, 0099).

use core::fmt;

use margay_wire::{
    STACK_ENCAP, STACK_FEC, STACK_SCTP, STACK_SECURE_FEC_AES, STACK_SECURE_FEC_CHACHA, STACK_SECURE_SCTP_AES,
    STACK_SECURE_SCTP_CHACHA,
};

use crate::leg::seal::Cipher;

/// How the packets of a flow are protected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stack {
    /// Not at all: encapsulated, and direct where that can be.
    #[default]
    Plain,
    /// Not at all; but what the network loses of its datagrams is repaired.
    Fec,
    /// Not at all; but what the network loses of its datagrams is sent again.
    Sctp,
    /// Sealed.
    Secure,
    /// Sealed; and what the network loses of its datagrams is repaired.
    SecureFec,
    /// Sealed; and what the network loses of its datagrams is sent again.
    SecureSctp,
}

impl Stack {
    /// All of them, the lesser first.
    pub const ALL: [Self; 6] = [Self::Plain, Self::Fec, Self::Sctp, Self::Secure, Self::SecureFec, Self::SecureSctp];

    /// The name that orders, lists and metrics carry.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Fec => "fec",
            Self::Sctp => "sctp",
            Self::Secure => "secure",
            Self::SecureFec => "secure-fec",
            Self::SecureSctp => "secure-sctp",
        }
    }

    /// Whether nobody between the hosts reads or changes what goes by it.
    pub const fn is_sealed(self) -> bool {
        matches!(self, Self::Secure | Self::SecureFec | Self::SecureSctp)
    }

    /// Whether what the network loses is repaired.
    pub const fn repairs(self) -> bool {
        matches!(self, Self::Fec | Self::SecureFec)
    }

    /// Whether what the network loses is sent again.
    pub const fn repeats(self) -> bool {
        matches!(self, Self::Sctp | Self::SecureSctp)
    }

    /// Whether something is done about what the network loses: then it is for datagrams only.
    pub const fn makes_good(self) -> bool {
        self.repairs() || self.repeats()
    }

    /// The same under a seal.
    #[must_use]
    pub const fn sealed(self) -> Self {
        match self {
            Self::Plain | Self::Secure => Self::Secure,
            Self::Fec | Self::SecureFec => Self::SecureFec,
            Self::Sctp | Self::SecureSctp => Self::SecureSctp,
        }
    }

    /// The same, under a seal where that is asked.
    #[must_use]
    pub const fn sealed_if(self, is_sealed: bool) -> Self {
        if is_sealed { self.sealed() } else { self }
    }

    /// What two ends go to that have different stacks: sealed where one is; without repairs and repetitions, of which
    /// one end knows nothing.
    #[must_use]
    pub const fn agreed(self, other: Self) -> Self {
        match self as u8 == other as u8 {
            true => self,
            false if self.is_sealed() || other.is_sealed() => Self::Secure,
            false => Self::Plain,
        }
    }

    /// The stack that a number of DATA or CHANGE stands for.
    pub const fn of_number(number: u8) -> Option<Self> {
        match Cipher::of_stack(number) {
            Some(_) => Some(Self::Secure),
            None if number == STACK_ENCAP => Some(Self::Plain),
            None if number == STACK_FEC => Some(Self::Fec),
            None if matches!(number, STACK_SECURE_FEC_AES | STACK_SECURE_FEC_CHACHA) => Some(Self::SecureFec),
            None if number == STACK_SCTP => Some(Self::Sctp),
            None if matches!(number, STACK_SECURE_SCTP_AES | STACK_SECURE_SCTP_CHACHA) => Some(Self::SecureSctp),
            None => None,
        }
    }

    /// The number that stands for it, where flows are sealed with this cipher.
    pub(crate) const fn number(self, cipher: Option<Cipher>) -> u8 {
        match (self, cipher) {
            (Self::Secure, Some(cipher)) => cipher.stack(),
            (Self::SecureFec, Some(cipher)) => cipher.fec_stack(),
            (Self::SecureSctp, Some(cipher)) => cipher.sctp_stack(),
            (Self::Fec, _) => STACK_FEC,
            (Self::Sctp, _) => STACK_SCTP,
            (Self::Plain | Self::Secure | Self::SecureFec | Self::SecureSctp, _) => STACK_ENCAP,
        }
    }
}

/// What a place of a striped flow has that others have not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlaceStack {
    /// The flow is sealed, and goes by this place as it is.
    Plain,
    /// What is lost of what goes by this place is repaired.
    Fec,
}

impl PlaceStack {
    /// As orders and lists write it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Fec => "fec",
        }
    }
}

impl fmt::Display for Stack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// What of a flow's DATA is given to the application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taking {
    /// What is of this stack.
    Only(Stack),
    /// What is of the stack [before](Stacks::before), until its FENCE; from there on what is of this one. The peer has
    /// not said yet that it turns: nothing but the FENCE ends this, since anybody may forge what seems to be of this
    /// stack.
    Ready(Stack),
    /// The same. The peer has said that it turns: where its FENCE is lost, what has overtaken it does not wait for
    /// long.
    Turning(Stack),
}

/// The stacks of a flow, each way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stacks {
    /// By which this end sends. Where it becomes another, the last packet of the one before is an empty one with FENCE
    /// and the number of the change.
    pub sends: Stack,
    /// What this end takes.
    pub takes: Taking,
    /// The stack that the present change leaves; without one that of both directions.
    pub before: Stack,
    /// The number of the last change; zero: there has been none.
    pub change: u32,
}

impl Stacks {
    /// Of a flow that has never been changed.
    pub const fn only(stack: Stack) -> Self {
        Self { sends: stack, takes: Taking::Only(stack), before: stack, change: 0 }
    }

    /// The stack of both directions, where they have the same.
    pub fn settled(self) -> Option<Stack> {
        (self.takes == Taking::Only(self.sends)).then_some(self.sends)
    }

    /// Whether packets of a stack may be sent or taken.
    pub fn has(self, stack: Stack) -> bool {
        self.sends == stack || self.takes(stack)
    }

    /// Whether packets that are sealed may be sent or taken.
    pub fn has_sealed(self) -> bool {
        Stack::ALL.into_iter().any(|stack| stack.is_sealed() && self.has(stack))
    }

    /// Whether packets that are repaired may be sent or taken.
    pub fn has_repaired(self) -> bool {
        self.has(Stack::Fec) || self.has(Stack::SecureFec)
    }

    /// Whether packets that are sent again when they are lost may be sent or taken.
    pub fn has_repeated(self) -> bool {
        self.has(Stack::Sctp) || self.has(Stack::SecureSctp)
    }

    /// Whether nothing is sent or taken but sealed, also while one sealed stack becomes another.
    pub fn is_sealed_only(self) -> bool {
        !Stack::ALL.into_iter().any(|stack| !stack.is_sealed() && self.has(stack))
    }

    /// Whether anything of a stack may be given on.
    pub fn takes(self, stack: Stack) -> bool {
        match self.takes {
            Taking::Only(only) => only == stack,
            Taking::Ready(to) | Taking::Turning(to) => to == stack || self.before == stack,
        }
    }

    /// Whether what comes direct may be the peer's: it is plain, and was so before the present change.
    pub fn takes_direct(self) -> bool {
        self.takes(Stack::Plain) && self.before == Stack::Plain
    }
}
