//! The one ordered queue of everything that the core asks of its caller.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

use margay_wire::FlowId;

use crate::cache::entry::{Directions, EntryUpdate};
use crate::cache::output::Output;

enum Item {
    Transmit(Option<IpAddr>, SocketAddr, Vec<u8>),
    Inject(Vec<u8>),
    Deliver(FlowId, Vec<u8>),
    Egress(Vec<u8>),
    Carry(FlowId, Vec<u8>),
    Ingress(SocketAddr, Vec<u8>),
    /// Without bytes of its own.
    Plain(Output),
}

/// Bounded in packets; what has no bytes always fits, since a cache that misses an update would carry a dead flow.
pub(crate) struct OutputQueue {
    items: VecDeque<Item>,
    packets: usize,
    packets_max: usize,
    /// Packets that found the queue full.
    pub overflowed: u64,
    /// Flows whose entries are kept out of the cache.
    frozen: BTreeSet<FlowId>,
    /// Flows of which nothing is sent plain, not even for the agents.
    guarded: BTreeSet<FlowId>,
}

impl OutputQueue {
    pub fn new(packets_max: usize) -> Self {
        Self {
            items: VecDeque::new(),
            packets: 0,
            packets_max,
            overflowed: 0,
            frozen: BTreeSet::new(),
            guarded: BTreeSet::new(),
        }
    }

    fn push(&mut self, item: Item) {
        if self.packets >= self.packets_max {
            self.overflowed += 1;
            return;
        }
        self.packets += 1;
        self.items.push_back(item);
    }

    pub fn transmit(&mut self, local: Option<IpAddr>, to: SocketAddr, datagram: Vec<u8>) {
        self.push(Item::Transmit(local, to, datagram));
    }

    pub fn inject(&mut self, packet: Vec<u8>) {
        self.push(Item::Inject(packet));
    }

    pub fn deliver(&mut self, flow: FlowId, packet: Vec<u8>) {
        self.push(Item::Deliver(flow, packet));
    }

    pub fn egress(&mut self, packet: Vec<u8>) {
        self.push(Item::Egress(packet));
    }

    /// Sends a packet by a flow whose session is between two ways. By one that is guarded it would go plain: it is
    /// lost, as on a path, until the flow is encrypted.
    pub fn carry(&mut self, flow: FlowId, packet: Vec<u8>) {
        if !self.guarded.contains(&flow) {
            self.push(Item::Carry(flow, packet));
        }
    }

    pub fn ingress(&mut self, from: SocketAddr, datagram: Vec<u8>) {
        self.push(Item::Ingress(from, datagram));
    }

    /// From here on no entry of this flow is installed, whatever happens to it.
    pub fn freeze(&mut self, flow: FlowId) {
        self.frozen.insert(flow);
    }

    pub fn thaw(&mut self, flow: FlowId) {
        self.frozen.remove(&flow);
    }

    pub fn is_frozen(&self, flow: FlowId) -> bool {
        self.frozen.contains(&flow)
    }

    /// From here on no packet of this flow's direct path is asked for, whatever happens to it.
    pub fn guard(&mut self, flow: FlowId) {
        self.guarded.insert(flow);
    }

    pub fn unguard(&mut self, flow: FlowId) {
        self.guarded.remove(&flow);
    }

    /// Asks for a packet of a flow's direct path.
    fn push_unless_guarded(&mut self, flow: FlowId, output: Output) {
        if !self.guarded.contains(&flow) {
            self.items.push_back(Item::Plain(output));
        }
    }

    pub fn update(&mut self, update: EntryUpdate) {
        if let EntryUpdate::Install(entry) | EntryUpdate::Opened(entry) = &update
            && (self.is_frozen(entry.flow) || entry.directions == Directions::Neither)
        {
            return;
        }
        self.items.push_back(Item::Plain(Output::Update(update)));
    }

    pub fn pinhole(&mut self, flow: FlowId) {
        self.push_unless_guarded(flow, Output::Pinhole(flow));
    }

    pub fn knock(&mut self, flow: FlowId) {
        self.push_unless_guarded(flow, Output::Knock(flow));
    }

    pub fn fence(&mut self, flow: FlowId) {
        self.push_unless_guarded(flow, Output::Fence(flow));
    }

    pub fn back(&mut self, flow: FlowId) {
        self.push_unless_guarded(flow, Output::Back(flow));
    }

    pub fn restart(&mut self, flow: FlowId) {
        self.items.push_back(Item::Plain(Output::Restart(flow)));
    }

    pub fn ending(&mut self, flow: FlowId) {
        self.items.push_back(Item::Plain(Output::Ending(flow)));
    }

    pub fn survey(&mut self, grant: FlowId, flows: u128) {
        self.items.push_back(Item::Plain(Output::Survey { grant, flows }));
    }

    pub fn tell(&mut self, grant: FlowId, flows: u128) {
        self.items.push_back(Item::Plain(Output::Tell { grant, flows }));
    }

    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Takes the next item, copying its bytes into `buf`. What does not fit `buf` is left out and counted.
    pub fn pop(&mut self, buf: &mut [u8]) -> Option<Output> {
        loop {
            let item = self.items.pop_front()?;
            if let Item::Plain(output) = item {
                return Some(output);
            }
            self.packets -= 1;
            let (Item::Transmit(_, _, bytes)
            | Item::Inject(bytes)
            | Item::Deliver(_, bytes)
            | Item::Egress(bytes)
            | Item::Carry(_, bytes)
            | Item::Ingress(_, bytes)) = &item
            else {
                continue;
            };
            let len = bytes.len();
            let Some(place) = buf.get_mut(..len) else {
                self.overflowed += 1;
                continue;
            };
            place.copy_from_slice(bytes);
            return Some(match item {
                Item::Transmit(local, to, _) => Output::Transmit { local, to, len },
                Item::Inject(_) => Output::Inject { len },
                Item::Deliver(flow, _) => Output::Deliver { flow, len },
                Item::Egress(_) => Output::Egress { len },
                Item::Carry(flow, _) => Output::Carry { flow, len },
                Item::Ingress(from, _) => Output::Ingress { from, len },
                Item::Plain(output) => output,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::entry::PathId;

    #[test]
    fn updates_keep_their_place_and_are_never_refused() {
        let mut queue = OutputQueue::new(1);
        queue.inject(alloc::vec![1, 2, 3]);
        queue.update(EntryUpdate::RemovePath(PathId(7)));
        queue.inject(alloc::vec![4]);
        let mut buf = [0; 16];
        assert_eq!(queue.pop(&mut buf), Some(Output::Inject { len: 3 }));
        assert_eq!(buf[..3], [1, 2, 3]);
        assert_eq!(queue.pop(&mut buf), Some(Output::Update(EntryUpdate::RemovePath(PathId(7)))));
        assert_eq!(queue.pop(&mut buf), None);
        assert_eq!(queue.overflowed, 1);
    }
}
