//! Boxes that the table names.

use alloc::boxed::Box;

use crate::table::{Allow, Demux};

/// What a box does with packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BoxKind {
    /// It lets them pass, or not.
    Forward,
    /// It looks at them.
    Sniff,
    /// It changes their addresses or ports.
    Rewrite,
    /// It is a program that ends TCP connections, and takes them there. Those that it makes are its own.
    Proxy(Box<Demux>),
}

/// A box on this host: what the kernel does with packets that come in by `sal0` and leave by `sal0`, or a proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Middlebox {
    /// What it does.
    pub kind: BoxKind,
    /// Whose sessions it takes.
    pub allow: Allow,
}

impl Middlebox {
    /// Where a proxy takes connections; `None`: sessions pass the box.
    pub fn listener(&self) -> Option<Demux> {
        match &self.kind {
            BoxKind::Proxy(listener) => Some(Demux { allow: self.allow.clone(), ..(**listener).clone() }),
            _ => None,
        }
    }
}
