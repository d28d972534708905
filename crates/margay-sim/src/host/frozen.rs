//! Connections of programs that stand still while they are handed to another host.

use margay_core::{Instant, Tuple};

use super::Host;
use crate::stream::Stream;

impl Host {
    /// Freezes a program's connection; gives what another host needs to go on with it.
    pub fn freeze(&mut self, tuple: &Tuple) -> Option<Stream> {
        self.stream_of(tuple).map(Stream::freeze)
    }

    /// Restores a connection that was frozen at another host. It stays frozen.
    pub fn restore(&mut self, frozen: Stream, tuple: Tuple) {
        self.streams.push(frozen.restored(tuple));
    }

    /// A frozen connection goes on.
    pub fn go_on(&mut self, now: Instant, tuple: &Tuple) {
        let said = self.stream_of(tuple).map(|stream| stream.go_on(now)).unwrap_or_default();
        said.iter().for_each(|segment| self.egress(now, &segment.emit()));
        self.drain(now);
    }

    /// A frozen connection is closed, and nobody is told.
    pub fn close_silently(&mut self, tuple: &Tuple) {
        if let Some(stream) = self.stream_of(tuple) {
            stream.close_silently();
        }
    }

    /// The same, if it is frozen.
    pub(crate) fn close_frozen(&mut self, tuple: &Tuple) {
        if let Some(stream) = self.stream_of(tuple).filter(|stream| stream.is_frozen()) {
            stream.close_silently();
        }
    }
}
