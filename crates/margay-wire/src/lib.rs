//! Formats of the Service Access Layer (DESIGN §6): parse and emit, nothing else.
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod address;
mod chain;
mod change;
mod covered;
mod data;
mod extension;
mod fec;
mod framed;
mod grant;
mod handover;
mod header;
mod loss;
mod message;
mod notice;
mod order;
mod own_frame;
mod program;
mod reconfiguration;
mod resolvable;
pub mod sctp;
mod splice;
mod stripe;
mod timing;

pub use chain::{BOXES_MAX, BoxFlags, BoxRepr, Chain, ChainRepr};
pub use change::{CHANGES, ChangeRepr, ChangeStep};
pub use covered::{COVERED_LEN_MAX, COVERED_MAX, ChunkName, Covered};
pub use data::{
    BESIDE, DATA_HEADER_LEN, DataRepr, FENCE, GsoKind, REPAIR, SEAL_TAG_LEN, STACK_ENCAP, STACK_FEC, STACK_SCTP,
    STACK_SECURE_AES, STACK_SECURE_CHACHA, STACK_SECURE_FEC_AES, STACK_SECURE_FEC_CHACHA, STACK_SECURE_SCTP_AES,
    STACK_SECURE_SCTP_CHACHA, TRAIN_HEADER_LEN, TrainRepr, change_of_fence, epochs, fence_of_change, is_sealed,
};
pub use extension::*;
pub use fec::{
    BLOCK_MAX, PLACE_LEN, PlaceRepr, REPAIR_HEADER_LEN, RepairRepr, SEALED_FEC_LEN, SYMBOL_HEAD_LEN, SealedFecRepr,
};
pub use framed::{
    AbortReason, FRAMED_HEADER_LEN, FRAMED_LABEL_MAX, FRAMED_LOST_MAX, FRAMED_PART_HEADER_LEN, FRAMED_TEXT_MAX, Framed,
    FramedParts, FramedTerms, LostNumbers, framed_host_number,
};
pub use grant::{GRANT_FLOWS_MAX, GrantRepr};
pub use handover::HandoverRepr;
pub use header::*;
pub use loss::LossRepr;
pub use message::{Message, MessageWriter};
pub use notice::NoticeRepr;
pub use order::{ORDER_SIGNED_LEN, OrderAct, OrderRepr, OrderState};
pub use own_frame::{OWN_FRAME_HEADER_LEN, OWN_FRAME_KEY_MAX, OWN_FRAMES, OwnFrameRepr};
pub use program::{
    HANDED_DATA_MAX, LOAD_PERCENT_MAX, PROGRAM_REPLY_LEN, PROGRAM_REQUEST_LEN, PROGRAM_TEXT_MAX, PROGRAM_VERSION,
    ProgramError, ProgramKind, ProgramReplyRepr, ProgramRequestRepr, ProgramTarget, SPLICE_RELAYS_ON, TAKE_OVER_GIVES,
};
pub use reconfiguration::{ReconfigurationRepr, ReconfigurationStep};
pub use resolvable::{HOP_TAGGED_LEN, RESOLVABLE_LEN, RESOLVABLE_OFFSET, ResolvableRepr};
pub use splice::{CutRepr, SPLICE_LEN, SpliceRepr, SpliceSocketRepr};
pub use stripe::{ArrivalRepr, ArrivalsRepr, PLACES_MAX, Sharing, StripeRepr};
pub use timing::TimingRepr;
