//! Formats of the Service Access Layer (DESIGN §6): parse and emit, nothing else.
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod address;
mod data;
mod extension;
mod header;
mod message;
mod program;
mod resolvable;

pub use data::{BESIDE, DATA_HEADER_LEN, DataRepr, FENCE, GsoKind, TRAIN_HEADER_LEN, TrainRepr};
pub use extension::*;
pub use header::*;
pub use message::{Message, MessageWriter};
pub use program::{
    PROGRAM_REPLY_LEN, PROGRAM_REQUEST_LEN, PROGRAM_TEXT_MAX, PROGRAM_VERSION, ProgramError, ProgramKind,
    ProgramReplyRepr, ProgramRequestRepr,
};
pub use resolvable::{HOP_TAGGED_LEN, RESOLVABLE_LEN, RESOLVABLE_OFFSET, ResolvableRepr};
