//! A ring of events from eBPF programs to this process.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use libbpf_rs::{MapHandle, RingBuffer, RingBufferBuilder};
use parking_lot::Mutex;

use super::plain::Plain;

/// Events waiting to be heard.
const EVENTS_MAX: usize = 1 << 16;

/// Events of one kind.
pub(crate) struct Ring<T> {
    ring: Mutex<Buffer>,
    waiting: Arc<Mutex<Vec<T>>>,
    map: MapHandle,
}

struct Buffer(RingBuffer<'static>);

// SAFETY: libbpf's ring buffer is a plain structure without ties to a thread; the mutex around it gives one user at a
// time, and its callback is Send.
unsafe impl Send for Buffer {}

impl<T: Plain + Send + 'static> Ring<T> {
    pub(crate) fn new(map: MapHandle) -> libbpf_rs::Result<Self> {
        let waiting = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&waiting);
        let mut builder = RingBufferBuilder::new();
        builder.add(&map, move |bytes| {
            let mut waiting = heard.lock();
            if let Some(event) = T::read(bytes).filter(|_| waiting.len() < EVENTS_MAX) {
                waiting.push(event);
            }
            0
        })?;
        let ring = builder.build()?;
        Ok(Self { ring: Mutex::new(Buffer(ring)), waiting, map })
    }

    /// Readable when there are events.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.as_fd()
    }

    /// What has come.
    pub(crate) fn take(&self) -> Vec<T> {
        // What it refuses comes again: the kernel keeps it.
        let _ = self.ring.lock().0.consume();
        std::mem::take(&mut *self.waiting.lock())
    }
}
