//! A module for `margay ensemble load`: requests whose key begins with `img:` go to the member that is called `images`,
//! all others where libketama's ring has them. A template for modules of your own.
//!
//! Its memory may have 1 MiB, so the stack must be smaller than compilers make it:
//!
//! ```text
//! rustup target add wasm32-unknown-unknown
//! rustc --edition 2024 --target wasm32-unknown-unknown --crate-type cdylib -C opt-level=s -C panic=abort \
//!     -C strip=symbols -C link-arg=-zstack-size=65536 prefix.rs
//! printf 'get img:1\r\nget user42\r\n' |
//!     margay ensemble try prefix.wasm --members images,a,b
//! ```
#![no_std]

use core::sync::atomic::{AtomicI32, Ordering::Relaxed};

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    core::arch::wasm32::unreachable()
}

#[link(wasm_import_module = "margay")]
unsafe extern "C" {
    /// The member that libketama's ring has for a key; -1: there is none.
    safe fn ring(key: i32, len: i32) -> i32;
    /// Writes what a member is called, as far as there is room, and gives the length of all of it.
    safe fn label(member: i32, at: i32, room: i32) -> i32;
}

const FRAME_MAX: usize = 2048;
const LABEL: &[u8] = b"images";
const PREFIX: &[u8] = b"img:";

static mut FRAME: [u8; FRAME_MAX] = [0; FRAME_MAX];
/// The number of the member for images; -1: there is none.
static IMAGES: AtomicI32 = AtomicI32::new(-1);

/// The interface that this module is written for.
#[unsafe(no_mangle)]
pub extern "C" fn alrm_version() -> i32 {
    1
}

/// Where requests are put: `FRAME_MAX` bytes.
#[unsafe(no_mangle)]
pub extern "C" fn alrm_frame() -> i32 {
    &raw const FRAME as i32
}

/// A member has joined.
#[unsafe(no_mangle)]
pub extern "C" fn add_member(member: i32) {
    let mut place = [0_u8; LABEL.len()];
    let len = label(member, place.as_mut_ptr() as i32, LABEL.len() as i32);
    if len == LABEL.len() as i32 && place == LABEL {
        IMAGES.store(member, Relaxed);
    }
}

/// A member is gone.
#[unsafe(no_mangle)]
pub extern "C" fn rm_member(member: i32) {
    let _ = IMAGES.compare_exchange(member, -1, Relaxed, Relaxed);
}

/// A connection of another module, or of none, may come to this one: 1; 0 has it stay. What the other module's
/// `alrm_state` has left lies at `alrm_frame`, so many bytes; this module needs nothing of it.
#[unsafe(no_mangle)]
pub extern "C" fn adopt(_len: i32) -> i32 {
    1
}

/// Whose a request is: its number, or 0xff for nobody's now. Other bits are in the book.
#[unsafe(no_mangle)]
pub extern "C" fn redirect(_connection: i32, len: i32, _source: i32, _rtx: i64) -> i64 {
    // SAFETY: there is one thread, and the switch writes there between calls alone.
    let frame = unsafe { &*(&raw const FRAME) };
    let request = &frame[..(len as usize).min(FRAME_MAX)];
    let key = request.split(|byte| *byte <= b' ').filter(|word| !word.is_empty()).nth(1).unwrap_or_default();
    let images = IMAGES.load(Relaxed);
    let member =
        if images >= 0 && key.starts_with(PREFIX) { images } else { ring(key.as_ptr() as i32, key.len() as i32) };
    i64::from(member & 0xff)
}
