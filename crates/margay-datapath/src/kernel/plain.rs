//! Structures as bytes of a map.
#![allow(unsafe_code)]

/// A structure that eBPF programs and this process share.
///
/// # Safety
///
/// It is `repr(C)`, has no padding, and every pattern of bits is a value of it.
pub(crate) unsafe trait Plain: Copy + Default {
    /// Its bytes, as the maps have them.
    fn bytes(&self) -> &[u8] {
        // SAFETY: the implementor has no padding, so all its bytes are initialised; the slice borrows it.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }

    /// From bytes of a map; `None` when they are too few.
    fn read(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < size_of::<Self>() {
            return None;
        }
        // SAFETY: there are enough bytes, any of which make a value, and the read needs no alignment.
        Some(unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() })
    }
}
